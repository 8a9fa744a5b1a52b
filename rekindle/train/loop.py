"""The training loop: the same batches, dropout and weights in any layout, interrupted or
not.

One optimizer step: this rank's micro-batches forward and backward (through the pipeline's
schedule, if there is one), one small all-reduce on which all ranks agree (loss, gradient
norm, a request to stop, the end of the budget, whether a save is written), then the
update, or none if the gradient is not finite.

A GPU never waits for the host: what a step agreed on is read while the next one is
computed."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist

from rekindle.data.manifest import Shards
from rekindle.data.order import SampleOrder
from rekindle.errors import StepError
from rekindle.launch.heartbeats import Phase
from rekindle.objectives import loss_of
from rekindle.objectives.micro import Micro, Numbers
from rekindle.records import HistoryRow
from rekindle.spec.model import DEFAULT_EPOCHS, TrainSpec
from rekindle.tasks.base import Task
from rekindle.train.batches import TRAIN, VALIDATION, Batches, StepWork
from rekindle.train.checkpoint import Checkpoint, Checkpointer, load
from rekindle.train.evaluation import Evaluation
from rekindle.train.history import ExampleLedger, History
from rekindle.train.optimizer import Optimizer
from rekindle.train.parts import Parts, autocast
from rekindle.train.schedule import learning_rate
from rekindle.train.stepped import Stepped
from rekindle.train.throughput import Clock, Profiler

log = logging.getLogger(__name__)

Beat = Callable[[int, Phase], None]


@dataclasses.dataclass(frozen=True)
class RunLength:
    """How long a run is: counts that follow from the spec and the data."""

    steps: int
    """Optimizer steps from the start to the end."""
    order: SampleOrder
    """Which examples each step trains on."""
    validate_every: int | None = None
    """Steps between two validations; None: at the end of each epoch."""

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
        """Whether a validation follows `step`, counted from 1: it always follows the last one."""
        if step == self.steps:
            return True
        if self.validate_every is None:
            return self.order.epoch_of(step)[1] == 0
        return step % self.validate_every == 0


@dataclasses.dataclass
class Best:
    """The best validation so far."""

    step: int = 0
    """The step that it followed; 0: there was none."""
    loss: float | None = None
    """Its loss."""
    stale: int = 0
    """How many validations followed that were no better."""

    def update(self, step: int, loss: float) -> bool:
        """Take in a validation; whether it is the best so far."""
        is_best = math.isfinite(loss) and (self.loss is None or loss < self.loss)
        if is_best:
            self.step = step
            self.loss = loss
            self.stale = 0
        else:
            self.stale += 1
        return is_best


class StopFlag:
    """Raised by SIGTERM on one rank, agreed on by all at the next step."""

    def __init__(self, grace_seconds: float) -> None:
        self.raised = False
        self.grace_seconds = grace_seconds
        self.deadline = math.inf

    def raise_it(self, number: int = 0) -> None:
        """Ask for a stop: from now on the machine may be gone after the grace period.

        `number` is the signal's, as handlers of signals get it."""
        if not self.raised:
            self.raised = True
            self.deadline = time.monotonic() + self.grace_seconds

    def seconds_left(self) -> float:
        """Seconds until the machine may be gone.

        A rank that has had no signal yet assumes the whole grace period."""
        return min(self.deadline - time.monotonic(), self.grace_seconds)


def diverged(step: int, loss: float, norm: float, since: str = "") -> StepError:
    """The error of `step`, counted from 1, which gave no finite loss, or no finite gradient."""
    message = f"the loss is {loss} and the gradient's norm {norm} at step {step}{since}"
    fix = "lower train.lr, lengthen train.warmup, or look at the data of this batch"
    return StepError(message, where="train", fix=fix)


@dataclasses.dataclass(frozen=True)
class LaunchedStep:
    """A step that the device has been given, and whose numbers may not be known yet."""

    step: int
    """Counted from 0."""
    work: StepWork
    rate: float
    """The learning rate."""
    numbers: Numbers
    """As `StepNumbers` names them."""
    save: object
    """The save that was pending when the step began: ranks say in `numbers` that it is written."""
    waited: float
    """Seconds that batches were waited for, since the start."""


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """What all ranks agreed on in a step, in the order in which the device sends it."""

    loss: float
    norm: float
    """Of the whole gradient, before clipping."""
    stops: float
    """How many ranks were asked to stop."""
    spends: float
    """1 where the first rank's clock says that `train.budget_hours` are spent."""
    written: float
    """How many ranks have written the pending save."""
    scale: float
    """The loss scale of fp16, 1 elsewhere."""


class StepLog:
    """Where a rank writes what its steps came to: the loss curve, its progress, the ledger."""

    def __init__(
        self, rank: int, history: History, clock: Clock, ledger: ExampleLedger | None = None
    ) -> None:
        self.rank = rank
        self.history = history
        self.clock = clock
        self.ledger = ledger
        self.previous: Numbers | None = None

    def begin(self, numbers: Numbers) -> None:
        """The next step's time counts from when the device made these `numbers`."""
        self.previous = numbers

    def write(self, step: LaunchedStep, row: Mapping[str, Any], ids: Iterable[str]) -> None:
        """Add a step that was read; `ids` names the examples of this rank, for the ledger."""
        assert self.previous is not None
        seconds = step.numbers.seconds_since(self.previous)
        self.previous = step.numbers
        speed = self.clock.tick(step.work, step.waited, seconds)
        if self.rank == 0:
            history_row = HistoryRow(step=step.step + 1, **row, **speed)
            self.history.append(history_row)
            self.clock.report(history_row)
        if self.ledger is not None:
            self.ledger.append(step.step + 1, list(ids))


class Trainer:
    """One rank's view of a run: it owns the parts, the optimizer and what has been agreed on."""

    def __init__(
        self,
        task: Task,
        shards: Shards,
        spec: TrainSpec,
        length: RunLength,
        parts: Parts,
        seed: int,
        beat: Beat = lambda step, phase: None,
    ) -> None:
        self.spec = spec
        self.length = length
        self.parts = parts
        self.mesh = parts.mesh
        self.beat = beat
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.evaluation = Evaluation(parts, spec.precision)
        self.pipeline = self.evaluation.pipeline
        self.feed = self.evaluation.feed
        self.optimizer: Optimizer | Stepped
        if parts.stepper is not None:
            self.optimizer = Stepped(parts, parts.stepper)
        else:
            self.optimizer = Optimizer(parts, spec)
        order = length.order
        joined = parts.stages[0].part.joins_texts
        loss = loss_of(task.objective)
        self.batches = Batches(loss, task, shards, TRAIN, order, self.mesh, seed, joined)
        self.validation: Batches | None = None
        if shards.rows(VALIDATION):
            once = shards.order(
                VALIDATION,
                global_batch_size=order.global_batch_size,
                seed=0,
                by_length=order.by_length,
                pack_length=order.pack_length,
            )
            self.validation = Batches(loss, task, shards, VALIDATION, once, self.mesh, seed, joined)
        # on a GPU the numbers of a step are read one step later, so that it never waits
        self.reads_later = self.mesh.device.type != "cpu"
        self.bad_steps = 0
        self.seconds_before = 0.0
        self.began = time.monotonic()
        self.best = Best()
        # a validation that a request to stop cut short: it is made up for after resuming
        self.owes_validation = False
        self.is_spent = False
        replicates = self.mesh.layout.only_replicates and parts.stepper is None
        if replicates and self.world > 2:  # a sum of two has no order
            self._warm_up()

    def _warm_up(self) -> None:
        """Have DDP regroup its buckets, which reorders sums, before the first step."""
        buffers = [(buffer, buffer.clone()) for buffer in self.parts.network.buffers()]
        work = self.batches.make(0)
        for _ in range(2):
            self._backward(work)
        self.optimizer.clear()
        for buffer, before in buffers:
            buffer.copy_(before)

    def fit(
        self,
        start: int,
        saver: Checkpointer,
        step_log: StepLog,
        profiler: Profiler,
        stop: StopFlag,
    ) -> int:
        """Train from step `start` until `is_done`, or a request to stop; returns the last step."""
        self.began = time.monotonic()
        step_log.begin(Numbers(self._number(0)))
        if self.owes_validation:
            self._make_up_for_validation(start, saver, step_log.history, stop)
        if self.owes_validation or self.is_done(start):
            return start
        unread: LaunchedStep | None = None
        for step in range(start, self.length.steps):
            work = self.batches.work(step, self.length.steps)
            launched = self._launch(step, work, stop, saver)
            profiler.step(self.batches.waited)
            is_stopping = False
            if unread is not None:
                row, is_stopping = self._read(unread, saver)
                self._write(step_log, unread, row)
                unread = None
            if self.reads_later and not (is_stopping or self._is_due(step + 1)):
                unread = launched
                continue
            if self._conclude(launched, is_stopping, saver, step_log, stop):
                return step + 1
        return self.length.steps

    def _is_due(self, step: int) -> bool:
        """Whether something follows `step`, counted from 1, for which its numbers are needed."""
        return self.is_spent or self.length.validates(step) or self._saves(step)

    def _saves(self, step: int) -> bool:
        """Whether the spec asks for a checkpoint of `step`, counted from 1."""
        every = self.spec.checkpoint.every
        return every is not None and step % every == 0

    def _conclude(
        self,
        launched: LaunchedStep,
        is_stopping: bool,
        saver: Checkpointer,
        step_log: StepLog,
        stop: StopFlag,
    ) -> bool:
        """Read a step, validate, write and save as it is due; whether the training ends here."""
        step = launched.step + 1
        row, was_asked = self._read(launched, saver)
        is_stopping = is_stopping or was_asked
        is_last = step == self.length.steps or self.is_spent
        validates = is_last or self.length.validates(step)
        self.owes_validation = validates and self.validation is not None
        is_improved = False
        if is_last or (validates and not is_stopping):
            validation, self.owes_validation = self.validate(step, stop)
            row |= validation
            is_stopping = is_stopping or self.owes_validation
            is_improved = self._keeps_weights(step, validation)
        self._write(step_log, launched, row)
        is_last = is_last or self.is_done(step)
        saves = is_last
        if is_stopping:
            saves = saves or saver.fits(stop.seconds_left())
        elif is_improved or self._saves(step):
            saves = True
        if saves:
            self.beat(step, "save")
            saver.save(step, self.tensors(), self.state(step, row, self.seconds()))
        return is_stopping or is_last

    def _write(self, step_log: StepLog, step: LaunchedStep, row: Mapping[str, Any]) -> None:
        # names are read from the shards, so only for those who keep a ledger
        ids = self.batches.ids(step.work) if step_log.ledger is not None else []
        step_log.write(step, row, ids)
        if "validation_loss" in row:  # a validation is not part of the next step's time
            step_log.begin(Numbers(self._number(0)))

    def _make_up_for_validation(
        self, step: int, saver: Checkpointer, history: History, stop: StopFlag
    ) -> None:
        """Validate the step that it resumed from, where a request to stop came first."""
        validation, self.owes_validation = self.validate(step, stop)
        if self.rank == 0:
            history.amend(step, validation)
        if self._keeps_weights(step, validation):
            saver.save(step, self.tensors(), self.state(step, validation, self.seconds_before))

    def is_done(self, step: int) -> bool:
        """Whether no step follows `step`: all are done, patience is at its end, or the budget."""
        if self.owes_validation and self.spec.exports_best:
            return False
        patience = self.spec.early_stopping_patience
        is_impatient = patience is not None and self.best.stale >= patience
        return step == self.length.steps or is_impatient or self.is_spent

    def seconds(self) -> float:
        """Seconds of training, in all attempts."""
        return self.seconds_before + time.monotonic() - self.began

    def _exceeds_budget(self, seconds: float) -> bool:
        hours = self.spec.budget_hours
        return hours is not None and seconds >= hours * 3600

    def _keeps_weights(self, step: int, validation: Mapping[str, float]) -> bool:
        """Take in a validation, if there was one; whether its weights are to be kept."""
        if not validation:
            return False
        is_best = self.best.update(step, validation["validation_loss"])
        return is_best and self.spec.exports_best

    def _launch(
        self, step: int, work: StepWork, stop: StopFlag, saver: Checkpointer
    ) -> LaunchedStep:
        """Give the device one optimizer step; all ranks agree on it in one all-reduce."""
        rate = learning_rate(self.spec, step, self.length.steps)
        save = saver.pending
        is_written = saver.written()
        loss = self._backward(work, step + 1)[0] / self.mesh.layout.tp
        squares = self.optimizer.collect()
        # clocks differ: the first rank's decides for all
        is_spent = self.rank == 0 and self._exceeds_budget(self.seconds())
        flags = [self._number(flag) for flag in (stop.raised, is_spent, is_written)]
        shared = self.add_over_ranks(torch.stack([loss, squares, *flags]))
        scale = self._number(1)
        if self.optimizer.scale is not None:
            scale = self.optimizer.scale.value.clone()  # before the step changes it
        loss_and_norm = self.optimizer.step(rate, shared[0], shared[1])
        self.optimizer.clear()
        numbers = Numbers(torch.cat([loss_and_norm, shared[2:], scale[None]]))
        return LaunchedStep(step, work, rate, numbers, save, self.batches.waited)

    def _number(self, value: float) -> torch.Tensor:
        """On the device, filled there: a copy of a number would be waited for."""
        return torch.full((), float(value), dtype=torch.float64, device=self.mesh.device)

    def _read(self, launched: LaunchedStep, saver: Checkpointer) -> tuple[dict[str, Any], bool]:
        """A step's row of the curve, and whether any rank was asked to stop; waits for the step."""
        numbers = StepNumbers(*launched.numbers.read())
        self._judge(launched.step, numbers)
        if numbers.written == self.world:
            saver.settle(launched.save)
        if numbers.spends > 0:
            self.is_spent = True
        row = {
            "epoch": self.length.epoch(launched.step + 1),
            "loss": numbers.loss,
            "lr": launched.rate,
            "grad_norm": numbers.norm,
        }
        return row, numbers.stops > 0

    def _judge(self, step: int, numbers: StepNumbers) -> None:
        """Count steps without an update; StepError after too many in a row.

        None is raised while fp16 looks for a loss scale that does not overflow."""
        if math.isfinite(numbers.loss) and math.isfinite(numbers.norm):
            self.bad_steps = 0
            return
        self.bad_steps += 1
        if numbers.scale > 1:
            return
        log.warning(
            "step %d is skipped: loss %s, gradient norm %s", step + 1, numbers.loss, numbers.norm
        )
        if self.bad_steps >= self.spec.max_bad_steps:
            since = f", {self.bad_steps} steps in a row"
            raise diverged(step + 1, numbers.loss, numbers.norm, since)

    def _backward(self, work: StepWork, step: int = 0) -> torch.Tensor:
        """Float64 [3], of this rank's micro-batches: loss, right predictions and targets."""
        phase: Phase = "step" if step else "warm-up"
        self.beat(step, phase)
        with autocast(self.spec.precision, self.mesh.device):
            if self.pipeline is not None:
                return self.pipeline.train([self._scaled(micro) for micro in self.feed(work.micro)])
            module = self.parts.stages[0].module
            self.parts.stages[0].part.results.clear()
            total = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
            for turn, micro in enumerate(self.feed(work.micro)):
                self.beat(step, phase)
                is_last = turn + 1 == len(work.micro)
                with self.optimizer.micro_batch_context(is_last):
                    result = module(micro=self._scaled(micro))
                    self.optimizer.backward(result[0, 0], is_last)
                total += result[0].detach().double()
            return total

    def _scaled(self, micro: Micro) -> Micro:
        return dataclasses.replace(micro, count=self.optimizer.divided_by_scale(micro.count))

    @torch.no_grad()
    def validate(
        self, step: int = 0, stop: StopFlag | None = None
    ) -> tuple[dict[str, float], bool]:
        """Loss and accuracy on the validation split, and whether a request to stop cut it
        short.

        The first is empty where it was cut short, or where there is no validation
        split."""
        if self.validation is None:
            return {}, False
        sums = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        stops: Numbers | None = None
        for number in range(self.validation.order.steps_in_epoch):
            self.beat(step, "validation")
            share = self.evaluation.losses(self.validation.make(number).micro)
            raised = self._number(stop is not None and stop.raised)
            shared = self.add_over_ranks(torch.cat([share, raised[None]]))
            sums += shared[:3]
            previous_stops = stops
            stops = Numbers(shared[3:])
            readable = previous_stops if self.reads_later else stops
            if readable is not None and readable.read()[0] > 0:
                return {}, True
        loss, right, targets = sums.tolist()
        validation = {"validation_loss": loss / targets}
        if self.validation.task.kind.counts_right:
            validation["validation_accuracy"] = right / targets
        return validation, False

    def add_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `values`, in place; all ranks have to call it."""
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
        self.is_spent = self._exceeds_budget(self.seconds_before)
        self.optimizer.finish_restore(checkpoint.state.get("loss_scale"))
        self.best = Best(**checkpoint.state.get("best", {}))
        validates = self.validation is not None and self.length.validates(checkpoint.step)
        was_validated = checkpoint.state.get("validation_loss") is not None
        self.owes_validation = validates and not was_validated
        return checkpoint.step

    def state(self, step: int, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Everything else that a checkpoint holds, as JSON."""
        scale = self.optimizer.scale
        return {
            "step": step,
            "world_size": self.world,
            "layout": str(self.mesh.layout),
            "precision": self.spec.precision,
            "steps": self.length.steps,
            "validation_loss": row.get("validation_loss"),
            "best": dataclasses.asdict(self.best),
            "train_seconds": seconds,
            "packed": self.batches.order.pack_length is not None,
            "loss_scale": [float(scale.value), int(scale.finite_steps)] if scale else None,
        }
