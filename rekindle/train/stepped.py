"""An engine's updates in the place of our optimizer: what the loop asks for, of what the engine
offers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rekindle.engines import engine_of
from rekindle.engines.base import Stepper, StepperEngine
from rekindle.spec.model import TrainSpec
from rekindle.train.dcp import Piece
from rekindle.train.optimizer import Optimizer, peak_rate
from rekindle.train.parallel import Parts


def taken(parts: Parts, train: TrainSpec) -> Parts | None:
    """The parts, which have values, in the hands of the engine that the config names; None where
    that is rekindle's own."""
    engine = engine_of(train.engine)
    if not isinstance(engine, StepperEngine):
        return None
    (stage,) = parts.stages
    stepper = engine.start(stage.part, train, peak_rate(train), parts.mesh.device)
    stages = (dataclasses.replace(stage, module=stepper.module),)
    return dataclasses.replace(parts, stages=stages, stepper=stepper)


def optimizer_of(parts: Parts, spec: TrainSpec) -> Optimizer | Stepped:
    """What makes the updates of a step."""
    return Stepped(parts, parts.stepper) if parts.stepper else Optimizer(parts, spec)


class Stepped:
    """The face of `Optimizer` before a stepper."""

    scale = None
    loss_scale = 1.0
    replicas: dist.ProcessGroup | None = None  # each rank holds something else

    def __init__(self, parts: Parts, stepper: Stepper) -> None:
        self.parts, self.stepper = parts, stepper

    def scaled(self, count: torch.Tensor) -> torch.Tensor:
        """Losses are not scaled here."""
        return count

    def running(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Nothing has to be told before a micro-batch."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of a micro-batch."""
        self.stepper.backward(loss, last)

    def collect(self) -> torch.Tensor:
        """The engine finds the norm when it updates."""
        return torch.zeros((), dtype=torch.float64, device=self.parts.mesh.device)

    def step(self, rate: float, loss: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Update; returns loss and norm, float64 [2]."""
        return torch.stack([loss, torch.full_like(loss, self.stepper.step(rate))])

    def clear(self) -> None:
        """The engine forgets gradients when it updates."""

    def restored(self, loss_scale: Sequence[float] | None) -> None:
        """To be called when `weights` and `tensors` have been filled from a checkpoint."""
        self.stepper.restored()

    def weights(self) -> dict[str, Any]:
        """Weights in full precision, as flat pieces."""
        return {n: p for n, p in self._pieces().items() if n in self.names}

    def tensors(self) -> dict[str, Any]:
        """The engine's state beside them."""
        return {n: p for n, p in self._pieces().items() if n not in self.names}

    def facts(self) -> dict[str, str]:
        """What the engine has in effect."""
        return dict(self.stepper.facts())

    @property
    def names(self) -> set[str]:
        """Of the trained parameters."""
        return {name for name, p in self.parts.parameters() if p.requires_grad}

    def _pieces(self) -> dict[str, Piece]:
        return {
            name: Piece(f.local, torch.Size([f.start]), torch.Size([f.count]))
            for name, f in self.stepper.fragments().items()
            if f.local.numel()
        }
