"""The trained weights as safetensors, gathered one parameter at a time, in files of
bounded size, under the names that `save_pretrained` writes (stored.py). Format: the
safetensors README, "Format".

What training took apart is joined again on rank 0: fused projections, adapters and their
matrix. No rank holds more than such a matrix beside its own shard.

Adapters on a base in 4 bits are merged into the rounded weights, in fp32, so that the
exported model is the one that was trained and validated, and the gate scores it. Merging
into the weights in full is rejected: no step has seen that model. So are adapters alone
as a model: each reader would need the same version of bitsandbytes. The cost is that the
rounding stays in the model, and a later training in 4 bits rounds once more."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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


class _Tensor(NamedTuple):
    """A tensor that a pipeline rank holds."""

    name: str
    dtype: str
    shape: list[int]


class _Holder(NamedTuple):
    """What one place in the pipeline holds."""

    place: int
    rank: int
    """The rank that speaks for it."""
    tensors: list[_Tensor]


def export(parts: Parts, folder: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write `model.safetensors`, or files and their index. All ranks call it; rank 0 writes."""
    holders = _holders(parts, _held(parts))
    if dist.get_rank() == 0:
        names, header_bytes = _rehearse(parts, holders)
        writer = _SafetensorsWriter(folder, file_bytes, header_bytes)
        joiner = _Joiner(parts)
        saving = Saving(parts.network, names)
        for name, tensor in gathered(parts):
            for whole_name, whole in joiner.add(name, tensor):
                for stored_name, stored in saving.add(whole_name, whole):
                    writer.add(stored_name, stored)
        writer.close()
    else:
        for _ in gathered(parts):
            pass
    if dist.get_world_size() > 1:
        dist.barrier()


def _rehearse(parts: Parts, holders: list[_Holder]) -> tuple[list[str], int]:
    """The parameters and buffers of the network, and bytes that suffice for a header of
    all tensors that they are stored as: what `export` does, with tensors that have no
    values."""
    joiner = _Joiner(parts)
    whole: dict[str, torch.Tensor] = {}
    for holder in holders:
        for tensor in holder.tensors:
            whole |= joiner.add(tensor.name, torch.empty(tensor.shape, device="meta"))
    saving = Saving(parts.network, whole)
    header_bytes = 128
    for name, whole_tensor in whole.items():
        for stored_name, stored in saving.add(name, whole_tensor):
            # a name, its type, its offsets, and a number for each dimension
            header_bytes += len(stored_name) + 16 * stored.ndim + 128
    return list(whole), -(-header_bytes // 8) * 8


def gathered(parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer of the whole network, whole, on rank 0's CPU.

    The order is the same on all ranks; other ranks get empty tensors. A tied parameter
    comes once."""
    held = _held(parts)
    place = parts.mesh.place("pp")
    device = parts.mesh.device
    gather: Any = parts.stepper.whole if parts.stepper else whole_of
    for holder in _holders(parts, held):
        for tensor in holder.tensors:
            whole = torch.empty(0)
            if place == holder.place:
                whole = gather(held[tensor.name]).cpu()
            if holder.rank != 0 and dist.get_rank() == holder.rank:
                dist.send(whole.to(device).contiguous(), dst=0)
            elif holder.rank != 0 and dist.get_rank() == 0:
                dtype = getattr(torch, tensor.dtype)
                received = torch.empty(tensor.shape, dtype=dtype, device=device)
                dist.recv(received, src=holder.rank)
                whole = received.cpu()
            yield tensor.name, whole


def _held(parts: Parts) -> dict[str, torch.Tensor | FourBit]:
    """What this rank holds, by name in the whole network; of tied parameters one."""
    held: dict[str, torch.Tensor | FourBit] = {}
    for name, parameter in parts.parameters():
        if name not in parts.tied:
            held[name] = parameter
    held |= parts.buffers()
    for network in parts.networks:
        for name, layer in layers(network):
            held[f"{name}.weight"] = layer
    return held


def _holders(parts: Parts, held: Mapping[str, torch.Tensor | FourBit]) -> list[_Holder]:
    """What each pipeline rank holds, first stage first; the same on all ranks (a collective)."""
    # one rank speaks for its pipeline rank
    leads = parts.mesh.leads("dp", "shard", "cp", "tp")
    tensors = []
    for name, tensor in held.items():
        # DeepSpeed leaves an empty parameter, and says its shape beside it
        shape = list(getattr(tensor, "ds_shape", tensor.shape))
        tensors.append((name, str(tensor.dtype).removeprefix("torch."), shape))
    # ranks take no named tuples from each other, see launch/meeting.py
    lead = (parts.mesh.place("pp"), dist.get_rank(), tensors) if leads else None
    holders = []
    for held_by_rank in of_all(lead):
        if held_by_rank is not None:
            place, rank, of_rank = held_by_rank
            holders.append(_Holder(place, rank, [_Tensor(*tensor) for tensor in of_rank]))
    return sorted(holders, key=lambda holder: holder.place)


class _Joiner:
    """Turns parameters as they are trained into tensors as they are stored."""

    def __init__(self, parts: Parts) -> None:
        self.origins = parts.origins
        self.scaling = parts.scaling or 0.0
        # of a matrix with an adapter: "base", "A" and "B", until all three are there
        self.waiting: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        # of a fused tensor: its pieces by where they start, until all are there
        self.pieces: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        self.piece_counts: dict[str, int] = defaultdict(int)
        for name, origin in parts.origins.items():
            if name not in parts.tied:
                self.piece_counts[origin.name] += 1

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What is whole now that this parameter is there, by the name that it is stored under."""
        if ".lora_" not in name and ".base_layer.weight" not in name:
            yield from self._place(name, tensor)
            return
        module = name.split(".lora_")[0].removesuffix(".base_layer.weight")
        factors = self.waiting[module]
        if ".lora_A." in name:
            factors["A"] = tensor
        elif ".lora_B." in name:
            factors["B"] = tensor
        else:
            factors["base"] = tensor
        if len(factors) == 3:
            base = factors["base"]
            update = factors["B"].float() @ factors["A"].float()
            merged = (base.float() + self.scaling * update).to(base.dtype)
            del self.waiting[module]
            yield from self._place(f"{module}.base_layer.weight", merged)

    def _place(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        origin = self.origins.get(name, Origin(name))
        pieces = self.pieces[origin.name]
        pieces[origin.start] = tensor.T if origin.transposed else tensor
        if len(pieces) >= self.piece_counts.get(origin.name, 1):
            ordered = [pieces[start] for start in sorted(pieces)]
            del self.pieces[origin.name]
            whole = torch.cat(ordered, dim=-1) if len(ordered) > 1 else ordered[0]
            yield origin.name, whole


class _SafetensorsWriter:
    """Appends tensors to files of some size, each behind room for a header, and names them."""

    def __init__(self, folder: Path, file_bytes: int, header_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        self.folder = folder
        self.file_bytes = file_bytes
        self.header_bytes = header_bytes
        self.entries: dict[str, dict[str, Any]] = {}
        self.bytes = 0  # of tensors in the file at work
        self.total = 0  # of tensors in all files
        self.stream: BinaryIO | None = None
        self.files: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor; fp64 becomes fp32."""
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        is_full = self.entries and self.bytes + tensor.nbytes > self.file_bytes
        # readers look at a tensor where it lies, which its type has to allow
        if is_full or self.bytes % tensor.element_size():
            self._flush()
        if self.stream is None:
            self.stream = (self.folder / f"part-{len(self.files):05}.safetensors").open("wb")
            self.stream.seek(self.header_bytes)
        end = self.bytes + tensor.nbytes
        self.stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self.entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.bytes, end],
        }
        self.total += tensor.nbytes
        self.bytes = end

    def _flush(self) -> None:
        """Write the header of the file at work, and close it."""
        assert self.stream is not None
        fields = {"__metadata__": {"format": "pt"}, **self.entries}
        # its length stands before it, in 8 bytes
        room = self.header_bytes - 8
        header = json.dumps(fields, separators=(",", ":")).encode().ljust(room)
        assert len(header) == room
        self.stream.seek(0)
        self.stream.write(len(header).to_bytes(8, "little") + header)
        self.stream.close()
        self.files.append((Path(self.stream.name), list(self.entries)))
        self.stream = None
        self.entries = {}
        self.bytes = 0

    def close(self) -> None:
        """Give the files their names, and write the index where there is more than one."""
        self._flush()
        count = len(self.files)
        if count == 1:
            ((path, _),) = self.files
            path.rename(self.folder / "model.safetensors")
            return
        file_of_tensor: dict[str, str] = {}
        for number, (path, names) in enumerate(self.files, 1):
            name = f"model-{number:05}-of-{count:05}.safetensors"
            path.rename(self.folder / name)
            file_of_tensor |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.total}, "weight_map": file_of_tensor}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
