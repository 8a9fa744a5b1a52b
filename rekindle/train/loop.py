"""The training loop: the same batches, dropout and weights in any layout, interrupted or not.

One optimizer step: this rank's micro-batches forward and backward (through the pipeline's schedule,
if there is one), one small all-reduce on which all ranks agree (loss, gradient norm, a request to
stop, whether a save is written), then the update, or none if the gradient is not finite.

A GPU never waits for the host: what a step agreed on is read while the next one is computed."""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist

from rekindle.data.manifest import Shards
from rekindle.data.order import SampleOrder
from rekindle.errors import StepError
from rekindle.launch.heartbeats import Phase
from rekindle.records import HistoryRow
from rekindle.spec.model import DEFAULT_EPOCHS, TrainSpec
from rekindle.tasks.base import Task
from rekindle.train.batches import TRAIN, VALIDATION, Batches, Work
from rekindle.train.checkpoint import Checkpoint, Checkpointer, load
from rekindle.train.evaluation import Evaluation
from rekindle.train.history import History, Ledger
from rekindle.train.micro import Micro, Numbers
from rekindle.train.optimizer import Optimizer, Stepped, learning_rate
from rekindle.train.parallel import Parts, autocast
from rekindle.train.throughput import Clock, Profiler

log = logging.getLogger(__name__)

Beat = Callable[[int, Phase], None]
_SPENT = 1 << 20  # more than there are ranks to ask for a stop


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long a run is: counts that follow from the spec and the data."""

    steps: int
    order: SampleOrder
    validate_every: int | None = None

    @classmethod
    def of(cls, train: TrainSpec, order: SampleOrder) -> Self:
        """`steps` wins over `epochs`."""
        steps = train.steps or max(1, order.steps(train.epochs or DEFAULT_EPOCHS))
        return cls(steps, order, train.validate_every)

    def epoch(self, step: int) -> float:
        """Passes over the data after `step` steps: 1.5 in the middle of the second."""
        epoch, position = self.order.epoch_of(step)
        return epoch + position / self.order.steps_in_epoch

    def validates(self, step: int) -> bool:
        if step == self.steps or self.validate_every is None:
            return step == self.steps or self.order.epoch_of(step)[1] == 0
        return step % self.validate_every == 0


@dataclasses.dataclass
class Best:
    """The best validation so far, of `step` (0: none), which `stale` others followed."""

    step: int = 0
    loss: float | None = None
    stale: int = 0

    def hears(self, step: int, loss: float) -> bool:
        """Take in a validation; whether it is the best so far."""
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            self.step, self.loss, self.stale = step, loss, 0
        else:
            self.stale += 1
        return self.stale == 0


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


def diverged(step: int, loss: float, norm: float, since: str = "") -> StepError:
    """What is raised where `step`, counted from 1, gave no finite loss, or no finite gradient."""
    what = f"the loss is {loss} and the gradient's norm {norm} at step {step}{since}"
    fix = "lower train.lr, lengthen train.warmup, or look at the data of this batch"
    return StepError(what, where="train", fix=fix)


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step that the device has been given; `numbers`: its loss, gradient norm, ranks that were
    asked to stop, ranks that have written `save`, and the loss scale. `waited` as Batches."""

    step: int
    work: Work
    rate: float
    numbers: Numbers
    save: object
    waited: float


class Trainer:
    """One rank's view of a run. `behind`: on GPUs, which are read a step later."""

    def __init__(
        self,
        task: Task,
        shards: Shards,
        spec: TrainSpec,
        plan: Plan,
        parts: Parts,
        seed: int,
        beat: Beat = lambda step, phase: None,
    ) -> None:
        self.spec, self.plan, self.parts, self.mesh = spec, plan, parts, parts.mesh
        self.beat = beat
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        layout = self.mesh.layout
        self.evaluation = Evaluation(parts, spec.precision)
        self.pipeline = self.evaluation.pipeline
        self.optimizer: Optimizer | Stepped = (
            Stepped(parts, parts.stepper) if parts.stepper else Optimizer(parts, spec)
        )
        order = plan.order
        joined = parts.stages[0].part.joins_texts
        self.batches = Batches(task, shards, TRAIN, order, self.mesh, seed, joined)
        self.validation = None
        if shards.rows(VALIDATION):
            once = shards.order(
                VALIDATION,
                global_batch_size=order.global_batch_size,
                seed=0,
                by_length=order.by_length,
                pack_length=order.pack_length,
            )
            self.validation = Batches(task, shards, VALIDATION, once, self.mesh, seed, joined)
        self.feed = self.evaluation.feed
        self.behind = self.mesh.device.type != "cpu"
        self.bad_steps, self.seconds_before, self.began = 0, 0.0, time.monotonic()
        self.best, self.owed, self.spent = Best(), False, False
        replicates = layout.only_replicates and parts.stepper is None
        if replicates and layout.world > 2:  # a sum of two has no order
            self._warm_up()

    def _warm_up(self) -> None:
        """Have DDP regroup its buckets, which reorders sums, before the first step."""
        buffers = [(b, b.clone()) for b in self.parts.network.buffers()]
        work = self.batches.make(0)
        for _ in range(2):
            self._backward(work)
        self.optimizer.clear()
        for buffer, before in buffers:
            buffer.copy_(before)

    def fit(
        self,
        saver: Checkpointer,
        history: History,
        stop: StopFlag,
        start: int,
        clock: Clock,
        profiler: Profiler,
        ledger: Ledger | None = None,
    ) -> int:
        """Train from step `start` until `done`, or a request to stop; returns the last step."""
        every, steps, self.began = self.spec.checkpoint.every, self.plan.steps, time.monotonic()
        self.since = Numbers(self._number(0))
        report = functools.partial(self._report, history, clock, ledger)
        waiting: Launched | None = None
        self._catch_up(start, saver, history, stop)
        if self.owed or self.done(start):
            return start
        for step in range(start, steps):
            launched = self._launch(step, self.batches.work(step, steps), stop, saver)
            profiler.step(self.batches.waited)
            stopping = False
            if waiting is not None:
                row, stopping = self._read(waiting, saver)
                report(waiting, row)
                waiting = None
            last, validates = step + 1 == steps, self.plan.validates(step + 1)
            due = every is not None and (step + 1) % every == 0
            if self.behind and not (validates or due or stopping or self.spent):
                waiting = launched
                continue
            row, asked = self._read(launched, saver)
            stopping, last = stopping or asked, last or self.spent
            validates = validates or last
            improved, self.owed = False, validates and self.validation is not None
            if last or (validates and not stopping):
                found, self.owed = self.validate(step + 1, stop)
                row, stopping = row | found, stopping or self.owed
                improved = self._improved(step + 1, found)
            report(launched, row)
            due = due or stopping or improved
            last = last or self.done(step + 1)
            if last or (due and (not stopping or saver.fits(stop.seconds_left()))):
                self.beat(step + 1, "save")
                saver.save(step + 1, self.tensors(), self.state(step + 1, row, self.seconds()))
            if stopping or last:
                return step + 1
        return steps

    def _report(
        self,
        history: History,
        clock: Clock,
        ledger: Ledger | None,
        done: Launched,
        row: Mapping[str, Any],
    ) -> None:
        """Add a step to the curve; a validation behind it is not part of the next step's time."""
        seconds = done.numbers.seconds_since(self.since)
        measured = clock.tick(done.work, done.waited, seconds)
        self.since = Numbers(self._number(0)) if "validation_loss" in row else done.numbers
        shown = HistoryRow(step=done.step + 1, **row, **measured)
        if self.rank == 0:
            history.append(shown)
            clock.report(shown)
        if ledger is not None:
            ledger.append(done.step + 1, self.batches.ids(done.work))

    def _catch_up(self, step: int, saver: Checkpointer, history: History, stop: StopFlag) -> None:
        """The validation of the step that it resumed from, where a request to stop came first."""
        if not self.owed:
            return
        found, self.owed = self.validate(step, stop)
        if self.rank == 0:
            history.amend(step, found)
        if self._improved(step, found):
            saver.save(step, self.tensors(), self.state(step, found, self.seconds_before))

    def done(self, step: int) -> bool:
        if self.owed and self.spec.exports_best:
            return False
        patience = self.spec.early_stopping_patience
        impatient = patience is not None and self.best.stale >= patience
        return step == self.plan.steps or impatient or self.spent

    def seconds(self) -> float:
        """Of training, in all attempts."""
        return self.seconds_before + time.monotonic() - self.began

    def _over(self, seconds: float) -> bool:
        hours = self.spec.budget_hours
        return hours is not None and seconds >= hours * 3600

    def _improved(self, step: int, found: Mapping[str, float]) -> bool:
        """Whether the weights are to be kept for what a validation found."""
        if not found:
            return False
        return self.best.hears(step, found["validation_loss"]) and self.spec.exports_best

    def _launch(self, step: int, work: Work, stop: StopFlag, saver: Checkpointer) -> Launched:
        """Give the device one optimizer step; all ranks agree on it in one all-reduce."""
        rate = learning_rate(self.spec, step, self.plan.steps)
        save, written = saver.pending, saver.written()
        loss = self._backward(work, step + 1)[0] / self.mesh.layout.tp
        squares = self.optimizer.collect()
        # one rank's clock decides
        asks = stop.raised + _SPENT * (self.rank == 0 and self._over(self.seconds()))
        shared = self.agreed(torch.stack([loss, squares, *map(self._number, (asks, written))]))
        scale = self.optimizer.scale
        used = scale.value.clone() if scale is not None else self._number(1)
        found = self.optimizer.step(rate, shared[0], shared[1])
        self.optimizer.clear()
        numbers = Numbers(torch.cat([found, shared[2:], used[None]]))
        return Launched(step, work, rate, numbers, save, self.batches.waited)

    def _number(self, value: float) -> torch.Tensor:
        """On the device, filled there: a copy of a number would be waited for."""
        return torch.full((), float(value), dtype=torch.float64, device=self.mesh.device)

    def _read(self, done: Launched, saver: Checkpointer) -> tuple[dict[str, Any], bool]:
        """What a step came to, and whether any rank was asked to stop; waits for the step."""
        loss, norm, asked, written, scale = done.numbers.read()
        self._judge(done.step, loss, norm, searching=scale > 1)
        if written == self.world:
            saver.settle(done.save)
        row = {"epoch": self.plan.epoch(done.step + 1), "loss": loss, "lr": done.rate}
        self.spent = self.spent or asked >= _SPENT
        return row | {"grad_norm": norm}, asked % _SPENT > 0

    def _judge(self, step: int, loss: float, norm: float, searching: bool) -> None:
        """Count steps without an update; StepError after too many, unless fp16 is `searching`."""
        finite = math.isfinite(loss) and math.isfinite(norm)
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if finite or searching:
            return
        log.warning("step %d is skipped: loss %s, gradient norm %s", step + 1, loss, norm)
        if self.bad_steps >= self.spec.max_bad_steps:
            raise diverged(step + 1, loss, norm, f", {self.bad_steps} steps in a row")

    def _backward(self, work: Work, step: int = 0) -> torch.Tensor:
        """Float64 [3], of this rank's micro-batches: loss, right predictions and targets."""
        phase: Phase = "step" if step else "warm-up"
        self.beat(step, phase)
        with autocast(self.spec.precision, self.mesh.device):
            if self.pipeline is not None:
                return self.pipeline.train([self._scaled(m) for m in self.feed(work.micro)])
            module = self.parts.stages[0].module
            self.parts.stages[0].part.results.clear()
            total = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
            for turn, micro in enumerate(self.feed(work.micro)):
                self.beat(step, phase)
                last = turn + 1 == len(work.micro)
                with self.optimizer.running(last):
                    result = module(micro=self._scaled(micro))
                    self.optimizer.backward(result[0, 0], last)
                total += result[0].detach().double()
            return total

    def _scaled(self, micro: Micro) -> Micro:
        return dataclasses.replace(micro, count=self.optimizer.scaled(micro.count))

    @torch.no_grad()
    def validate(
        self, step: int = 0, stop: StopFlag | None = None
    ) -> tuple[dict[str, float], bool]:
        """Loss and accuracy on the validation split; or nothing, where a stop cut it short."""
        if self.validation is None:
            return {}, False
        sums = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        asked: Numbers | None = None
        for number in range(self.validation.order.steps_in_epoch):
            self.beat(step, "validation")
            share = self.evaluation.losses(self.validation.make(number).micro)
            raised = self._number(stop is not None and stop.raised)
            shared = self.agreed(torch.cat([share, raised[None]]))
            sums += shared[:3]
            before, asked = asked, Numbers(shared[3:])
            known = before if self.behind else asked
            if known is not None and known.read()[0] > 0:
                return {}, True
        loss, right, targets = sums.tolist()
        found = {"validation_loss": loss / targets}
        if self.validation.objective.counts_right:
            found["validation_accuracy"] = right / targets
        return found, False

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def tensors(self) -> dict[str, Any]:
        """What a checkpoint holds, by the parameter's name in the whole network."""
        model = self.optimizer.weights() | dict(self.parts.buffers())
        return {"model": model, "optimizer": self.optimizer.tensors()}

    def restore(self, checkpoint: Checkpoint) -> int:
        """Go on from a checkpoint, of whatever layout; returns its step."""
        load(checkpoint, self.tensors(), self.optimizer.replicas)
        self.seconds_before = float(checkpoint.state.get("train_seconds") or 0.0)
        self.spent = self._over(self.seconds_before)
        self.optimizer.restored(checkpoint.state.get("loss_scale"))
        self.best = Best(**checkpoint.state.get("best", {}))
        validated = checkpoint.state.get("validation_loss") is not None
        judges = self.validation is not None and self.plan.validates(checkpoint.step)
        self.owed = judges and not validated
        return checkpoint.step

    def state(self, step: int, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Everything else that a checkpoint holds, as JSON."""
        scale = self.optimizer.scale
        return {
            "step": step,
            "world_size": self.world,
            "layout": str(self.mesh.layout),
            "precision": self.spec.precision,
            "steps": self.plan.steps,
            "validation_loss": row.get("validation_loss"),
            "best": dataclasses.asdict(self.best),
            "train_seconds": seconds,
            "packed": self.batches.order.pack_length is not None,
            "loss_scale": [float(scale.value), int(scale.good)] if scale else None,
        }
