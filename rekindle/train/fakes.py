"""What has to differ while the engine runs on tensors without values (see trace.py): the few places
that ask for a value, and the few operations that keep more on a CPU than on a GPU.

Each is a context that puts something of ours in the place of a function and takes it away again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from rekindle.train import (
    attention,
    compat,
    dropout,
    kernels,
    linear_loss,
    optimizer,
    parallel,
    part,
    pipeline,
    teacher,
)
from rekindle.train.live import GRADIENTS, PIPELINE, Live


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is what `by` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, by(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def engine_without_values(live: Live, shape: Callable[[Any], Any], fake: bool) -> Iterator[None]:
    """The engine runs, and `live` counts it; `shape` gives what a stage of a pipeline receives and
    what it hands on."""
    with contextlib.ExitStack() as stack:
        for context in (
            _propagation_uncounted(live),
            replaced(part.Part, "forward", functools.partial(_forward, live)),
            replaced(FSDPParam, "to_accumulated_grad_if_needed", functools.partial(_whole, live)),
        ):
            stack.enter_context(context)
        if fake:
            for context in (
                _real_meshes(),
                replaced(pipeline, "PipelineStage", lambda _: _told(live, shape)),
                replaced(schedules, "_batch_p2p", _under_way),
            ):
                stack.enter_context(context)
        yield


def _forward(live: Live, function: Any) -> Any:
    """Its own phase."""

    @functools.wraps(function)
    def forward(part: Any, *args: Any, **kwargs: Any) -> Any:
        live.phase = "forward"
        since = live.mark()
        try:
            return function(part, *args, **kwargs)
        finally:
            live.phase = "backward"
            live.keep(since)

    return forward


def _whole(live: Live, function: Any) -> Any:
    """Says of gradients that FSDP adds up whole, before it reduces them, that they are that."""

    @functools.wraps(function)
    def called(parameter: Any) -> None:
        function(parameter)
        if parameter.unsharded_accumulated_grad is not None:
            whole = parameter.unsharded_accumulated_grad
            live.call(GRADIENTS, [getattr(whole, "_local_tensor", whole)])

    return called


@contextlib.contextmanager
def _propagation_uncounted(live: Live) -> Iterator[None]:
    """DTensor finds out shapes with tensors of the whole size, which no rank holds."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def uncounted(function: Any) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            before, live.paused = live.paused, True
            try:
                return function(*args, **kwargs)
            finally:
                live.paused = before

        return called

    with replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted):
        yield


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """Which rank is where is a tensor, too, and its values are needed; copies of a network are made
    of tensors on the meta device."""
    from torch.distributed.device_mesh import DeviceMesh

    def real(function: Any) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return called

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (DeviceMesh, "__init__"), (teacher, "init_device_mesh"), (parallel, "cut"),
            (optimizer, "_ends"),
        ):  # fmt: skip
            stack.enter_context(replaced(owner, name, real))
        yield


class _Sent:
    """Keeps what is under way until a caller waits for it, as NCCL and gloo do."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        self.tensors = []


def _under_way(function: Any) -> Any:
    @functools.wraps(function)
    def called(operations: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [operation.tensor for operation in operations]
        return [*function(operations, *args, **kwargs), _Sent(tensors)]

    return called


def _told(live: Live, shape: Callable[[Any], Any]) -> Any:
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
    kernel takes all documents, and the loss makes more logits at a time."""
    with contextlib.ExitStack() as stack:
        for owner, name in ((F, "layer_norm"), (torch, "pow")):
            stack.enter_context(replaced(owner, name, _in_fp32))
        stack.enter_context(replaced(F, "dropout", lambda _: _dropout))
        stack.enter_context(replaced(dropout, "install", lambda _: lambda network: None))
        stack.enter_context(replaced(dropout, "_drawn_on_cpu", lambda _: dropout._drawn))
        stack.enter_context(replaced(kernels, "kernel_for", lambda _: lambda *_: "varlen"))
        stack.enter_context(replaced(compat, "varlen_attn", lambda _: _varlen))
        stack.enter_context(replaced(attention, "_draws_alike", lambda _: _alone))
        stack.enter_context(replaced(attention, "sdpa", _without_dropout))
        stack.enter_context(replaced(linear_loss, "rows_at_once", _on_cuda))
        yield


def _alone(_: torch.Tensor, peers: attention.Peers) -> bool:
    return peers.tp_size * peers.cp_size == 1


def _without_dropout(function: Any) -> Any:
    """A kernel of CUDA keeps nothing more for dropout; the CPU has no such kernel."""

    @functools.wraps(function)
    def called(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


def _on_cuda(function: Any) -> Any:
    return lambda columns, _: function(columns, "cuda")


def _varlen(
    query_THD: torch.Tensor, key_SGD: torch.Tensor, value_SGD: torch.Tensor, *_: Any,
    enable_gqa: bool = False, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """Keeps what the varlen kernel keeps: its inputs, its output and a sum a query and head."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query_THD, key_SGD, value_SGD))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)
    return out[0].transpose(0, 1)


def _in_fp32(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_exact, (args, kwargs))
        return function(*args, **kwargs)

    return called


def _exact(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in attention.HALVES
    return value.float() if half else value


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input
