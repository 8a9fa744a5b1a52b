"""The most probable class of each example, and how probable it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

from rekindle.objectives.answers import (
    Answers,
    Floats,
    Prediction,
    Settings,
    logits_of,
    sure,
    top,
)


class ClassAnswers(Answers):
    """`{"label": "billing", "probability": 0.93}`."""

    def of_outputs(
        self, outputs: Floats, rows: pa.Table, labels: Sequence[str], settings: Settings
    ) -> list[Prediction | None]:
        probabilities_B, classes_B = top(outputs)
        answers = list[Prediction | None]()
        for probability, index in zip(probabilities_B.tolist(), classes_B.tolist(), strict=True):
            if math.isfinite(probability):
                answers.append({"label": labels[index], "probability": probability})
            else:
                answers.append(None)
        return answers

    def of_scores(
        self, scores: pa.Scalar, labels: Sequence[str], margin: float
    ) -> Prediction | None:
        logits_1C = logits_of(scores, len(labels))
        if not sure(logits_1C, margin):
            return None
        (probability,), (index,) = top(logits_1C)
        return {"label": labels[index], "probability": float(probability)}


ANSWERS = ClassAnswers()
