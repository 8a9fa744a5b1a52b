"""Squared error of a number for each example, such as a price or a score. The network's
own number counts standard deviations from the mean of the training split, so that a
learning rate means what it means for classes, whatever the target's unit; scores are in
that unit. Shapes: B rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from rekindle.objectives import loss as base
from rekindle.objectives.classes.loss import Classes
from rekindle.objectives.loss import Columns, Settings, Stage, Texts
from rekindle.objectives.micro import Micro
from rekindle.objectives.numbers import SCALE


class SquaredError(Classes):
    """The squared error of a number for each example."""

    def labels(self, table: pa.Table, settings: Settings) -> torch.Tensor:
        mean, deviation = (settings[name] for name in SCALE)
        return torch.from_numpy((table.column("label").to_numpy() - mean) / deviation)

    def loss_of(
        self, stage: Stage, logits: torch.Tensor, theirs: torch.Tensor | None, micro: Micro
    ) -> torch.Tensor:
        assert micro.weights is not None
        errors_B = logits[:, 0] - micro.labels.to(logits.dtype)
        weights_B = micro.weights.to(logits.dtype)
        loss = (errors_B.square() * weights_B).sum() / micro.count[0]
        return base.row(loss, torch.zeros_like(loss), weights_B.sum())

    def width(self, labels: Sequence[str]) -> int:
        return 1

    def columns(self, encoded: pa.Table, sums: np.ndarray, settings: Settings) -> Columns:
        mean, deviation = (settings[name] for name in SCALE)
        return {"value": pa.array(sums[:, 0] * deviation + mean)}

    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        return {"label": pa.array(random.normal(size=len(texts)))}


LOSS = SquaredError()
