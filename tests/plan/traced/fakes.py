"""What has to differ while the engine runs on tensors without values (see engine.py): functions that
ask for a value or keep more on a CPU than on a GPU, each replaced within a context.

`Live` counts bytes: each storage from its birth to its end, by what it was made for; real or
fake."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rekindle.objectives.tokens import cross_entropy
from rekindle.train import (
    attention,
    compat,
    dropout,
    kernels,
    optimizer,
    parallel,
    part,
    pipeline,
    teacher,
)


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """`owner.name` calls `by`, which gets the original function before the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    setattr(owner, name, called)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def engine_without_values(live: "Live", shape: Callable[[Any], Any], fake: bool) -> Iterator[None]:
    """The engine runs, and `live` counts it; `shape` gives what a stage receives and hands on."""
    with contextlib.ExitStack() as stack:
        contexts = [
            # DTensor finds out shapes with tensors of the whole size, which no rank holds
            replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", _in(live.pausing)),
            replaced(part.Part, "forward", _in(live.forward)),
            replaced(FSDPParam, "to_accumulated_grad_if_needed", functools.partial(_whole, live)),
        ]
        if fake:  # which rank is where is a tensor, too, and its values are needed; copies of a
            # network are made of tensors on the meta device
            real, told = _in(unset_fake_temporarily), _told(live, shape)
            contexts += [
                replaced(DeviceMesh, "__init__", real),
                replaced(teacher, "init_device_mesh", real),
                replaced(parallel, "cut", real),
                replaced(optimizer, "_group_of_ends", real),
                replaced(pipeline, "PipelineStage", lambda _, *args, **more: told(*args, **more)),
                replaced(schedules, "_batch_p2p", _under_way),
            ]
        for context in contexts:
            stack.enter_context(context)
        yield


def _in(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[..., Any]:
    """Has a function run in a context."""

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return called


def _whole(live: "Live", function: Any, parameter: Any) -> None:
    """Says of gradients that FSDP adds up whole, before it reduces them, that they are that."""
    function(parameter)
    if parameter.unsharded_accumulated_grad is not None:
        whole = parameter.unsharded_accumulated_grad
        live.call(GRADIENTS, [getattr(whole, "_local_tensor", whole)])


class _Sent:
    """Keeps what is under way until a caller waits for it, as NCCL and gloo do."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        self.tensors = []


def _under_way(function: Any, operations: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [operation.tensor for operation in operations]
    return [*function(operations, *args, **kwargs), _Sent(tensors)]


def _told(live: "Live", shape: Callable[[Any], Any]) -> Any:
    """A stage that knows its shapes and need not ask its neighbours."""

    class Told(PipelineStage):
        def __init__(self, part: Any, index: int, count: int, device: Any, group: Any) -> None:
            received, sent = shape(part)
            super().__init__(part, index, count, device, received, sent, group=group)

        def _setup_forward_recv_info(self, *given: Any) -> None:
            super()._setup_forward_recv_info(*given)
            self._buffers(self.args_recv_info)

        def _setup_backward_recv_info(self, *given: Any) -> None:
            super()._setup_backward_recv_info(*given)
            self._buffers(self.grad_recv_info)

        @staticmethod
        def _buffers(infos: Any) -> None:
            made = [info.buffer for one in infos.values() for info in one]
            live.call(PIPELINE, (b for b in made if b is not None))

        def _warmup_forward_vote(self, *_: Any, **__: Any) -> torch.Tensor:
            return torch.tensor([1], dtype=torch.int32)

        _warmup_backward_result = _warmup_forward_vote

    return Told


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Under autocast CUDA computes some operations in fp32 that the CPU leaves as they are
    (docs.pytorch.org/docs/stable/amp.html), and keeps a byte an element of a dropout's mask; one
    kernel takes all documents, and the loss makes more logits at a time. Its backward pass has a
    thread of its own, where a block that is computed again ends autocast's outermost region: copies
    of weights are forgotten with each block."""
    with (
        replaced(torch.autograd, "backward", _in_a_thread),
        replaced(F, "layer_norm", _in_fp32),
        replaced(torch, "pow", _in_fp32),
        replaced(F, "dropout", _dropout),
        replaced(dropout, "install", lambda _, network: None),
        replaced(dropout, "_drawn_on_cpu", lambda _, *given: dropout._drawn(*given)),
        replaced(kernels, "kernel_for", lambda *_: "varlen"),
        replaced(compat, "varlen_attn", _varlen),
        replaced(attention, "_draws_alike", lambda _, query, p: p.tp_size * p.cp_size == 1),
        replaced(attention, "sdpa", _without_dropout),
        replaced(cross_entropy, "rows_at_once", lambda rows, columns, _: rows(columns, "cuda")),
    ):
        yield


def _in_a_thread(function: Any, *args: Any, **kwargs: Any) -> Any:
    inside = torch.is_autocast_enabled("cpu")
    if inside:
        torch.autocast_decrement_nesting()
    try:
        return function(*args, **kwargs)
    finally:
        if inside:
            torch.autocast_increment_nesting()


def _without_dropout(function: Any, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
    """A kernel of CUDA keeps nothing more for dropout; the CPU has no such kernel."""
    return function(*args, **kwargs)


def _varlen(
    _: Any,
    query_THD: torch.Tensor,
    key_SGD: torch.Tensor,
    value_SGD: torch.Tensor,
    *__: Any,
    enable_gqa: bool = False,
    **___: Any,
) -> torch.Tensor:
    """Keeps what the varlen kernel keeps: its inputs, its output and a sum a query and head."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query_THD, key_SGD, value_SGD))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)
    return out[0].transpose(0, 1)


def _in_fp32(function: Any, *args: Any, **kwargs: Any) -> Any:
    def widened(x: Any) -> Any:
        return x.float() if isinstance(x, torch.Tensor) and x.dtype in attention.HALVES else x

    if torch.is_autocast_enabled("cpu"):
        args, kwargs = tree_map(widened, (args, kwargs))
    return function(*args, **kwargs)


def _dropout(
    _: Any, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input


PARAMETERS, GRADIENTS, MOMENTS = "parameters", "gradients", "optimizer"
ACTIVATIONS, GATHERED, CASTS = "activations", "gathered weights", "copies of weights"
TEACHER = "teacher"
PIPELINE, TEMPORARIES = "pipeline buffers", "temporaries"
_CAST = torch.ops.aten._to_copy.default


@dataclasses.dataclass
class Held:
    """A storage: its bytes, the phase in which it was made and by what operation; `kind` where it
    is known what it is for. `born` counts storages; `was` are its bytes at the worst moment."""

    size: int
    phase: str
    made_by: str
    kind: str = ""
    born: int = 0
    was: int = 0


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all living tensors made while active: most since `begin`, at growth `at`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.phase = ""
        self.peaks: dict[str, int] = {}
        self.paused = False
        self.asked = 0  # at which growth of a step to look
        self.worst: list[Held] = []
        self.phase_of_peak = ""
        self._growths = self.peak = self.at = self._born = 0
        self._held: dict[int, Held] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "_local_tensor") or kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its own operations on local tensors come by here
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.note(leaf, str(func))
            if func is _CAST:
                self._copied(args[0], out)
        return out

    def note(self, tensor: torch.Tensor, made_by: str = "") -> None:
        """Count the tensor's storage, if it is a new one."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            self._born += 1
            held = Held(0, self.phase, f"{made_by} {str(tensor.dtype)[6:]}{list(tensor.shape)}")
            held.born = self._born
            self._held[storage._cdata] = held
            self._grow(held, storage.nbytes())
            weakref.finalize(storage, self._end, storage._cdata)

    def _copied(self, source: torch.Tensor, out: torch.Tensor) -> None:
        held = self._held.get(source.untyped_storage()._cdata)
        of_weights = held is not None and held.kind in (PARAMETERS, GATHERED)
        if of_weights and source.numel() == out.numel():
            self.call(CASTS, [out])

    def call(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what tensors are for."""
        for tensor in tensors:
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None:
                held.kind = kind

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A phase, from which what is still there is kept for the backward pass."""
        self.phase, since = "forward", self._born
        try:
            yield
        finally:
            self.phase = "backward"
            for held in self._held.values():
                if held.born > since:
                    held.kind = held.kind or ACTIVATIONS

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def begin(self, asked: int = 0) -> None:
        """A step begins; at its growth number `asked` what there is is noted in `worst`."""
        self.asked, self.worst = asked, []
        self.peaks, self._growths, self.peak, self.at = {}, 0, 0, 0
        self._reach()

    def _grow(self, held: Held, by: int) -> None:
        held.size += by
        self.bytes += by
        if by > 0:
            self._growths += 1
            if self._growths == self.asked:
                self.worst = list(self._held.values())
                for other in self.worst:
                    other.was = other.size
        self._reach()

    def _reach(self) -> None:
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.bytes)
        if self.bytes > self.peak:
            self.peak, self.at = self.bytes, self._growths
            self.phase_of_peak = self.phase

    def _end(self, key: int) -> None:
        self.bytes -= self._held.pop(key).size

    @contextlib.contextmanager
    def counting(self) -> Iterator[Self]:
        """Active, resized storages included."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, *args: Any) -> Any:
            done = resize(storage, *args)
            if (held := self._held.get(storage._cdata)) is not None:
                held.kind = GATHERED  # FSDP gives memory back so, and takes it again
                self._grow(held, storage.nbytes() - held.size)
            return done

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
