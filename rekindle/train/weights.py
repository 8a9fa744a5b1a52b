"""Where weights come from and how they leave, one tensor at a time: no rank ever holds the model.

A network is built on the meta device while `Recorder` notes what its initialisation does. Every
rank fills its own shards: from slices of a safetensors checkpoint, or by replaying the notes for
one whole parameter, seeded by (seed, name): fresh weights are the same in every layout."""

import contextlib
import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.errors import DataError
from rekindle.spec.heartbeat import beat
from rekindle.train import quantised
from rekindle.train.modules import Origin

Interval = tuple[int, int]
INDEX = "model.safetensors.index.json"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in-place operations on meta tensors, by storage, to be done later on real ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: dict[int, list[_Note]] = defaultdict(list)
        self.originals: dict[int, torch.Tensor] = {}
        self.kept: list[torch.Tensor] = []  # a freed storage's address could be given out again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, torch.Tensor) and target.is_meta:
            place = target.size(), target.stride(), int(target.storage_offset())
            note = _Note(func, tuple(args[1:]), dict(kwargs or {}), *place)
            self.notes[_storage(target)].append(note)
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class _Note:
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def deferred(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Networks built inside have meta parameters and real buffers; a `recorder` goes on."""
    recorder = recorder or Recorder()
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            original = param.detach()
            param = nn.Parameter(original.to("meta"), requires_grad=param.requires_grad)
            recorder.originals[_storage(param)] = original
            recorder.kept.append(param)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        with recorder:
            yield recorder
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def transform(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer by what `change` makes of it; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                value, learns = change(parameter.detach()), parameter.requires_grad
                made[id(parameter)] = nn.Parameter(value, requires_grad=learns)
            child._parameters[name] = made[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = change(buffer)


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Give floating-point values that type, but rotary frequencies none narrower than fp32."""
    narrower = torch.finfo(dtype).bits < 32
    rotary = [m for m in module.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    exact = {id(b) for m in rotary if narrower for b in m.buffers(recurse=False)}
    transform(module, lambda t: t.to(dtype) if t.is_floating_point() and id(t) not in exact else t)


class Source:
    """Starting values by parameter name: those of a checkpoint where it has them, else fresh ones.
    Checkpoints of a bare backbone leave out `prefix`, its name in the network."""

    def __init__(
        self, network: nn.Module, recorder: Recorder, seed: int, folder: Path | None = None
    ) -> None:
        self.recorder, self.seed = recorder, seed
        self.checkpoint = Checkpoint(folder) if folder else None
        self.prefix = str(getattr(network, "base_model_prefix", ""))
        self.storages: dict[str, tuple[int, torch.Size, tuple[int, ...], torch.dtype]] = {}
        self.include(network, "")
        self.fresh: list[str] = []
        self._last: tuple[str, torch.Tensor] | None = None

    def include(self, network: nn.Module, part: str = ".lora_") -> None:
        for name, p in network.named_parameters(remove_duplicate=False):
            if part in name:
                self.storages[name] = _storage(p), p.shape, p.stride(), p.dtype

    def read(self, name: str, intervals: Sequence[Interval]) -> torch.Tensor:
        """The part `intervals` (one [start, end) a dimension) of a parameter, on the CPU."""
        index = tuple(slice(*interval) for interval in intervals)
        if self.checkpoint is not None:
            shape = self.storages[name][1]
            found = self.checkpoint.find(name, self.prefix, tuple(shape))
            if found is not None:
                return self.checkpoint.slice(found)[index]  # type: ignore[no-any-return]
            if name not in self.fresh:
                self.fresh.append(name)
        return self._replayed(name)[index]

    def _replayed(self, name: str) -> torch.Tensor:
        """A whole parameter with its fresh values; remembers the last one."""
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        storage, shape, stride, dtype = self.storages[name]
        notes = self.recorder.notes.get(storage, [])
        for note in notes:
            values = (*note.args, *note.kwargs.values())
            if any(isinstance(v, torch.Tensor) and v.is_meta for v in values):
                what = f"cannot build the starting value of {name} one tensor at a time"
                fix = "start from a checkpoint with this weight"
                raise DataError(f"{what} ({note.func})", where="model.source", fix=fix)
        original = self.recorder.originals.get(storage)
        if original is not None and not any(n.size.numel() == shape.numel() for n in notes):
            whole = original.clone()
        else:
            whole = torch.empty_strided(shape, stride, dtype=dtype)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            words = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()[:8]
            torch.manual_seed(int.from_bytes(words, "big") >> 1)
            for note in notes:
                view = whole.as_strided(note.size, note.stride, note.offset)
                note.func(view, *note.args, **note.kwargs)
        self._last = (name, whole)
        return whole


class Checkpoint:
    """The tensors of a folder of safetensors files, read slice by slice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.files: dict[str, str] = {}  # which file holds which tensor
        if (folder / INDEX).is_file():
            self.files |= json.loads((folder / INDEX).read_text())["weight_map"]
            return
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self.files |= dict.fromkeys(file.keys(), path.name)
        if not self.files:
            what = f"there are no safetensors weights in {folder}"
            fix = "convert the checkpoint: model.save_pretrained(folder) writes safetensors"
            raise DataError(what, where="model.source", fix=fix)

    def find(self, name: str, prefix: str, shape: tuple[int, ...]) -> str | None:
        """The stored name of a parameter, with or without the backbone's, if the shape fits."""
        legacy = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        legacy = legacy.replace("LayerNorm.bias", "LayerNorm.beta")
        bare = [n.removeprefix(f"{prefix}.") for n in (name, legacy)] if prefix else []
        for candidate in (name, legacy, *bare):
            if candidate in self.files:
                fits = tuple(self.slice(candidate).get_shape()) == shape
                return candidate if fits else None
        return None

    def slice(self, name: str) -> Any:
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file].get_slice(name)


def intervals(tensor: torch.Tensor) -> list[Interval]:
    """Which part of a tensor this rank holds, one [start, end) a dimension. Tensor parallelism
    (the mesh's last dimension) divides first, then FSDP: 7 rows on 4 ranks are 2, 2, 2, 1."""
    found = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return found
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if not divides(placement):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        start, end = found[dim]
        size = -(-(end - start) // mesh.size(axis))
        low = min(start + coordinate[axis] * size, end)
        found[dim] = (low, min(low + size, end))
    return found


def divides(placement: Placement) -> bool:
    """Whether a placement cuts its dimension; FSDP over tensor parallelism has its own kind."""
    return isinstance(placement, Shard | _StridedShard)


def fill(parts: Sequence[nn.Module], source: Source, origins: Mapping[str, Origin]) -> None:
    """Give every parameter of `parts` its starting value, in place."""
    with torch.no_grad():
        for part in parts:
            for name, parameter in part.named_parameters():
                local = local_of(parameter)
                beat()
                if local.numel():
                    local.copy_(_value(source, origins.get(name, Origin(name)), parameter))
            for name, layer in quantised.layers(part):
                stored, like = f"{name}.weight", torch.empty(layer.shape, device="meta")
                layer.load(_value(source, origins.get(stored, Origin(stored)), like))
                beat()


def _value(source: Source, origin: Origin, parameter: torch.Tensor) -> torch.Tensor:
    wanted = intervals(parameter)
    if not origin.transposed:
        rows = (wanted[0][0] + origin.start, wanted[0][1] + origin.start) if wanted else (0, 0)
        return source.read(origin.name, [rows, *wanted[1:]] if wanted else [])
    (top, bottom), columns = wanted
    return source.read(origin.name, [columns, (top + origin.start, bottom + origin.start)]).T


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a DTensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: torch.Tensor | quantised.FourBit) -> torch.Tensor:
    """The whole tensor, on every rank that holds a shard of it (a collective)."""
    tensor = tensor.whole() if isinstance(tensor, quantised.FourBit) else tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
