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
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rekindle.data.manifest import Shards
from rekindle.data.order import SampleOrder
from rekindle.errors import StepError
from rekindle.records import HistoryRow
from rekindle.spec.model import TrainSpec
from rekindle.tasks.base import Task
from rekindle.train.batches import TRAIN, VALIDATION, Batches, Tensors, Work
from rekindle.train.checkpoint import Checkpoint, Checkpointer, load
from rekindle.train.history import History
from rekindle.train.optimizer import Optimizer
from rekindle.train.parallel import DTYPES, Parts
from rekindle.train.pipeline import Pipeline
from rekindle.train.schedule import learning_rate
from rekindle.train.throughput import Clock

log = logging.getLogger(__name__)

DEFAULT_EPOCHS = 3.0


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

    raised = False

    def raise_it(self, number: int = 0) -> None:
        self.raised = True


class Trainer:
    """One rank's view of a run."""

    def __init__(
        self, task: Task, shards: Shards, spec: TrainSpec, plan: Plan, parts: Parts, seed: int
    ) -> None:
        self.spec, self.plan, self.parts, self.mesh = spec, plan, parts, parts.mesh
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        layout = self.mesh.layout
        self.pipeline = Pipeline(parts) if layout.pp > 1 else None
        self.optimizer = Optimizer(parts, spec)
        order = copy.deepcopy(plan.order)  # its own, because batches are made in a thread
        self.batches = Batches(task, shards, TRAIN, order, self.mesh, seed)
        self.validation = _validation(task, shards, plan.order, self.mesh, seed)
        self.bad_steps = 0
        if layout.only_replicates and layout.world > 1:
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

    def fit(self, checkpointer: Checkpointer, history: History, stop: StopFlag, start: int) -> int:
        """Train from step `start` to the end; returns the last step done, which is smaller after a
        request to stop."""
        clock = Clock(self.plan.steps)
        every, steps = self.spec.checkpoint.every, self.plan.steps
        for step in range(start, steps):
            work = self.batches.work(step, steps)
            row, stopping = self._step(step, work, stop)
            last = step + 1 == steps
            if stopping or last or self.plan.ends_epoch(step + 1):
                row |= self.validate()
            done = HistoryRow(step=step + 1, **row, **clock.tick(work, self.mesh, self.batches))
            if self.rank == 0:
                history.append(done)
                clock.report(done)
            if stopping or last or (every and (step + 1) % every == 0):
                checkpointer.save(step + 1, self.tensors(), self.state(step + 1, row))
            checkpointer.committed()
            if stopping and not last:
                return step + 1
        return steps

    def _step(self, step: int, work: Work, stop: StopFlag) -> tuple[dict[str, Any], bool]:
        """One optimizer step; the gang agrees in one small all-reduce on the loss, the norm and on
        whether to stop."""
        rate = learning_rate(self.spec, step, self.plan.steps)
        loss = self._backward(work)[0] / self.mesh.layout.tp
        squares = self.optimizer.collect()
        shared = torch.stack([loss, squares, torch.tensor(float(stop.raised)).double()])
        shared = self._all_reduced(shared)
        scale = self.optimizer.loss_scale
        mean_loss, norm = float(shared[0]) / scale, math.sqrt(float(shared[1])) / scale
        finite = math.isfinite(mean_loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step(rate, norm)
        self._judge(finite, step, mean_loss, norm)
        self.optimizer.clear()
        row = {"epoch": self.plan.epoch(step + 1), "loss": mean_loss, "lr": rate, "grad_norm": norm}
        return row, bool(shared[2])

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

    def _backward(self, work: Work) -> torch.Tensor:
        """Gradients of this rank's micro-batches; float64 [3]: its share of loss, right predictions
        and targets."""
        scale = self.optimizer.loss_scale
        micro = [{**self._moved(m), "count": m["count"] / scale} for m in work.micro]
        with self._precision():
            if self.pipeline is not None:
                return self.pipeline.train(micro)
            module = self.parts.stages[0].module
            total = torch.zeros(3, dtype=torch.float64)
            for turn, tensors in enumerate(micro):
                with _synchronised(module, turn + 1 == len(micro)):
                    result = module(**tensors)
                    result[0, 0].backward()
                total += result[0].detach().double().cpu()
            return total

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss and accuracy on the validation split, each target counted once in any layout."""
        if self.validation is None:
            return {}
        modules = [stage.module for stage in self.parts.stages]
        for module in modules:
            module.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        for step in range(self.validation.order.steps_in_epoch(0)):
            work = self.validation.make(step)
            micro = [{**self._moved(m), "count": torch.ones(1)} for m in work.micro]
            with self._precision():
                if self.pipeline is not None:
                    sums += self.pipeline.evaluate(micro)
                else:
                    for tensors in micro:
                        part = self.parts.stages[0].part
                        sums += part(**tensors)[0].double().cpu()
        for module in modules:
            module.train()
        loss, right, targets = self._all_reduced(sums).tolist()
        return {"validation_loss": loss / targets, "validation_accuracy": right / targets}

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

    def _all_reduced(self, values: torch.Tensor) -> torch.Tensor:
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
        self.optimizer.restored(checkpoint.state.get("loss_scale"))
        return checkpoint.step

    def state(self, step: int, row: dict[str, Any]) -> dict[str, Any]:
        """Everything else that a checkpoint holds, as JSON."""
        scale = self.optimizer.scale
        return {
            "step": step,
            "world_size": self.world,
            "layout": str(self.mesh.layout),
            "steps": self.plan.steps,
            "validation_loss": row.get("validation_loss"),
            "loss_scale": [scale.value, scale.good] if scale else None,
        }


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
def _synchronised(module: torch.nn.Module, last: bool) -> Iterator[None]:
    """Add up gradients over ranks in the last backward pass of a step only."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
    yield
