"""The training loop: the same batches, the same dropout and the same weights however often it is
interrupted.

Decides what one optimizer step is. Global batch k is divided into micro-batches of fixed size;
micro-batch j of step k belongs to rank j mod world, draws its dropout from (seed, k, j), and rows
that pad the last batch of an epoch weigh nothing. The loss divides by the number of real rows in
the global batch. So the state to save is the step, the weights and the optimizer's moments.

Shapes: B examples of a micro-batch, C classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from rekindle.data.manifest import Shards
from rekindle.data.order import SampleOrder, steps_per_epoch
from rekindle.errors import StepError
from rekindle.launch.events import emit
from rekindle.records import HistoryRow
from rekindle.spec.model import TrainSpec
from rekindle.tasks.base import Task
from rekindle.train import checkpoint as ckpt
from rekindle.train.history import History
from rekindle.train.schedule import learning_rate

log = logging.getLogger(__name__)

DEFAULT_EPOCHS = 3.0
LARGEST_AUTO_MICRO_BATCH = 32
PROGRESS_SECONDS = 0.25
TRAIN, VALIDATION = "train", "validation"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arithmetic of a run: counts that follow from the spec and the number of rows."""

    rows: int
    steps: int
    steps_per_epoch: int
    global_batch_size: int
    micro_batch_size: int

    @classmethod
    def of(cls, train: TrainSpec, rows: int) -> Plan:
        """`steps` wins over `epochs`; `auto` micro-batches are the largest divisor of the global
        batch up to 32.
        """
        size = train.global_batch_size
        per_epoch = steps_per_epoch(rows, size)
        steps = train.steps or max(1, math.ceil((train.epochs or DEFAULT_EPOCHS) * per_epoch))
        micro = train.micro_batch_size
        largest = min(size, LARGEST_AUTO_MICRO_BATCH)
        auto = max(divisor for divisor in range(1, largest + 1) if size % divisor == 0)
        return cls(rows, steps, per_epoch, size, auto if micro == "auto" else micro)


@dataclasses.dataclass
class Trainer:
    """One rank's view of a run. `network` is the bare module, `wrapped` the one that averages
    gradients.
    """

    task: Task
    shards: Shards
    spec: TrainSpec
    plan: Plan
    network: torch.nn.Module
    device: torch.device

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.settings = self.shards.manifest.settings
        has_lengths = "input_ids" in self.shards.table(TRAIN).schema.names
        self.order = SampleOrder(
            rows=self.plan.rows,
            global_batch_size=self.plan.global_batch_size,
            seed=self.spec.seed,
            lengths=self.shards.lengths(TRAIN) if has_lengths else None,
        )
        self.network.to(self.device).train()
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.network, self.spec), lr=self.spec.lr
        )
        self.wrapped = self._wrap()

    def _wrap(self) -> torch.nn.Module:
        """DDP, warmed up: it regroups its buckets after the first backward pass, which changes the
        order of the sums, so without this a restarted run would differ in the last bit from an
        uninterrupted one."""
        if self.world == 1:
            return self.network
        buffers = {name: tensor.clone() for name, tensor in self.network.named_buffers()}
        wrapped = DistributedDataParallel(self.network)
        for _ in range(2):
            self._backward(wrapped, np.full(self.plan.micro_batch_size, -1), 0, 0, 1.0)
        self.optimizer.zero_grad(set_to_none=True)
        for name, tensor in self.network.named_buffers():
            tensor.copy_(buffers[name])
        return wrapped

    def fit(
        self, checkpointer: ckpt.Checkpointer, history: History, stop: StopFlag, start: int
    ) -> int:
        """Train from step `start` to the end; returns the last step done, which is smaller after a
        request to stop.
        """
        clock = _Clock(start, self.plan)
        every = self.spec.checkpoint.every
        for step in range(start, self.plan.steps):
            row, stopping = self._step(step, stop)
            if (
                stopping
                or step + 1 == self.plan.steps
                or (step + 1) % self.plan.steps_per_epoch == 0
            ):
                row |= self._validation()
            done = HistoryRow(step=step + 1, samples_per_second=clock.tick(), **row)
            if self.rank == 0:
                history.append(done)
                clock.report(done)
            last = step + 1 == self.plan.steps
            if stopping or last or (every and (step + 1) % every == 0):
                checkpointer.save(step + 1, self.tensors(), self.state(step + 1))
            checkpointer.committed()
            if stopping and not last:
                return step + 1
        return self.plan.steps

    def _step(self, step: int, stop: StopFlag) -> tuple[dict[str, Any], bool]:
        """One optimizer step; the gang agrees in one small all-reduce on the loss and on whether to
        stop.
        """
        rate = learning_rate(self.spec, step, self.plan.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        indices = self.order.batch(step)
        count = float((indices >= 0).sum())
        loss = self._accumulate(step, indices, count)
        clip = self.spec.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), clip)
        shared = torch.stack([loss, torch.tensor(float(stop.raised))]).double()
        dist.all_reduce(shared)
        mean_loss, grad_norm = float(shared[0]), float(norm)
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            raise StepError(
                f"the loss is {mean_loss} and the gradient's norm {grad_norm} at step {step + 1}",
                where="train",
                fix="lower train.lr, lengthen train.warmup, or look at the data of this batch",
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        epoch = (step + 1) / self.plan.steps_per_epoch
        return {"epoch": epoch, "loss": mean_loss, "lr": rate, "grad_norm": grad_norm}, bool(
            shared[1]
        )

    def _accumulate(self, step: int, indices: np.ndarray, count: float) -> torch.Tensor:
        """Gradients of this rank's micro-batches; returns its share of the mean loss."""
        size = self.plan.micro_batch_size
        parts = [
            (j, indices[j * size : (j + 1) * size])
            for j in range(self.plan.global_batch_size // size)
        ]
        rounds = math.ceil(len(parts) / self.world)
        mine = [parts[j] for j in range(self.rank, len(parts), self.world)]
        # every rank takes part in the last, synchronising round, if need be with rows of no weight
        mine += [(len(parts) + self.rank, np.full(size, -1))] * (rounds - len(mine))
        total = torch.zeros(())
        for turn, (micro, part) in enumerate(mine):
            last = turn + 1 == len(mine)
            with contextlib.nullcontext() if last else _no_sync(self.wrapped):
                total += self._backward(self.wrapped, part, step, micro, count)
        return total

    def _backward(
        self, network: torch.nn.Module, indices: np.ndarray, step: int, micro: int, count: float
    ) -> torch.Tensor:
        inputs, labels_B, weights_B = self._batch(TRAIN, indices)
        torch.manual_seed(_dropout_seed(self.spec.seed, step, micro))
        with self._precision():
            logits_BC = self.task.logits(network, inputs)
        losses_B = F.cross_entropy(
            logits_BC.float(), labels_B, reduction="none", label_smoothing=self.spec.label_smoothing
        )
        loss = (losses_B * weights_B).sum() / count
        # DDP averages over ranks, and the mean is over the global batch already
        (loss * self.world).backward()  # type: ignore[no-untyped-call]
        return loss.detach().cpu()

    def _batch(
        self, split: str, indices: np.ndarray
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Inputs, labels and weights of `indices`; -1 stands for a row that weighs nothing (row 0
        fills its place).
        """
        rows = self.shards.take(split, np.maximum(indices, 0))
        labels = rows.column("label").to_numpy()
        inputs = self.task.collate(rows, self.settings)
        return (
            {name: tensor.to(self.device) for name, tensor in inputs.items()},
            torch.from_numpy(labels.astype(np.int64)).to(self.device),
            torch.from_numpy((indices >= 0).astype(np.float32)).to(self.device),
        )

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.spec.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    @torch.no_grad()
    def _validation(self) -> dict[str, float]:
        """Loss and accuracy on the validation split, each row counted once whatever the number of
        ranks.
        """
        rows = self.shards.rows(VALIDATION)
        if rows == 0:
            return {}
        self.network.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        size = self.plan.micro_batch_size
        for start in range(self.rank * size, rows, self.world * size):
            inputs, labels_B, _ = self._batch(VALIDATION, np.arange(start, min(start + size, rows)))
            with self._precision():
                logits_BC = self.task.logits(self.network, inputs).float()
            loss = F.cross_entropy(logits_BC, labels_B, reduction="sum")
            right = (logits_BC.argmax(-1) == labels_B).sum()
            sums += torch.tensor(
                [float(loss), float(right), float(len(labels_B))], dtype=torch.float64
            )
        self.network.train()
        dist.all_reduce(sums)
        return {
            "validation_loss": float(sums[0] / sums[2]),
            "validation_accuracy": float(sums[1] / sums[2]),
        }

    def tensors(self) -> dict[str, Any]:
        """Weights and optimizer moments, named after the parameter: what a checkpoint holds."""
        moments = {
            f"{name}.{key}": value
            for name, parameter in self.network.named_parameters()
            if parameter.requires_grad
            for key, value in self._moments(parameter).items()
        }
        return {"model": dict(self.network.state_dict()), "optimizer": moments}

    def _moments(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.optimizer.state[parameter]
        if not state:
            state.update(_fresh_moments(parameter))
        return dict(state)

    def state(self, step: int) -> dict[str, Any]:
        """Everything else that a checkpoint holds, as JSON."""
        return {
            "step": step,
            "world_size": self.world,
            "rows": self.plan.rows,
            "steps": self.plan.steps,
        }


class StopFlag:
    """Raised by SIGTERM on one rank, agreed on by all at the next step."""

    raised = False

    def raise_it(self, number: int = 0) -> None:
        self.raised = True


class _Clock:
    """Throughput of the gang and time to the end, from a moving window of recent steps."""

    def __init__(self, start: int, plan: Plan) -> None:
        self.plan = plan
        self.began = self.before = time.perf_counter()
        self.start = start
        self.smooth = 0.0
        self.said = 0.0

    def tick(self) -> float:
        now = time.perf_counter()
        seconds, self.before = max(now - self.before, 1e-9), now
        self.smooth = seconds if not self.smooth else 0.9 * self.smooth + 0.1 * seconds
        return round(self.plan.global_batch_size / self.smooth, 2)

    def report(self, row: HistoryRow) -> None:
        now = time.perf_counter()
        if now - self.said < PROGRESS_SECONDS and row.step < self.plan.steps:
            return
        self.said = now
        emit(
            "progress", step=row.step, steps=self.plan.steps, loss=row.loss,
            samples_per_second=row.samples_per_second,
            eta_seconds=(self.plan.steps - row.step) * self.smooth,
        )  # fmt: skip


def _no_sync(network: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    if isinstance(network, DistributedDataParallel):
        return network.no_sync()
    return contextlib.nullcontext()


def _dropout_seed(seed: int, step: int, micro: int) -> int:
    """A seed for one micro-batch, spread over 63 bits by NumPy's SeedSequence."""
    return int(
        np.random.SeedSequence([seed, step, micro]).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )


def _fresh_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What AdamW starts a parameter with; needed to have tensors to load a checkpoint into."""
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def _parameter_groups(network: torch.nn.Module, spec: TrainSpec) -> list[dict[str, Any]]:
    """Matrices decay; biases and the scales of norms (one-dimensional tensors) do not."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def restore(trainer: Trainer, root: Path) -> int:
    """Load the newest complete checkpoint under `root` into `trainer`; returns its step, or 0 where
    there is none.

    Rank 0 chooses, so that all ranks load the same one even if a file breaks between two looks.
    """
    found: list[Any] = [ckpt.newest(root) if trainer.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    checkpoint: ckpt.Checkpoint | None = found[0]
    if checkpoint is None:
        return 0
    ckpt.load(checkpoint, trainer.tensors())
    return checkpoint.step
