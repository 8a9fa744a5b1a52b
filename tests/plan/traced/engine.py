"""What one rank holds in memory while it trains, found out without a GPU and without values:
`python -m tests.plan.traced.engine < TRACES.jsonl`, one JSON object a line in, one a line out.

The engine's own parts run three optimizer steps on fake tensors (sizes without values) and a
process group that sends nothing, while every storage is counted from its birth to its end. What a
caching allocator rounds up or reserves comes on top. torch.compile is not seen: blocks are counted
as they are written."""

import collections
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from rekindle.objectives.loss import Goal
from rekindle.objectives.micro import Documents, Micro
from rekindle.spec.layout import Layout
from rekindle.spec.model import LoraSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import modules, quantised, teacher, weights
from rekindle.train.mesh import Mesh
from rekindle.train.optimizer import Optimizer, synchronised
from rekindle.train.parallel import build, prepare_network, settle
from rekindle.train.parts import DTYPES, autocast
from rekindle.train.pipeline import Pipeline, without_first
from rekindle.train.weights import local_of
from tests.plan.traced import fakes


@dataclasses.dataclass(frozen=True)
class Trace:
    """What to trace: the model's config in Hugging Face layout, the task, the layout, a rank's
    place on the pipeline, and the sizes of its micro-batches. `device`: whose arithmetic is meant,
    `cuda`, or `cpu` to compare with training here, where the place among cp peers matters, too."""

    config: Mapping[str, Any]
    task: str
    layout: Layout
    train: TrainSpec
    sequence: int
    accumulation: int
    pp_rank: int = 0
    cp_rank: int = 0
    classes: int = 2
    lora: LoraSpec | None = None
    teacher: Mapping[str, Any] | None = None
    device: str = "cuda"
    detail: bool = False


@dataclasses.dataclass(frozen=True)
class Traced:
    """Bytes. `peak` is the most at any time of a step, `phase` when that was, `terms` what was held
    then; `static` are parameters, buffers and moments between two steps; `phases` the most in each
    phase. `largest` are the largest storages of the peak, if they were asked for."""

    peak: int
    phase: str
    static: int
    phases: Mapping[str, int]
    terms: Mapping[str, int]
    largest: tuple[Any, ...] = ()


def traced(trace: Trace) -> Traced:
    """Run it in a process of its own: it exchanges parts of the engine while it runs."""
    layout = trace.layout
    if importlib.util.find_spec("torch.distributed._meta_registrations") is None:
        # lets collectives run on fake tensors, as torch 2.11 does by itself
        importlib.import_module("torch.distributed._tools.fake_collectives")
    rank = trace.pp_rank * (layout.world // layout.pp) + trace.cp_rank * layout.tp
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    run = _Run(trace)
    engine = fakes.engine_without_values(run.live, run.shapes, fake=True)
    meant = fakes.as_on_gpu() if trace.device == "cuda" else contextlib.nullcontext()
    try:
        with engine, FakeTensorMode(allow_non_fake_inputs=True), meant:
            return run.result()
    finally:
        dist.destroy_process_group()


class _Run:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.live = trace, fakes.Live()
        self.task = load_task(trace.task)
        self.tokens = self.task.objective == "tokens"
        self.pipeline: Any = None
        self.last_turn = False
        self.joined = False  # texts with a class, in one sequence
        self.mesh: Mesh

    def result(self) -> Traced:
        live, parts = self.live, self._parts()
        self.joined = parts.stages[0].part.joins_texts
        # the end of a backward pass, from a stage's first block on, is a phase of its own: it grows
        # with the number of blocks by other tensors than the beginning, and the larger of two
        # straight lines is not one
        for stage in parts.stages:
            named = modules.blocks(stage.part.network)
            blocks = [block for _, block in named if not isinstance(block, modules.Skip)]
            for block, phase in ((blocks[-1], "backward"), (blocks[0], "end of backward")):
                block.register_forward_hook(functools.partial(self._backward_from, phase))
        with live.counting():
            taught = [local_of(p) for t in parts.stages[-1].part.teachers for p in t.parameters()]
            codes = quantised.codes_of(parts.networks)
            for tensor in [*(local_of(p) for _, p in parts.parameters()), *codes, *taught]:
                live.note(tensor)
            live.call(fakes.PARAMETERS, codes)
            live.call(fakes.PARAMETERS, (local_of(p) for _, p in parts.parameters()))
            live.call(fakes.TEACHER, taught)
            parts = settle(parts) if not parts.mesh.layout.only_replicates else parts
            live.call(fakes.PARAMETERS, (local_of(p) for _, p in parts.parameters()))
            buckets = self._buckets(parts)
            live.call(fakes.GRADIENTS, buckets.values())
            optimizer = Optimizer(parts, self.trace.train)
            states = optimizer.update.state.values()
            live.call(fakes.MOMENTS, (tensor for state in states for tensor in state.values()))
            if parts.mesh.layout.pp > 1:
                self.pipeline = Pipeline(parts)
            static = 0
            for last in (False, False, True):  # the first makes what stays
                live.phase = "backward"
                live.begin(live.at if last else 0)
                static = live.bytes
                self._step(parts, optimizer)
            del buckets
        terms = collections.Counter[str]()
        for held in live.worst:
            terms[held.kind or fakes.TEMPORARIES] += held.was
        largest = sorted(live.worst, key=lambda held: -held.was)
        return Traced(
            live.peak,
            live.phase_of_peak,
            static,
            live.peaks,
            dict(terms),
            tuple((h.was, h.kind, h.phase, h.made_by) for h in largest)
            if self.trace.detail
            else (),
        )

    def _parts(self) -> Any:
        trace, train = self.trace, self.trace.train
        with unset_fake_temporarily():
            mesh = self.mesh = Mesh.of(trace.layout, torch.device("cpu"))
            with weights.deferred():
                network = _network(trace.config, trace.classes, self.tokens)
            origins = modules.unfused(network)
            scaling = prepare_network(network, None, origins, train, trace.lora)
        goal = Goal()
        if trace.teacher is not None:
            with unset_fake_temporarily(), weights.deferred():
                taught = _network(trace.teacher, trace.classes, self.tokens)
            modules.unfused(taught)
            count = sum(p.numel() for p in taught.parameters())
            teacher.arrange(taught, train, mesh, teacher.divides(count, train, mesh))
            goal = Goal(0.0, teacher.ready(taught, train, mesh), 2.0, 0.5)
        train = train.model_copy(update={"compile": False})
        return build(self.task, network, origins, train, goal, mesh, scaling)

    def _buckets(self, parts: Any) -> dict[torch.Tensor, torch.Tensor]:
        """DDP holds room for all gradients, and puts each there in the last backward pass."""
        layout = parts.mesh.layout
        if not layout.only_replicates or layout.world == 1:
            return {}
        trained = [p for _, p in parts.parameters() if p.requires_grad]
        buckets = {p: torch.zeros_like(p, requires_grad=False) for p in trained}

        def ready(parameter: torch.Tensor) -> None:
            if self.last_turn:
                parameter.grad = buckets[parameter]

        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(ready)
        return buckets

    def _step(self, parts: Any, optimizer: Any) -> None:
        live, layout = self.live, parts.mesh.layout
        sharded = layout.shard * layout.cp > 1
        micro = [self._batch() for _ in range(self.trace.accumulation)]
        with autocast(self.trace.train.precision, self.mesh.device):
            if self.pipeline is not None:
                self.pipeline.train(micro)
            else:
                module = parts.stages[0].module
                for turn, one in enumerate(micro):
                    self.last_turn = turn + 1 == len(micro)
                    with synchronised(module, self.last_turn, sharded):
                        result = module(micro=one)
                        result[0, 0].backward()
                    del result
        grads = (p.grad for _, p in parts.parameters() if p.grad is not None)
        live.call(fakes.GRADIENTS, map(local_of, grads))
        live.phase = "optimizer"
        squares = optimizer.collect()
        optimizer.step(1e-3, squares, squares)
        optimizer.clear()
        live.phase = "backward"

    def _backward_from(self, phase: str, module: nn.Module, args: Any, output: Any) -> None:

        def begins(_: torch.Tensor) -> None:
            self.live.phase = phase

        hidden = _first(output)
        if hidden.requires_grad:
            hidden.register_hook(begins)  # type: ignore[no-untyped-call]

    def _batch(self) -> Micro:
        """Every token is a target, and every sequence one document: what takes most."""
        import numpy as np  # first missed would be torch

        trace, cp = self.trace, self.trace.layout.cp
        rows, length = trace.layout.micro_batch_size, trace.sequence // cp
        whole = torch.ones(rows, length, dtype=torch.int64)
        count = torch.tensor([1.0])
        if not self.tokens:
            labels, weights = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
            if not self.joined:
                inputs = {"input_ids": whole, "attention_mask": whole.clone()}
                return Micro(inputs, labels, count, key=0, weights=weights)
            joined = whole.view(1, -1)
            return Micro(
                inputs={"input_ids": joined, "position_ids": joined.clone()},
                labels=labels,
                targets=torch.arange(rows) * length,
                documents=Documents.of_texts([length] * rows),
                count=count,
                key=0,
                weights=weights,
            )
        numbers_BS = np.ones((rows, trace.sequence), np.int64)
        return Micro(
            inputs={"input_ids": whole, "position_ids": whole.clone()},
            labels=torch.zeros(rows * length, dtype=torch.int64),
            targets=torch.zeros(rows * length, dtype=torch.int64),
            documents=Documents.of(numbers_BS, cp, self.mesh.place("cp")),
            count=count,
            key=0,
        )

    def shapes(self, part: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What a stage of the pipeline receives and what it hands on."""
        layout = self.trace.layout
        micro = self._batch()
        first = micro.inputs["input_ids"]
        rows, length = first.shape
        config = part.network.config
        tp = layout.tp if part.sequence_parallel else 1
        kept: list[torch.Tensor] = []
        # what the first stage's table gives: weights as they are while they are used
        train = self.trace.train
        cast = DTYPES.get(train.precision) if isinstance(part, FSDPModule) else None
        dtype = cast or DTYPES.get(train.weights, torch.float32)
        carried = torch.empty(rows, length // tp, config.hidden_size, dtype=dtype)
        blocks = [b for _, b in modules.blocks(part.network) if not isinstance(b, modules.Skip)]
        hook = blocks[-1].register_forward_hook(lambda *given: kept.append(_first(given[-1])))
        with torch.no_grad(), autocast(self.trace.train.precision, self.mesh.device):
            part(first if part.first else carried, micro=without_first(micro))
        hook.remove()
        del part.results[:]
        for module in part.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        hidden = torch.empty_like(carried, dtype=kept[0].dtype, requires_grad=True)
        received = first if part.first else hidden
        sent = torch.empty(1, 3, requires_grad=True) if part.last else hidden
        return received, sent


def _first(found: Any) -> torch.Tensor:
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def _network(config: Mapping[str, Any], classes: int, tokens: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    given = {key: value for key, value in config.items() if key != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **given, num_labels=classes)
    kind: Any = AutoModelForCausalLM if tokens else AutoModelForSequenceClassification
    return kind.from_config(made, dtype=torch.float32)  # type: ignore[no-any-return]


def main() -> None:
    logging.disable(logging.WARNING)
    for line in filter(str.strip, sys.stdin):
        found = dataclasses.asdict(traced(TypeAdapter(Trace).validate_json(line)))
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
