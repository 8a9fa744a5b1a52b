"""How weights are read, made and gathered, one tensor at a time, so that no rank ever
holds the whole model.

A network is built on the meta device while `Recorder` notes what its initialisation does.
Then every rank fills its own shards: from slices of a safetensors checkpoint, or by
replaying the notes for one whole parameter at a time. The random numbers of a replay are
seeded by (seed, name of the parameter), so fresh weights are the same in every layout."""

import contextlib
import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.errors import DataError
from rekindle.objectives.shards import Interval, intervals
from rekindle.spec.heartbeat import beat
from rekindle.train import quantised
from rekindle.train.modules import Origin
from rekindle.train.stored import JoinedTensors, Match, StoredTensor, headers_of, match


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in-place operations on meta tensors, by storage, to replay them on real ones."""

    notes: dict[int, list["_Note"]]
    """The operations on each storage, in order."""
    originals: dict[int, torch.Tensor]
    """Real values with which a module registered a parameter, by the storage of the meta
    parameter that took their place: no operation shows how they were made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes = defaultdict(list)
        self.originals = {}
        # a storage is known by its address, which could be given out again once freed
        self.never_freed: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, torch.Tensor) and target.is_meta:
            note = _Note(
                func,
                tuple(args[1:]),
                dict(kwargs or {}),
                target.size(),
                target.stride(),
                int(target.storage_offset()),
            )
            self.notes[_storage(target)].append(note)
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class _Note:
    """An in-place operation, and the view of a storage that it changes."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _storage(tensor: torch.Tensor) -> int:
    """The number of a tensor's storage, also on the meta device, where `data_ptr` is always 0."""
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def deferred(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Have networks that are built inside get meta parameters and real buffers.

    Yields the recorder of their initialisation: `recorder`, which then has notes of
    several networks, or a new one."""
    recorder = recorder or Recorder()
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            original = param.detach()
            param = nn.Parameter(original.to("meta"), requires_grad=param.requires_grad)
            recorder.originals[_storage(param)] = original
            recorder.never_freed.append(param)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        with recorder:
            yield recorder
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def transform(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer by what `change` makes of it; shared ones stay shared."""
    changed: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in changed:  # shared ones, such as tied embeddings, once
                value = change(parameter.detach())
                learns = parameter.requires_grad
                changed[id(parameter)] = nn.Parameter(value, requires_grad=learns)
            child._parameters[name] = changed[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = change(buffer)


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Give floating-point values this type, rotary frequencies at least fp32."""
    # In bf16 a frequency is off by up to 0.2 %: two radians at position 1,000.
    stay_exact = set[int]()
    if torch.finfo(dtype).bits < 32:
        for child in module.modules():
            if type(child).__name__.endswith("RotaryEmbedding"):
                stay_exact.update(id(buffer) for buffer in child.buffers(recurse=False))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or id(tensor) in stay_exact:
            return tensor
        return tensor.to(dtype)

    transform(module, change)


class WeightSource:
    """Starting values by parameter name: those of the checkpoint in `folder`, or fresh ones.

    Fresh beside a checkpoint are adapters, and a new head where the task `makes_head`.
    Raises DataError where the checkpoint lacks anything else (see `stored.match`)."""

    fresh: tuple[str, ...]
    """The parameters of a new head; without a checkpoint, under which all are fresh, none."""
    storages: dict[str, tuple[int, torch.Size, tuple[int, ...], torch.dtype]]
    """By parameter: the number of its storage, its shape, strides and type."""

    def __init__(
        self,
        network: nn.Module,
        recorder: Recorder,
        seed: int,
        folder: Path | None = None,
        makes_head: bool = False,
    ) -> None:
        self.recorder = recorder
        self.seed = seed
        self.network = network
        self.checkpoint: SafetensorsFolder | None = None
        self.match: Match | None = None
        self.fresh = ()
        if folder is not None:
            headers = headers_of(folder)
            self.match = match(network, headers, folder, makes_head)
            self.checkpoint = SafetensorsFolder(folder, headers)
            self.fresh = self.match.fresh
            # as from_pretrained leaves it: save_pretrained and export write by it
            network.__dict__["_weight_conversions"] = list(self.match.rules)
        self.storages = {}
        self.include(network, "")
        self._last: tuple[str, torch.Tensor] | None = None
        self._last_group: tuple[JoinedTensors, dict[str, torch.Tensor]] | None = None

    def include(self, network: nn.Module, part: str = ".lora_") -> None:
        """Note the storages of the parameters with `part` in their names, to find their
        notes when their values are read. By default these are adapters, which a network
        gets after it is built."""
        for name, parameter in network.named_parameters(remove_duplicate=False):
            if part in name:
                self.storages[name] = (
                    _storage(parameter),
                    parameter.shape,
                    parameter.stride(),
                    parameter.dtype,
                )

    def holds(self, name: str) -> bool:
        """Whether the checkpoint has this parameter or buffer."""
        return self.match is not None and (name in self.match.copied or name in self.match.joined)

    def read(self, name: str, intervals: Sequence[Interval]) -> torch.Tensor:
        """The part `intervals` (one [start, end) a dimension) of a parameter, on the CPU."""
        index = tuple(slice(*interval) for interval in intervals)
        if self.match is None or not self.holds(name):
            return self._replayed(name)[index]
        assert self.checkpoint is not None
        if name in self.match.joined:
            return self._joined(self.match.joined[name])[name][index]
        return self.checkpoint.slice(self.match.copied[name])[index]  # type: ignore[no-any-return]

    def _joined(self, group: JoinedTensors) -> dict[str, torch.Tensor]:
        """The whole parameters that a group of stored tensors makes.

        The last group is remembered: its parameters are read one after the other."""
        if self._last_group is not None and self._last_group[0] is group:
            return self._last_group[1]
        assert self.checkpoint is not None
        self._last_group = None  # its memory is free before the next group is read
        tensors = {name: self.checkpoint.slice(name)[:] for name, _ in group.sources}
        joined = group.made(tensors, self.network)
        self._last_group = group, joined
        return joined

    def _replayed(self, name: str) -> torch.Tensor:
        """A whole parameter with its fresh values.

        The last one is remembered: matrices that were fused are rows of one (`Origin`),
        and are read one after the other."""
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        storage, shape, stride, dtype = self.storages[name]
        notes = self.recorder.notes.get(storage, [])
        for note in notes:
            values = (*note.args, *note.kwargs.values())
            if any(isinstance(value, torch.Tensor) and value.is_meta for value in values):
                message = f"cannot build the starting value of {name} one tensor at a time"
                fix = "start from a checkpoint with this weight"
                raise DataError(f"{message} ({note.func})", where="model.source", fix=fix)
        original = self.recorder.originals.get(storage)
        is_overwritten = any(note.size.numel() == shape.numel() for note in notes)
        if original is not None and not is_overwritten:
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


class SafetensorsFolder:
    """The tensors of a folder of safetensors files, read slice by slice."""

    def __init__(self, folder: Path, headers: Mapping[str, StoredTensor]) -> None:
        self.folder = folder
        self.headers = headers
        self._open: dict[str, Any] = {}

    def slice(self, name: str) -> Any:
        """A tensor that is read once it is indexed, and no more of it than that."""
        file = self.headers[name].file
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file].get_slice(name)


def fill(parts: Sequence[nn.Module], source: WeightSource, origins: Mapping[str, Origin]) -> None:
    """Give every parameter of `parts` its starting value, in place, and every stored buffer."""
    with torch.no_grad():
        for part in parts:
            for name, parameter in part.named_parameters():
                local = local_of(parameter)
                beat()
                if local.numel():
                    local.copy_(_value(source, origins.get(name, Origin(name)), parameter))
            for name, layer in quantised.layers(part):
                weight = f"{name}.weight"
                whole = torch.empty(layer.shape, device="meta")
                layer.load(_value(source, origins.get(weight, Origin(weight)), whole))
                beat()
            for name, buffer in part.named_buffers():
                if source.holds(name):  # the others have the values that the architecture computes
                    local_of(buffer).copy_(source.read(name, intervals(buffer)))


def _value(source: WeightSource, origin: Origin, parameter: torch.Tensor) -> torch.Tensor:
    """The starting value of what this rank holds of a parameter."""
    bounds = intervals(parameter)
    if not bounds:  # a scalar
        return source.read(origin.name, [])
    top, bottom = bounds[0]
    rows = (top + origin.start, bottom + origin.start)
    if origin.transposed:
        _, columns = bounds
        return source.read(origin.name, [columns, rows]).T
    return source.read(origin.name, [rows, *bounds[1:]])


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a DTensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: torch.Tensor | quantised.FourBit) -> torch.Tensor:
    """The whole tensor, on every rank that holds a shard of it (a collective)."""
    if isinstance(tensor, quantised.FourBit):
        return tensor.whole()
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
