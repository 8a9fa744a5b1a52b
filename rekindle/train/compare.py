"""Before the first step in a layout that no test has trained whole: does it do what one
rank does?

A small network of the same architecture (two blocks or one a stage, heads of 16, no
dropout) takes two steps on made-up rows, once in the layout with its recomputation,
compilation, precision and adapters, and once on rank 0 alone without any. Losses and
norms of the gradients have to agree within rounding; that of bf16, fp16 and TF32 would
hide an error of a hundredth, so these are compared in fp32, too. The steps are long ones
of gradient descent, which, unlike AdamW's, show gradients of a wrong size. What only
large sizes show, this cannot see; proof.py asks the model itself."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import nn

from rekindle.data.manifest import Shards
from rekindle.errors import StepError
from rekindle.objectives import loss_of
from rekindle.objectives.loss import Goal
from rekindle.spec.layout import Layout
from rekindle.spec.layout_support import Cell
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks.base import Task
from rekindle.train import modules, weights
from rekindle.train.batches import TRAIN
from rekindle.train.evaluation import Evaluation
from rekindle.train.job import Job
from rekindle.train.loop import RunLength, Trainer
from rekindle.train.mesh import Mesh
from rekindle.train.optimizer import Optimizer
from rekindle.train.parallel import build, prepare_network, settle
from rekindle.train.parts import Parts
from rekindle.train.rank import free

STEPS = 2
PLAIN: Mapping[str, object] = {
    "compile": False,
    "activation_checkpointing": "none",
    "layout": "auto",
    "engine": "rekindle",
    "engine_config": None,
}
"""What a training on one rank, without anything to prove, is asked for."""
HEAD_SIZE = 16
VOCABULARY = 509
MICRO_BATCH_SIZE = 2
SHORTEST_SEQUENCE = 32
"""Tokens of a sequence, at least."""
TOLERANCE = {"fp64": 1e-6, "fp32": 1e-4, "tf32": 5e-3, "fp16": 2e-2, "bf16": 4e-2, "fp8": 1e-1}


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far two steps in the layout lie from those of one rank, relatively."""

    precision: str
    losses: tuple[tuple[float, float], ...]
    """(In the layout, on one rank) of each step."""
    norms: tuple[tuple[float, float], ...]
    """Of the gradient, alike."""
    allowed: float
    """What rounding may come to in the precision."""

    @property
    def largest(self) -> float:
        """The largest relative difference; infinite where something is not a number."""
        pairs = self.losses + self.norms
        largest = 0.0
        for in_layout, on_one_rank in pairs:
            gap = abs(in_layout - on_one_rank) / max(abs(on_one_rank), 1e-12)
            if not math.isfinite(gap):
                return math.inf
            largest = max(largest, gap)
        return largest


def compare_with_one_rank(
    cell: Cell, job: Job, task: Task, shards: Shards, network: nn.Module, mesh: Mesh
) -> tuple[Gap, ...]:
    """The difference for the layout of `mesh`, the same on all ranks.

    In the training's precision, and in fp32 if that is another one. Raises StepError if
    one is more than rounding."""
    small = SmallNetwork(job, task, shards, network, mesh)
    precision: str = "bf16" if job.train.weights == "bf16" else job.train.precision
    if precision == "fp32" and mesh.device.type == "cuda" and not job.train.deterministic:
        precision = "tf32"
    gaps = [_gap(small, job.train, mesh, precision)]
    if TOLERANCE[precision] > TOLERANCE["fp32"]:
        exact = job.train.model_copy(update={"precision": "fp32", "weights": "fp32"})
        with _without_tf32():
            gaps.append(_gap(small, exact, mesh, "fp32"))
    if job.train.compile:
        torch._dynamo.reset()  # what was compiled for the small network is of no more use
    free(mesh.device)
    for gap in gaps:
        if gap.largest > gap.allowed:
            raise _beyond_rounding(cell, gap)
    return tuple(gaps)


def _beyond_rounding(cell: Cell, gap: Gap) -> StepError:
    losses = []
    for step, (in_layout, on_one_rank) in enumerate(gap.losses, 1):
        losses.append(f"step {step}: {in_layout:.6g} instead of {on_one_rank:.6g}")
    message = f"{cell} does not compute what one rank does: on a small network of this "
    message += f"architecture losses and norms differ by {gap.largest:.2g} in {gap.precision}, of "
    message += f"which {gap.allowed:.2g} would be rounding (losses in {'; '.join(losses)})"
    fix = "leave out one of its features (docs/layouts.md has what is proven), and report "
    fix += "this with the versions of torch and transformers"
    return StepError(message, where="train.layout", fix=fix)


def _gap(small: "SmallNetwork", train: TrainSpec, mesh: Mesh, precision: str) -> Gap:
    in_layout = small.losses_and_norms(train, mesh)
    on_one_rank = torch.zeros(2 * STEPS, dtype=torch.float64, device=mesh.device)
    if dist.get_rank() == 0:
        plain = train.model_copy(update=PLAIN)
        on_one_rank = small.losses_and_norms(plain, Mesh.of(Layout(), mesh.device))
    dist.all_reduce(on_one_rank)  # zeros elsewhere: a broadcast
    pairs = list(zip(in_layout.tolist(), on_one_rank.tolist(), strict=True))
    return Gap(precision, tuple(pairs[::2]), tuple(pairs[1::2]), TOLERANCE[precision])


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


class SmallNetwork:
    """The small network and its rows, which are the same for every layout."""

    def __init__(
        self, job: Job, task: Task, shards: Shards, network: nn.Module, mesh: Mesh
    ) -> None:
        self.job = job
        self.task = task
        self.kind = type(network)
        self.device = mesh.device
        layout = mesh.layout
        self.config = _small_config(network.config, layout) if hasattr(network, "config") else None
        # a pipeline is full with as many micro-batches as it has ranks, and goes around in rounds
        rounds = layout.pp if layout.pp > 1 else 2
        self.sequences = MICRO_BATCH_SIZE * layout.data * rounds
        count = STEPS * 2 * self.sequences + 1
        self.shards = _rows(task, shards, self.config, layout, count)

    def losses_and_norms(self, train: TrainSpec, mesh: Mesh) -> torch.Tensor:
        """Loss and norm of the gradient of each step, float64 [2 * STEPS]."""
        layout = dataclasses.replace(mesh.layout, micro_batch_size=MICRO_BATCH_SIZE)
        trainer = self._trainer(train, dataclasses.replace(mesh, layout=layout))
        optimizer = trainer.optimizer
        assert isinstance(optimizer, Optimizer)
        is_alone = layout.world == 1  # the other ranks, if there are any, have no part in it
        values = list[float]()
        for _ in range(STEPS):
            share_of_loss = trainer._backward(trainer.batches.make(0))[0] / layout.tp
            sums = torch.stack([share_of_loss, optimizer.collect()])
            if not is_alone:
                sums = trainer.add_over_ranks(sums)
            scale = optimizer.loss_scale
            loss = float(sums[0]) / scale
            squares = float(sums[1]) / scale**2
            values += [loss, math.sqrt(squares) if squares >= 0 else math.nan]
            # as long a step as would take a fifth of the loss if that fell on a line
            rate = 0.2 * abs(loss) / max(squares, 1e-12)
            for trained in optimizer.trained:
                if trained.local.grad is not None:
                    trained.local.sub_(trained.local.grad, alpha=rate / scale)
            optimizer.clear()
        return torch.tensor(values, dtype=torch.float64, device=mesh.device)

    def alone(self) -> tuple[Parts, Evaluation, Shards]:
        """The network with fresh values on this rank, and rows that it can read."""
        plain = self.job.train.model_copy(update=PLAIN)
        trainer = self._trainer(plain, Mesh.of(Layout(), self.device))
        return trainer.parts, trainer.evaluation, self.shards

    def _trainer(self, train: TrainSpec, mesh: Mesh) -> Trainer:
        train = train.model_copy(
            update={
                "global_batch_size": self.sequences,
                "micro_batch_size": MICRO_BATCH_SIZE,
                "steps": STEPS,
            }
        )
        with weights.deferred() as recorder:
            network = self._network()
        source = weights.WeightSource(network, recorder, train.seed)
        origins = modules.unfused(network)
        lora = self.job.model.lora
        if lora is not None:
            lora = lora.model_copy(update={"dropout": 0.0, "base": "full"})
        scaling = prepare_network(network, source, origins, train, lora)
        goal = Goal(train.label_smoothing)
        parts = build(self.task, network, origins, train, goal, mesh, scaling)
        weights.fill(parts.networks, source, parts.origins)
        order = self.shards.order(
            TRAIN,
            global_batch_size=self.sequences,
            seed=0,
            by_length=self.config is not None,
            pack_length=loss_of(self.task.objective).pack_length(self.shards.manifest.settings),
        )
        length = RunLength.of(train, order)
        return Trainer(self.task, self.shards, train, length, settle(parts), train.seed)

    def _network(self) -> nn.Module:
        if self.config is not None:
            return self.kind(copy.deepcopy(self.config))
        source = self.job.model.source
        assert isinstance(source, dict)
        if "dropout" in source:
            source = {**source, "dropout": 0.0}
        manifest = self.shards.manifest
        return self.task.build(
            ModelSpec(source=source), manifest.labels, manifest.settings, self.shards.assets
        )


def _small_config(config: Any, layout: Layout) -> Any:
    """A copy of a config of transformers with few blocks, small heads and no dropout."""
    small = copy.deepcopy(config)
    blocks = max(2, layout.stages)
    small.num_hidden_layers = blocks
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:blocks]
    small.hidden_size = HEAD_SIZE * small.num_attention_heads
    if getattr(small, "head_dim", None):
        small.head_dim = HEAD_SIZE
    for name in ("intermediate_size", "hidden_dim", "n_inner"):
        if getattr(small, name, None):
            setattr(small, name, 2 * small.hidden_size)
    small.vocab_size = VOCABULARY
    small.bos_token_id = None
    small.pad_token_id = small.eos_token_id = 0
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(small, name, 0.0)
    return small


def _rows(task: Task, shards: Shards, config: Any, layout: Layout, count: int) -> Shards:
    """Texts of random tokens; images are taken as they come: a network knows their size."""
    manifest = shards.manifest
    if config is None:
        table = shards.take(TRAIN, np.arange(count) % shards.rows(TRAIN))
        return Shards.of_tables(shards.folder, manifest, {TRAIN: table})
    random = np.random.default_rng(0)
    # what tp divides, and cp in its zigzag of two chunks a rank
    unit = 2 * layout.tp
    if layout.cp > 1:
        unit *= 2 * layout.cp
    longest = -(-SHORTEST_SEQUENCE // unit) * unit
    lengths = random.integers(3, longest // 2, count)
    texts = [random.integers(1, VOCABULARY, int(length)).tolist() for length in lengths]
    columns = {
        "id": pa.array([str(row) for row in range(count)]),
        "hash": pa.array([bytes(16)] * count, pa.binary(16)),
        "input_ids": pa.array(texts, pa.list_(pa.int32())),
        **loss_of(task.objective).invented(random, texts, max(1, len(manifest.labels))),
    }
    settings = {
        **manifest.settings,
        "vocab_size": VOCABULARY,
        "max_length": longest,
        "pad_token_id": 0,
        "eos_token_id": 0,
    }
    made_up = manifest.model_copy(update={"settings": settings})
    return Shards.of_tables(Path(), made_up, {TRAIN: pa.table(columns)})
