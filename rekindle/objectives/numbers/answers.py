"""The predicted number of each example, in the target's unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import pyarrow as pa

from rekindle.objectives.answers import Answers, Floats, Prediction, Settings
from rekindle.objectives.numbers import SCALE


class NumberAnswers(Answers):
    """`{"value": 12.5}`."""

    score_column: ClassVar[str] = "value"

    def of_outputs(
        self, outputs: Floats, rows: pa.Table, labels: Sequence[str], settings: Settings
    ) -> list[Prediction | None]:
        # the network learned numbers with mean 0 and deviation 1
        mean, deviation = (settings[name] for name in SCALE)
        values_B = (outputs[:, 0] * deviation + mean).tolist()
        return [{"value": value} if math.isfinite(value) else None for value in values_B]

    def of_scores(
        self, scores: pa.Scalar, labels: Sequence[str], margin: float
    ) -> Prediction | None:
        value = scores.as_py()
        return {"value": value} if math.isfinite(value) else None

    def tolerance(self, tolerance: float, settings: Settings) -> float:
        """Of the target's spread, in its unit."""
        _, deviation = (settings[name] for name in SCALE)
        return tolerance * float(deviation)


ANSWERS = NumberAnswers()
