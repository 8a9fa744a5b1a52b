"""The trained weights as safetensors, gathered one parameter at a time and written in files of
bounded size, under the names the architecture's own checkpoints have.

What training took apart is joined again on rank 0: fused projections, adapters and the matrix they
adapt. No rank holds more than one output file and one parameter."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rekindle.train.families import Origin
from rekindle.train.parallel import Parts
from rekindle.train.weights import INDEX, whole_of

FILE_BYTES = 2 << 30


def export(parts: Parts, folder: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write `model.safetensors`, or several files and their index, into `folder`. All ranks have to
    call it; rank 0 writes."""
    writer = _Writer(folder, file_bytes) if dist.get_rank() == 0 else None
    joiner = _Joiner(parts)
    for name, tensor in gathered(parts):
        for stored, whole in joiner.add(name, tensor) if writer else ():
            assert writer is not None
            writer.add(stored, whole)
    if writer is not None:
        writer.close()
    if dist.get_world_size() > 1:
        dist.barrier()


def gathered(parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer of the whole network, whole, on rank 0's CPU, in an
    order all ranks share; other ranks get empty tensors. A tied parameter comes once."""
    held: dict[str, torch.Tensor] = {
        name: p for name, p in parts.parameters() if name not in parts.tied
    }
    for stage in parts.stages:
        saved = stage.part.network.state_dict(keep_vars=True)
        held |= {n: b for n, b in stage.part.network.named_buffers() if n in saved}
    place = parts.mesh.place("pp")
    lead = dist.get_rank() if _leads(parts) else -1
    mine = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in held.items()]
    everyone: list[tuple[int, int, list[tuple[str, str, list[int]]]]] = [
        None  # type: ignore[list-item]
    ] * dist.get_world_size()
    dist.all_gather_object(everyone, (place, lead, mine))
    for owner, rank, names in sorted((x for x in everyone if x[1] >= 0), key=lambda x: x[0]):
        for name, dtype, shape in names:
            whole = whole_of(held[name]).cpu() if place == owner else torch.empty(0)
            if rank != 0:
                whole = _sent(whole, rank, getattr(torch, dtype), shape, parts.mesh.device)
            yield name, whole


def _leads(parts: Parts) -> bool:
    """Whether this rank speaks for its pipeline rank."""
    mesh = parts.mesh
    return all(mesh.place(axis) == 0 for axis in ("dp", "shard", "cp", "tp"))


def _sent(
    whole: torch.Tensor, source: int, dtype: torch.dtype, shape: list[int], device: torch.device
) -> torch.Tensor:
    if dist.get_rank() == source:
        dist.send(whole.to(device).contiguous(), dst=0)
    elif dist.get_rank() == 0:
        buffer = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(buffer, src=source)
        return buffer.cpu()
    return whole


class _Joiner:
    """Turns parameters as they are trained into tensors as they are stored."""

    def __init__(self, parts: Parts) -> None:
        self.origins = parts.origins
        self.scaling = parts.adapters.scaling if parts.adapters else 0.0
        self.waiting: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        self.pieces: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        self.wanted: dict[str, int] = defaultdict(int)
        for name, origin in parts.origins.items():
            if name not in parts.tied:
                self.wanted[origin.name] += 1

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The stored tensors that are complete with this one."""
        if ".lora_" not in name and ".base_layer.weight" not in name:
            yield from self._place(name, tensor)
            return
        module = name.split(".lora_")[0].removesuffix(".base_layer.weight")
        kind = "A" if ".lora_A." in name else "B" if ".lora_B." in name else "base"
        found = self.waiting[module]
        found[kind] = tensor
        if len(found) == 3:
            update = found["B"].float() @ found["A"].float()
            merged = (found["base"].float() + self.scaling * update).to(found["base"].dtype)
            del self.waiting[module]
            yield from self._place(f"{module}.base_layer.weight", merged)

    def _place(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        origin = self.origins.get(name, Origin(name))
        tensor = tensor.T if origin.transposed else tensor
        pieces = self.pieces[origin.name]
        pieces[origin.start] = tensor
        if len(pieces) >= self.wanted.get(origin.name, 1):
            ordered = [pieces[start] for start in sorted(pieces)]
            del self.pieces[origin.name]
            yield origin.name, torch.cat(ordered, dim=-1) if len(ordered) > 1 else ordered[0]


class _Writer:
    """Collects tensors up to a size, writes them, and names the files when their number is
    known."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        self.folder, self.file_bytes = folder, file_bytes
        self.tensors: dict[str, torch.Tensor] = {}
        self.bytes = self.total = 0
        self.files: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        if self.tensors and self.bytes + tensor.nbytes > self.file_bytes:
            self._flush()
        self.tensors[name] = tensor.contiguous()
        self.bytes += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        path = self.folder / f"part-{len(self.files):05}.safetensors"
        save_file(self.tensors, path, metadata={"format": "pt"})
        self.files.append((path, list(self.tensors)))
        self.tensors, self.bytes = {}, 0

    def close(self) -> None:
        self._flush()
        count = len(self.files)
        index: dict[str, str] = {}
        for i, (path, names) in enumerate(self.files, 1):
            name = f"model-{i:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
            path.rename(self.folder / name)
            index |= dict.fromkeys(names, name)
        if count > 1:
            said: Mapping[str, object] = {
                "metadata": {"total_size": self.total}, "weight_map": index,
            }  # fmt: skip
            (self.folder / INDEX).write_text(json.dumps(said, indent=2) + "\n")
