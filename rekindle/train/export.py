"""The trained weights as safetensors, gathered one parameter at a time, in files of bounded size,
under the names that `save_pretrained` writes (stored.py). Format: the safetensors README, "Format".

What training took apart is joined again on rank 0: fused projections, adapters and their matrix. No
rank holds more than such a matrix beside its own shard."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from rekindle.train.mesh import of_all
from rekindle.train.modules import Origin
from rekindle.train.parts import Parts
from rekindle.train.quantised import FourBit, layers
from rekindle.train.stored import INDEX, Saving
from rekindle.train.weights import whole_of

FILE_BYTES = 2 << 30
_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# (place in the pipeline, rank that speaks for it or -1, name, type and shape of what it holds)
_Listed = tuple[int, int, list[tuple[str, str, list[int]]]]


def export(parts: Parts, folder: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write `model.safetensors`, or files and their index. All ranks call it; rank 0 writes."""
    listed = _listed(parts, _held(parts))
    if dist.get_rank() == 0:
        names, room = _rehearsed(parts, listed)
        writer = _Writer(folder, file_bytes, room)
        joiner, saving = _Joiner(parts), Saving(parts.network, names)
        for name, tensor in gathered(parts):
            for whole_name, whole in joiner.add(name, tensor):
                for stored, part in saving.add(whole_name, whole):
                    writer.add(stored, part)
        writer.close()
    else:
        for _ in gathered(parts):
            pass
    if dist.get_world_size() > 1:
        dist.barrier()


def _rehearsed(parts: Parts, listed: list[_Listed]) -> tuple[list[str], int]:
    """The parameters and buffers of the network, and bytes that suffice for a header of all tensors
    that they are stored as: what `export` does, with tensors that have no values."""
    joiner = _Joiner(parts)
    whole: dict[str, torch.Tensor] = {}
    for _, _, tensors in listed:
        for name, _, shape in tensors:
            whole |= joiner.add(name, torch.empty(shape, device="meta"))
    saving = Saving(parts.network, whole)
    entries = [
        len(stored) + 16 * part.ndim + 128
        for name, tensor in whole.items()
        for stored, part in saving.add(name, tensor)
    ]
    return list(whole), -(-(128 + sum(entries)) // 8) * 8


def gathered(parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer of the whole network, whole, on rank 0's CPU, in an
    order all ranks share; other ranks get empty tensors. A tied parameter comes once."""
    held = _held(parts)
    place = parts.mesh.place("pp")
    wholly: Any = parts.stepper.whole if parts.stepper else whole_of
    for owner, rank, names in _listed(parts, held):
        for name, dtype, shape in names:
            whole = wholly(held[name]).cpu() if place == owner else torch.empty(0)
            if rank != 0 and dist.get_rank() == rank:
                dist.send(whole.to(parts.mesh.device).contiguous(), dst=0)
            elif rank != 0 and dist.get_rank() == 0:
                kind, device = getattr(torch, dtype), parts.mesh.device
                buffer = torch.empty(shape, dtype=kind, device=device)
                dist.recv(buffer, src=rank)
                whole = buffer.cpu()
            yield name, whole


def _held(parts: Parts) -> dict[str, torch.Tensor | FourBit]:
    held = {name: p for name, p in parts.parameters() if name not in parts.tied}
    found = (one for stage in parts.stages for one in layers(stage.part.network))
    return {**held, **dict(parts.buffers()), **{f"{name}.weight": x for name, x in found}}


def _listed(parts: Parts, held: Mapping[str, torch.Tensor | FourBit]) -> list[_Listed]:
    """What each pipeline rank holds, first stage first; the same on all ranks (a collective)."""
    # one rank speaks for its pipeline rank
    lead = dist.get_rank() if parts.mesh.leads("dp", "shard", "cp", "tp") else -1
    shapes = {name: list(getattr(t, "ds_shape", t.shape)) for name, t in held.items()}
    mine = [(n, str(t.dtype).removeprefix("torch."), shapes[n]) for n, t in held.items()]
    everyone: list[_Listed] = of_all((parts.mesh.place("pp"), lead, mine))
    return sorted((x for x in everyone if x[1] >= 0), key=lambda x: x[0])


class _Joiner:
    """Turns parameters as they are trained into tensors as they are stored."""

    def __init__(self, parts: Parts) -> None:
        self.origins = parts.origins
        self.scaling = parts.scaling or 0.0
        self.waiting: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        self.pieces: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        self.wanted: dict[str, int] = defaultdict(int)
        for name, origin in parts.origins.items():
            if name not in parts.tied:
                self.wanted[origin.name] += 1

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
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
    """Appends tensors to files of some size, each behind `room` for a header, and names them."""

    def __init__(self, folder: Path, file_bytes: int, room: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        self.folder, self.file_bytes, self.room = folder, file_bytes, room
        self.entries: dict[str, dict[str, Any]] = {}
        self.bytes = self.total = 0
        self.stream: BinaryIO | None = None
        self.files: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        full = self.entries and self.bytes + tensor.nbytes > self.file_bytes
        # readers look at a tensor where it lies, which its type has to allow
        if full or self.bytes % tensor.element_size():
            self._flush()
        if self.stream is None:
            self.stream = (self.folder / f"part-{len(self.files):05}.safetensors").open("wb")
            self.stream.seek(self.room)
        end = self.bytes + tensor.nbytes
        self.stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        entry = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape)}
        self.entries[name] = {**entry, "data_offsets": [self.bytes, end]}
        self.total += tensor.nbytes
        self.bytes = end

    def _flush(self) -> None:
        assert self.stream is not None
        said = {"__metadata__": {"format": "pt"}, **self.entries}
        header = json.dumps(said, separators=(",", ":")).encode().ljust(self.room - 8)
        assert len(header) == self.room - 8
        self.stream.seek(0)
        self.stream.write(len(header).to_bytes(8, "little") + header)
        self.stream.close()
        self.files.append((Path(self.stream.name), list(self.entries)))
        self.stream, self.entries, self.bytes = None, {}, 0

    def close(self) -> None:
        self._flush()
        count = len(self.files)
        index: dict[str, str] = {}
        for i, (path, names) in enumerate(self.files, 1):
            name = f"model-{i:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
            path.rename(self.folder / name)
            index |= dict.fromkeys(names, name)
        if count > 1:
            said = {"metadata": {"total_size": self.total}, "weight_map": index}
            (self.folder / INDEX).write_text(json.dumps(said, indent=2) + "\n")
