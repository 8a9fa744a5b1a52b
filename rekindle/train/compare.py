"""Before the first step in a layout that no test has trained whole: does it do what one rank does?

A small network of the same architecture (two blocks or one a stage, heads of 16, no dropout) takes
two steps on made-up rows, once in the layout with its recomputation, compilation, precision and
adapters, and once on rank 0 alone without any. Losses and norms of the gradients have to agree
within rounding; that of bf16, fp16 and TF32 would hide an error of a hundredth, so these are
compared in fp32, too. The steps are long ones of gradient descent, which, unlike AdamW's, show
gradients of a wrong size. What only large sizes show, this cannot see; proof.py asks the model
itself."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import nn

from rekindle.data.manifest import Shards
from rekindle.errors import StepError
from rekindle.spec.layout import Layout
from rekindle.spec.layout_support import Cell
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks.base import Task
from rekindle.train import modules, weights
from rekindle.train.batches import TRAIN
from rekindle.train.evaluation import Evaluation
from rekindle.train.job import Job
from rekindle.train.loop import Plan, Trainer
from rekindle.train.mesh import Mesh
from rekindle.train.objectives import objective_of
from rekindle.train.optimizer import Optimizer
from rekindle.train.parallel import Parts, build, prepared, settle
from rekindle.train.part import Goal
from rekindle.train.rank import free

STEPS = 2
PLAIN = {"compile": False, "activation_checkpointing": "none", "layout": "auto"}
"""What a training on one rank, without anything to prove, is asked for."""
HEAD, VOCABULARY, MICRO = 16, 509, 2
TEXT = 32  # tokens of a sequence, at least
TOLERANCE = {"fp64": 1e-6, "fp32": 1e-4, "tf32": 5e-3, "fp16": 2e-2, "bf16": 4e-2, "fp8": 1e-1}


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far two steps in the layout lie from those of one rank, relatively, and what is `allowed`
    in the precision. `losses` and `norms` are (in the layout, on one rank) of each step."""

    precision: str
    losses: tuple[tuple[float, float], ...]
    norms: tuple[tuple[float, float], ...]
    allowed: float

    @property
    def largest(self) -> float:
        """The largest relative difference; infinite where something is not a number."""
        pairs = self.losses + self.norms
        gaps = (abs(mine - theirs) / max(abs(theirs), 1e-12) for mine, theirs in pairs)
        return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def compared(
    cell: Cell, job: Job, task: Task, shards: Shards, network: nn.Module, mesh: Mesh
) -> tuple[Gap, ...]:
    """The difference for the layout of `mesh`, in the training's precision, and in fp32 if that is
    another one, the same on all ranks; raises StepError if one is more than rounding."""
    small = Small(job, task, shards, network, mesh)
    rounded: str = "bf16" if job.train.weights == "bf16" else job.train.precision
    if rounded == "fp32" and mesh.device.type == "cuda" and not job.train.deterministic:
        rounded = "tf32"
    gaps = [_gap(small, job.train, mesh, rounded)]
    if TOLERANCE[rounded] > TOLERANCE["fp32"]:
        exact = job.train.model_copy(update={"precision": "fp32", "weights": "fp32"})
        with _without_tf32():
            gaps.append(_gap(small, exact, mesh, "fp32"))
    if job.train.compile:
        torch._dynamo.reset()  # what was compiled for the small network is of no more use
    free(mesh.device)
    for gap in (gap for gap in gaps if gap.largest > gap.allowed):
        pairs = enumerate(gap.losses, 1)
        shown = "; ".join(f"step {n}: {ours:.6g} instead of {own:.6g}" for n, (ours, own) in pairs)
        what = f"{cell} does not compute what one rank does: on a small network of this "
        what += f"architecture losses and norms differ by {gap.largest:.2g} in {gap.precision}, of "
        what += f"which {gap.allowed:.2g} would be rounding (losses in {shown})"
        fix = "leave out one of its features (docs/layouts.md has what is proven), and report "
        fix += "this with the versions of torch and transformers"
        raise StepError(what, where="train.layout", fix=fix)
    return tuple(gaps)


def _gap(small: "Small", train: TrainSpec, mesh: Mesh, rounded: str) -> Gap:
    mine = small.steps(train, mesh)
    theirs = torch.zeros(2 * STEPS, dtype=torch.float64, device=mesh.device)
    if dist.get_rank() == 0:
        theirs = small.steps(train.model_copy(update=PLAIN), Mesh.of(Layout(), mesh.device))
    dist.all_reduce(theirs)
    pairs = list(zip(mine.tolist(), theirs.tolist(), strict=True))
    return Gap(rounded, tuple(pairs[::2]), tuple(pairs[1::2]), TOLERANCE[rounded])


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


class Small:
    """The small network and its rows, which are the same for every layout."""

    def __init__(
        self, job: Job, task: Task, shards: Shards, network: nn.Module, mesh: Mesh
    ) -> None:
        self.job, self.task, self.kind = job, task, type(network)
        self.device = mesh.device
        layout = mesh.layout
        self.config = _small_config(network.config, layout) if hasattr(network, "config") else None
        # a pipeline is full with as many micro-batches as it has ranks, and goes around in rounds
        self.sequences = MICRO * layout.data * (layout.pp if layout.pp > 1 else 2)
        count = STEPS * 2 * self.sequences + 1
        self.shards = _rows(task, shards, self.config, layout, count)

    def steps(self, train: TrainSpec, mesh: Mesh) -> torch.Tensor:
        """Loss and norm of the gradient of each step, float64 [2 * STEPS]."""
        layout = dataclasses.replace(mesh.layout, micro_batch_size=MICRO)
        trainer = self._trainer(train, dataclasses.replace(mesh, layout=layout))
        optimizer, found = trainer.optimizer, []
        assert isinstance(optimizer, Optimizer)
        alone = layout.world == 1  # the other ranks, if there are any, have no part in it
        for _ in range(STEPS):
            loss = trainer._backward(trainer.batches.make(0))[0] / layout.tp
            shared = torch.stack([loss, optimizer.collect()])
            shared = shared if alone else trainer.agreed(shared)
            scale = optimizer.loss_scale
            value, squares = float(shared[0]) / scale, float(shared[1]) / scale**2
            found += [value, math.sqrt(squares) if squares >= 0 else math.nan]
            # as long a step as would take a fifth of the loss if that fell on a line
            rate = 0.2 * abs(value) / max(squares, 1e-12)
            for held in optimizer.held:
                if held.local.grad is not None:
                    held.local.sub_(held.local.grad, alpha=rate / scale)
            optimizer.clear()
        return torch.tensor(found, dtype=torch.float64, device=mesh.device)

    def alone(self) -> tuple[Parts, Evaluation, Shards]:
        """The network with fresh values on this rank, and rows that it can read."""
        plain = self.job.train.model_copy(update=PLAIN)
        trainer = self._trainer(plain, Mesh.of(Layout(), self.device))
        return trainer.parts, trainer.evaluation, self.shards

    def _trainer(self, train: TrainSpec, mesh: Mesh) -> Trainer:
        size = {"global_batch_size": self.sequences, "micro_batch_size": MICRO, "steps": STEPS}
        train = train.model_copy(update=size)
        with weights.deferred() as recorder:
            network = self._network()
        source = weights.Source(network, recorder, train.seed)
        origins, lora = modules.unfused(network), self.job.model.lora
        plain = {"dropout": 0.0, "base": "full"}
        quiet = lora.model_copy(update=plain) if lora is not None else None
        scaling = prepared(network, source, origins, train, quiet)
        goal = Goal(train.label_smoothing)
        parts = build(self.task, network, origins, train, goal, mesh, scaling)
        weights.fill([stage.part.network for stage in parts.stages], source, parts.origins)
        order = self.shards.order(
            TRAIN,
            global_batch_size=self.sequences,
            seed=0,
            by_length=self.config is not None,
            pack_length=objective_of(self.task).pack_length(self.shards.manifest.settings),
        )
        plan = Plan.of(train, order)
        return Trainer(self.task, self.shards, train, plan, settle(parts), train.seed)

    def _network(self) -> nn.Module:
        if self.config is not None:
            return self.kind(copy.deepcopy(self.config))
        manifest, source = self.shards.manifest, self.job.model.source
        assert isinstance(source, dict)
        quiet = {**source, "dropout": 0.0} if "dropout" in source else source
        return self.task.build(
            ModelSpec(source=quiet), manifest.labels, manifest.settings, self.shards.assets
        )


def _small_config(config: Any, layout: Layout) -> Any:
    small = copy.deepcopy(config)
    small.num_hidden_layers = blocks = max(2, layout.stages)
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:blocks]
    small.hidden_size = HEAD * small.num_attention_heads
    if getattr(small, "head_dim", None):
        small.head_dim = HEAD
    for name in ("intermediate_size", "hidden_dim", "n_inner"):
        if getattr(small, name, None):
            setattr(small, name, 2 * small.hidden_size)
    small.vocab_size, small.bos_token_id = VOCABULARY, None
    small.pad_token_id = small.eos_token_id = 0
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(small, name, 0.0)
    return small


def _rows(task: Task, shards: Shards, config: Any, layout: Layout, count: int) -> Shards:
    """Texts of random tokens; images are taken as they come, because a network knows their size."""
    manifest = shards.manifest
    if config is None:
        table = shards.take(TRAIN, np.arange(count) % shards.rows(TRAIN))
        return Shards.of_tables(shards.folder, manifest, {TRAIN: table})
    random = np.random.default_rng(0)
    unit = 2 * layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    longest = -(-TEXT // unit) * unit
    sizes = random.integers(3, longest // 2, count)
    texts = [random.integers(1, VOCABULARY, int(size)).tolist() for size in sizes]
    columns = {
        "id": pa.array([str(row) for row in range(count)]),
        "hash": pa.array([bytes(16)] * count, pa.binary(16)),
        "input_ids": pa.array(texts, pa.list_(pa.int32())),
        **objective_of(task).invented(random, texts, max(1, len(manifest.labels))),
    }
    limits = {"vocab_size": VOCABULARY, "max_length": longest}
    settings = {**manifest.settings, **limits, "pad_token_id": 0, "eos_token_id": 0}
    told = manifest.model_copy(update={"settings": settings})
    return Shards.of_tables(Path(), told, {TRAIN: pa.table(columns)})
