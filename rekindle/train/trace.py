"""What one rank holds in memory while it trains, found out without a GPU and without values:
`python -m rekindle.train.trace < TRACE.json`, one JSON object on stdout.

The engine's own parts run two optimizer steps on fake tensors (sizes without values) and a process
group that sends nothing, while every storage is counted from its birth to its end. A pipeline is
one stage, with as many micro-batches in flight as its schedule holds there. Sizes are those of the
tensors: what a caching allocator rounds up or keeps in reserve comes on top."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rekindle.spec.layout import Layout
from rekindle.spec.model import LoraSpec, TrainSpec


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made while it is active and still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self.paused = False
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "_local_tensor") or kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its own operations on local tensors come by here
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.note(leaf)
        return out

    def note(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage, if it is a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._grow(key, storage.nbytes())
            weakref.finalize(storage, self._end, key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP gives memory back so, and takes it again."""
        if storage._cdata in self._sizes:
            self._grow(storage._cdata, storage.nbytes() - self._sizes[storage._cdata])

    def _grow(self, key: int, by: int) -> None:
        self._sizes[key] += by
        self.bytes += by
        self.peak = max(self.peak, self.bytes)

    def _end(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Live]:
        """Active, resized storages included."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, *args: Any) -> Any:
            done = resize(storage, *args)
            self.resized(storage)
            return done

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@dataclasses.dataclass(frozen=True)
class Trace:
    """What to trace: the model's config in Hugging Face layout, the task, the layout and the place
    of a rank on the pipeline, and the sizes of its micro-batches."""

    config: Mapping[str, Any]
    task: str
    layout: Layout
    train: TrainSpec
    sequence: int
    accumulation: int
    pp_rank: int = 0
    classes: int = 2
    lora: LoraSpec | None = None

    @classmethod
    def read(cls, text: str) -> Trace:
        """From JSON."""
        given = json.loads(text)
        lora = given.pop("lora", None)
        return cls(
            **{**given, "layout": Layout(**given["layout"]), "train": TrainSpec(**given["train"])},
            lora=LoraSpec(**lora) if lora else None,
        )


@dataclasses.dataclass(frozen=True)
class Traced:
    """Bytes. `peak` is the most at any time of the second step, `phase` when that was; `static` are
    parameters, gradients' buffers and moments between two steps, `forward` the most until the end
    of the forward pass, and so on."""

    peak: int
    phase: str
    parameters: int
    static: int
    forward: int
    backward: int
    optimizer: int


def traced(trace: Trace) -> Traced:
    """Run it in a process of its own: fake process groups stay."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layout = trace.layout
    rank = trace.pp_rank * (layout.world // layout.pp)
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    live = Live()
    with contextlib.ExitStack() as stack:
        for context in (_propagation_uncounted(live), _real_meshes(), _whole_sequences()):
            stack.enter_context(context)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return _Run(trace, live).result()


class _Run:
    def __init__(self, trace: Trace, live: Live) -> None:
        from rekindle.tasks import load_task

        self.trace, self.live = trace, live
        self.task = load_task(trace.task)
        self.tokens = self.task.objective == "tokens"
        self.sharded = trace.layout.shard * trace.layout.cp > 1

    def result(self) -> Traced:
        from rekindle.train.optimizer import Optimizer
        from rekindle.train.parallel import settle

        parts = self._parts()
        with self.live.counting():
            for _, parameter in parts.parameters():
                self.live.note(_local(parameter))
            parts = settle(parts) if not parts.mesh.layout.only_replicates else parts
            held = self.live.bytes
            buckets = self._buckets(parts)
            optimizer = Optimizer(parts, self.trace.train)
            for _ in range(2):  # the first makes what stays
                found = self._step(parts, optimizer)
            del buckets
        return dataclasses.replace(found, parameters=held)

    def _parts(self) -> Any:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        from rekindle.train import adapters, families, weights
        from rekindle.train.mesh import Mesh
        from rekindle.train.objective import Goal
        from rekindle.train.parallel import DTYPES, build

        trace, train = self.trace, self.trace.train
        with unset_fake_temporarily():
            mesh = Mesh.of(trace.layout, torch.device("cpu"))
        with unset_fake_temporarily(), weights.deferred() as recorder:
            network = _network(trace, self.tokens)
        origins, lora = families.unfused(network), None
        if trace.lora is not None:
            with weights.deferred(recorder):
                lora = adapters.inject(network, trace.lora, origins)
        dtype = DTYPES.get("fp64" if train.precision == "fp64" else train.weights)
        if dtype is not None:
            weights.transform(network, lambda t: t.to(dtype) if t.is_floating_point() else t)
        return build(self.task, network, origins, train, Goal(), mesh, lora)

    def _buckets(self, parts: Any) -> list[torch.Tensor]:
        """DDP holds room for all gradients as long as it lives."""
        layout = parts.mesh.layout
        if not layout.only_replicates or layout.world == 1:
            return []
        return [torch.zeros_like(p) for _, p in parts.parameters() if p.requires_grad]

    def _step(self, parts: Any, optimizer: Any) -> Traced:
        live = self.live
        static = live.peak = live.bytes
        forward, backward = self._passes(parts)
        live.peak = live.bytes
        optimizer.collect()
        optimizer.step(1e-3, 1.0)
        stepping = live.peak
        optimizer.clear()
        peaks = {"forward": forward, "backward": backward, "optimizer": stepping}
        phase = max(peaks, key=lambda name: peaks[name])
        return Traced(peaks[phase], phase, 0, static, forward, backward, stepping)

    def _passes(self, parts: Any) -> tuple[int, int]:
        """Peaks of the forward and of the backward passes of a step."""
        layout, live = parts.mesh.layout, self.live
        turns = self.trace.accumulation
        flight = min(turns, layout.pp - parts.mesh.place("pp"))
        waiting: collections.deque[Any] = collections.deque()
        forward = backward = 0
        for turn in range(turns + flight):
            live.peak = live.bytes
            if turn < turns:
                waiting.append(self._forward(parts, turn, turn + 1 == turns))
            forward, live.peak = max(forward, live.peak), live.bytes
            if turn + 1 >= flight and waiting:
                self._backward(parts, waiting.popleft(), not waiting and turn + 1 >= turns)
            backward = max(backward, live.peak)
        return forward, backward

    def _forward(self, parts: Any, turn: int, last: bool) -> Any:
        from rekindle.train.loop import synchronised

        (stage,) = parts.stages
        batch = self._batch(stage)
        with self._precision(), synchronised(stage.module, last, self.sharded):
            return stage.module(**batch)

    def _backward(self, parts: Any, out: torch.Tensor, last: bool) -> None:
        from rekindle.train.loop import synchronised

        (stage,) = parts.stages
        with self._precision(), synchronised(stage.module, last, self.sharded):
            if stage.part.last:
                out[0, 0].backward()  # type: ignore[no-untyped-call]
            else:
                out.backward(torch.empty_like(out))  # type: ignore[no-untyped-call]

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        from rekindle.train.parallel import DTYPES

        precision = self.trace.train.precision
        if precision in ("bf16", "fp16"):
            return torch.autocast("cpu", dtype=DTYPES[precision])
        return contextlib.nullcontext()

    def _batch(self, stage: Any) -> dict[str, torch.Tensor]:
        trace, layout = self.trace, self.trace.layout
        rows, length = layout.micro_batch_size, trace.sequence // layout.cp
        whole = torch.ones(rows, length, dtype=torch.int64)
        batch = {"key": torch.tensor([0]), "count": torch.tensor([1.0])}
        if self.tokens:
            batch |= {"labels": whole.clone(), "position_ids": whole.clone()}
        else:
            batch |= {"labels": whole[:, 0].clone(), "weights": torch.ones(rows)}
        if stage.part.first:
            return batch | {"input_ids": whole}
        width = stage.part.network.config.hidden_size
        hidden = torch.empty(rows, length, width, requires_grad=True)
        return batch | {"carried": hidden}


def _network(trace: Trace, tokens: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    given = {key: value for key, value in trace.config.items() if key != "model_type"}
    config = AutoConfig.for_model(trace.config["model_type"], **given, num_labels=trace.classes)
    kind: Any = AutoModelForCausalLM if tokens else AutoModelForSequenceClassification
    network: nn.Module = kind.from_config(config, dtype=torch.float32)
    return network


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "_local_tensor", parameter)


@contextlib.contextmanager
def _propagation_uncounted(live: Live) -> Iterator[None]:
    """DTensor finds out shapes with tensors of the whole size, which nobody holds."""
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

    with _replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted):
        yield


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """Which rank is where is a tensor, too, and its values are needed; copies of a network are made
    of tensors on the meta device."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh

    from rekindle.train import parallel

    def real(function: Any) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return called

    with _replaced(DeviceMesh, "__init__", real), _replaced(parallel, "cut", real):
        yield


@contextlib.contextmanager
def _whole_sequences() -> Iterator[None]:
    """Every token is supervised: how many are is in the values, which fake tensors have not."""
    from rekindle.train import objective

    with _replaced(objective, "chosen", lambda _: lambda values, chosen: values.flatten(0, 1)):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, by(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def main() -> None:
    """The command."""
    logging.disable(logging.WARNING)
    found = traced(Trace.read(sys.stdin.read()))
    sys.stdout.write(json.dumps(dataclasses.asdict(found)) + "\n")


if __name__ == "__main__":
    main()
