"""The training loop: the same batches, the same dropout and the same weights however often it is
interrupted, and in whatever layout.

Decides what one optimizer step is: the micro-batches of this rank forward and backward (through
the pipeline's schedule, if there is one), one small all-reduce on which all ranks agree (loss,
gradient norm, a request to stop), then the update, or none if the gradient is not finite. So the
state to save is the step, the weights, the moments, and the scale of fp16."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rekindle.data.manifest import Shards
from rekindle.data.order import SampleOrder
from rekindle.errors import StepError
from rekindle.launch.signs import Phase
from rekindle.records import HistoryRow
from rekindle.spec.model import DEFAULT_EPOCHS, TrainSpec
from rekindle.tasks.base import Task
from rekindle.train.batches import TRAIN, VALIDATION, Batches, Tensors, Work
from rekindle.train.checkpoint import Checkpoint, Checkpointer, load
from rekindle.train.history import History
from rekindle.train.ledger import Ledger
from rekindle.train.optimizer import Optimizer
from rekindle.train.parallel import DTYPES, Parts
from rekindle.train.profile import Profiler
from rekindle.train.schedule import learning_rate
from rekindle.train.throughput import Clock

if TYPE_CHECKING:
    from rekindle.train.pipeline import Pipeline

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long a run is: counts that follow from the spec and the data."""

    steps: int
    order: SampleOrder

    @classmethod
    def of(cls, train: TrainSpec, order: SampleOrder) -> Plan:
        """`steps` wins over `epochs`."""
        return cls(train.steps or max(1, order.steps(train.epochs or DEFAULT_EPOCHS)), order)

    def epoch(self, step: int) -> float:
        """Passes over the data after `step` steps: 1.5 in the middle of the second."""
        epoch, position = self.order.epoch_of(step)
        return epoch + position / self.order.steps_in_epoch(epoch)

    def ends_epoch(self, step: int) -> bool:
        """Whether the step before `step` was the last of an epoch."""
        return self.order.epoch_of(step)[1] == 0


class StopFlag:
    """Raised by SIGTERM on one rank, agreed on by all at the next step."""

    def __init__(self, grace_seconds: float) -> None:
        self.raised, self.grace_seconds, self.deadline = False, grace_seconds, math.inf

    def raise_it(self, number: int = 0) -> None:
        """From now on the machine may be gone after the grace period."""
        if not self.raised:
            self.raised, self.deadline = True, time.monotonic() + self.grace_seconds

    def seconds_left(self) -> float:
        """Until the machine may be gone; a rank that was not told yet assumes the whole grace."""
        return min(self.deadline - time.monotonic(), self.grace_seconds)


class Trainer:
    """One rank's view of a run."""

    def __init__(
        self, task: Task, shards: Shards, spec: TrainSpec, plan: Plan, parts: Parts, seed: int,
        beat: Callable[[int, Phase], None] = lambda step, phase: None,
    ) -> None:  # fmt: skip
        self.spec, self.plan, self.parts, self.mesh = spec, plan, parts, parts.mesh
        self.beat = beat
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        layout = self.mesh.layout
        self.pipeline = _pipeline(parts) if layout.pp > 1 else None
        self.optimizer = Optimizer(parts, spec)
        order = copy.deepcopy(plan.order)  # its own, because batches are made in a thread
        self.batches = Batches(task, shards, TRAIN, order, self.mesh, seed)
        self.validation = _validation(task, shards, plan.order, self.mesh, seed)
        self.bad_steps, self.seconds_before = 0, 0.0
        if layout.only_replicates and layout.world > 2:  # a sum of two has no order
            self._warm_up()

    def _warm_up(self) -> None:
        """DDP regroups its buckets after the first backward pass, which changes the order of the
        sums: without this a restarted run would differ in the last bit from an uninterrupted one.
        """
        buffers = [(b, b.clone()) for b in self.parts.network.buffers()]
        work = self.batches.make(0)
        for _ in range(2):
            self._backward(work)
        self.optimizer.clear()
        for buffer, before in buffers:
            buffer.copy_(before)

    def fit(
        self, checkpointer: Checkpointer, history: History, stop: StopFlag, start: int,
        clock: Clock, profiler: Profiler, ledger: Ledger | None = None,
    ) -> int:  # fmt: skip
        """Train from step `start` to the end; returns the last step done, which is smaller after a
        request to stop."""
        every, steps, began = self.spec.checkpoint.every, self.plan.steps, time.monotonic()
        for step in range(start, steps):
            work = self.batches.work(step, steps)
            row, stopping = self._step(step, work, stop)
            last = step + 1 == steps
            if last or (self.plan.ends_epoch(step + 1) and not stopping):
                found, interrupted = self.validate(step + 1, stop)
                row, stopping = row | found, stopping or interrupted
            done = HistoryRow(step=step + 1, **row, **clock.tick(work, self.batches.waited))
            if self.rank == 0:
                history.append(done)
                clock.report(done)
            if ledger is not None:
                ledger.append(step + 1, self.batches.ids(work))
            profiler.step(self.batches.waited)
            due = stopping or (every is not None and (step + 1) % every == 0)
            if last or (due and (not stopping or checkpointer.fits(stop.seconds_left()))):
                self.beat(step + 1, "save")
                seconds = self.seconds_before + time.monotonic() - began
                checkpointer.save(step + 1, self.tensors(), self.state(step + 1, row, seconds))
            checkpointer.committed()
            if stopping and not last:
                return step + 1
        return steps

    def _step(self, step: int, work: Work, stop: StopFlag) -> tuple[dict[str, Any], bool]:
        """One optimizer step; the gang agrees in one small all-reduce on the loss, the norm and on
        whether to stop."""
        rate = learning_rate(self.spec, step, self.plan.steps)
        loss = self._backward(work, step + 1)[0] / self.mesh.layout.tp
        squares = self.optimizer.collect()
        shared = torch.stack([loss, squares, torch.tensor(float(stop.raised)).double()])
        shared = self.agreed(shared)
        scale = self.optimizer.loss_scale
        mean_loss, norm = float(shared[0]) / scale, math.sqrt(float(shared[1])) / scale
        finite = math.isfinite(mean_loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step(rate, norm)
        self._judge(finite, step, mean_loss, norm)
        self.optimizer.clear()
        row = {"epoch": self.plan.epoch(step + 1), "loss": mean_loss, "lr": rate, "grad_norm": norm}
        return row, bool(shared[2] > 0)

    def _judge(self, finite: bool, step: int, loss: float, norm: float) -> None:
        """Count steps without an update; raises StepError after `max_bad_steps` in a row. fp16
        overflows now and then by design, while it looks for its scale."""
        if self.optimizer.scale is not None:
            self.optimizer.scale.update(finite)
        self.bad_steps = 0 if finite else self.bad_steps + 1
        searching = self.optimizer.scale is not None and self.optimizer.scale.value > 1
        if finite or searching:
            return
        log.warning("step %d is skipped: loss %s, gradient norm %s", step + 1, loss, norm)
        if self.bad_steps >= self.spec.max_bad_steps:
            raise StepError(
                f"the loss is {loss} and the gradient's norm {norm} at step {step + 1}, "
                f"{self.bad_steps} steps in a row",
                where="train",
                fix="lower train.lr, lengthen train.warmup, or look at the data of this batch",
            )

    def _backward(self, work: Work, step: int = 0) -> torch.Tensor:
        """Gradients of this rank's micro-batches; float64 [3]: its share of loss, right predictions
        and targets."""
        scale = self.optimizer.loss_scale
        micro = [{**self._moved(m), "count": m["count"] / scale} for m in work.micro]
        phase: Phase = "step" if step else "warm-up"
        self.beat(step, phase)
        with self._precision():
            if self.pipeline is not None:
                return self.pipeline.train(micro)
            module, layout = self.parts.stages[0].module, self.mesh.layout
            sharded = layout.shard * layout.cp > 1
            total = torch.zeros(3, dtype=torch.float64)
            for turn, tensors in enumerate(micro):
                self.beat(step, phase)
                with synchronised(module, turn + 1 == len(micro), sharded):
                    result = module(**tensors)
                    result[0, 0].backward()
                total += result[0].detach().double().cpu()
            return total

    @torch.no_grad()
    def validate(
        self, step: int = 0, stop: StopFlag | None = None
    ) -> tuple[dict[str, float], bool]:
        """Loss and accuracy on the validation split, each target counted once in any layout; and
        whether a request to stop cut it short, in which case there are no figures."""
        if self.validation is None:
            return {}, False
        sums = torch.zeros(4, dtype=torch.float64)
        for number in range(self.validation.order.steps_in_epoch(0)):
            self.beat(step, "validation")
            share = self.losses(self.validation.make(number).micro)
            raised = float(stop.raised) if stop is not None else 0.0
            sums += self.agreed(torch.cat([share, torch.tensor([raised]).double()]))
            if sums[3] > 0:
                return {}, True
        loss, right, targets, _ = sums.tolist()
        return {"validation_loss": loss / targets, "validation_accuracy": right / targets}, False

    @torch.no_grad()
    def losses(self, micro: Sequence[Tensors]) -> torch.Tensor:
        """float64 [3]: this rank's share of the summed loss, right predictions and targets of some
        micro-batches, as a trained model would be used."""
        for stage in self.parts.stages:
            stage.module.eval()
        moved = [{**self._moved(m), "count": torch.ones(1, device=self.mesh.device)} for m in micro]
        sums = torch.zeros(3, dtype=torch.float64)
        with self._precision():
            if self.pipeline is not None:
                sums += self.pipeline.evaluate(moved)
            else:
                for tensors in moved:
                    sums += self.parts.stages[0].part(**tensors)[0].double().cpu()
        for stage in self.parts.stages:
            stage.module.train()
            for module in stage.part.modules():
                if isinstance(module, FSDPModule):
                    # no backward pass brings back the shards, which are saved and restored
                    module.reshard()
        return sums

    def _moved(self, tensors: Tensors) -> Tensors:
        """On this rank's device, but for the seed, which Python reads."""
        device = self.mesh.device
        exact = torch.float64 if self.spec.precision == "fp64" else torch.float32
        moved = {}
        for name, tensor in tensors.items():
            if name != "key":
                tensor = tensor.to(device, non_blocking=True)
            moved[name] = tensor.to(exact) if tensor.is_floating_point() else tensor
        return moved

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.spec.precision in ("bf16", "fp16"):
            return torch.autocast(self.mesh.device.type, dtype=DTYPES[self.spec.precision])
        return contextlib.nullcontext()

    def tensors(self) -> dict[str, Any]:
        """Weights and optimizer moments, named after the parameter in the whole network: what a
        checkpoint holds."""
        tied = self.parts.tied
        frozen = self.parts.adapters is not None
        model = {
            tied.get(name, name): p.detach()
            for name, p in self.parts.parameters()
            if p.requires_grad or not frozen
        }
        buffers = {
            name: buffer
            for stage in self.parts.stages
            for name, buffer in _persistent_buffers(stage.part.network)
        }
        return {"model": {**model, **buffers}, "optimizer": self.optimizer.tensors()}

    def restore(self, checkpoint: Checkpoint) -> int:
        """Go on from a checkpoint, of whatever layout; returns its step."""
        load(checkpoint, self.tensors())
        self.seconds_before = float(checkpoint.state.get("train_seconds") or 0.0)
        self.optimizer.restored(checkpoint.state.get("loss_scale"))
        return checkpoint.step

    def state(self, step: int, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Everything else that a checkpoint holds, as JSON."""
        scale = self.optimizer.scale
        return {
            "step": step,
            "world_size": self.world,
            "layout": str(self.mesh.layout),
            "steps": self.plan.steps,
            "validation_loss": row.get("validation_loss"),
            "train_seconds": seconds,
            "loss_scale": [scale.value, scale.good] if scale else None,
        }


def _pipeline(parts: Parts) -> Pipeline:
    from rekindle.train.pipeline import Pipeline  # torch's part of it takes a second to import

    return Pipeline(parts)


def _validation(
    task: Task, shards: Shards, order: SampleOrder, mesh: Any, seed: int
) -> Batches | None:
    rows = shards.rows(VALIDATION)
    if not rows:
        return None
    lengths = shards.lengths(VALIDATION) if order.by_length else None
    once = SampleOrder(
        rows=rows, global_batch_size=order.global_batch_size, seed=0, lengths=lengths,
        pack_length=order.pack_length,
    )  # fmt: skip
    return Batches(task, shards, VALIDATION, once, mesh, seed)


def _persistent_buffers(network: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    saved = network.state_dict(keep_vars=True)
    yield from ((name, b) for name, b in network.named_buffers() if name in saved)


@contextlib.contextmanager
def synchronised(module: torch.nn.Module, last: bool, sharded: bool) -> Iterator[None]:
    """Add up gradients over replicas in the last backward pass of a step only. Shards are reduced
    in each: the gradients of all weights, which a rank would have to keep until then, are what
    sharding is there to spare."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or sharded)
        module.set_requires_all_reduce(last)
        module.set_is_last_backward(last)
    yield
