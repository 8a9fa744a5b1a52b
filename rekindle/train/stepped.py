"""Updates by another engine: what the training loop asks of `Optimizer`, done by its stepper."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rekindle.engines import deepspeed_stepper, engine_of
from rekindle.engines.deepspeed import DeepSpeed
from rekindle.engines.deepspeed_stepper import DeepSpeedStepper
from rekindle.spec.model import TrainSpec
from rekindle.train import modules
from rekindle.train.dcp import Piece
from rekindle.train.mesh import Ranks
from rekindle.train.parts import Parts
from rekindle.train.schedule import peak_rate


def start_engine(parts: Parts, train: TrainSpec) -> Parts | None:
    """The parts, with values, in the hands of the config's engine; None if it is rekindle's own."""
    engine = engine_of(train.engine)
    if not isinstance(engine, DeepSpeed):
        return None
    (stage,) = parts.stages
    config = engine.config(train, dist.get_world_size())
    config["optimizer"]["params"]["lr"] = peak_rate(train)
    tp = parts.mesh.layout.tp
    divided: Mapping[str, tuple[str, ...]] = {}
    if tp > 1:
        known = modules.required(parts.network, "tensor-parallel")
        divided = {"column": known.column, "row": known.row, "skip": known.per_head}
    stepper = deepspeed_stepper.start(stage.part, config, parts.mesh.device, tp, divided)
    stages = (dataclasses.replace(stage, module=stepper.module),)
    return dataclasses.replace(parts, stages=stages, stepper=stepper)


class Stepped:
    """The methods of `Optimizer` that the loop calls, carried out by an engine's stepper."""

    scale = None
    """Losses are not scaled here."""
    replicas: Ranks = None
    """None: no two ranks hold the same, because the engine divides its state over all."""

    def __init__(self, parts: Parts, stepper: DeepSpeedStepper) -> None:
        self.parts = parts
        self.stepper = stepper

    def divided_by_scale(self, count: torch.Tensor) -> torch.Tensor:
        """The count as it is."""
        return count

    def micro_batch_context(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """A context that does nothing: the engine sums gradients by itself."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradients of a micro-batch; `is_last`: of the last one of a step."""
        self.stepper.backward(loss, is_last)

    def collect(self) -> torch.Tensor:
        """Zero, float64 []: the engine finds the norm when it updates."""
        return torch.zeros((), dtype=torch.float64, device=self.parts.mesh.device)

    def step(self, rate: float, loss: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Update; returns loss and norm, float64 [2]."""
        return torch.stack([loss, torch.full_like(loss, self.stepper.step(rate))])

    def clear(self) -> None:
        """The engine forgets gradients when it updates."""

    def finish_restore(self, loss_scale: Sequence[float] | None) -> None:
        """Have the engine take over what `tensors` and `weights` were filled with."""
        self.stepper.restored()

    def weights(self) -> dict[str, Any]:
        """Weights in full precision, as flat pieces."""
        weights, _ = self._weights_and_others()
        return weights

    def tensors(self) -> dict[str, Any]:
        """The engine's state beside the weights, as flat pieces."""
        _, others = self._weights_and_others()
        return others

    def facts(self) -> dict[str, str]:
        """What the engine says is in effect."""
        return dict(self.stepper.facts())

    def _weights_and_others(self) -> tuple[dict[str, Piece], dict[str, Piece]]:
        """The engine's state, that of trained parameters apart from the rest."""
        trained = {name for name, parameter in self.parts.parameters() if parameter.requires_grad}
        weights = {}
        others = {}
        for key, piece in self._pieces().items():
            if _parameter_of(key) in trained:
                weights[key] = piece
            else:
                others[key] = piece
        return weights, others

    def _pieces(self) -> dict[str, Piece]:
        pieces = {}
        for key, fragment in self.stepper.fragments().items():
            if fragment.local.numel():
                start = torch.Size([fragment.start])
                pieces[key] = Piece(fragment.local, start, torch.Size([fragment.count]))
        return pieces


def _parameter_of(key: str) -> str:
    """The parameter that a fragment is of: `name@place`."""
    return key.partition("@")[0]
