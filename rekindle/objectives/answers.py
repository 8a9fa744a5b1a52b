"""How scores become predictions: `Answers`, which ANSWERS of each `objectives/KIND/answers.py`
is, but that of tokens, which are written one by one. Shapes: B rows, T tokens, W words of a
row, C classes."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Prediction = dict[str, Any]
"""The fields of `ObjectiveKind.answer_fields`."""
Floats = NDArray[np.float64]
Settings = Mapping[str, Any]


class Answers(abc.ABC):
    """Has no state: a model's labels and settings are given."""

    score_column: ClassVar[str] = "logits"
    """The column of an example's scores (`Scoring.columns`) that `of_scores` reads."""

    @abc.abstractmethod
    def of_outputs(
        self, outputs: Floats, rows: pa.Table, labels: Sequence[str], settings: Settings
    ) -> list[Prediction | None]:
        """The answer to each encoded row, of what the network gives for it, which is
        `Task.logits`, float64; None where that is not a number."""

    @abc.abstractmethod
    def of_scores(
        self, scores: pa.Scalar, labels: Sequence[str], margin: float
    ) -> Prediction | None:
        """The answer that an example's scores say; None where it is not clear by `margin`,
        a difference of probabilities, or not a number."""

    def tolerance(self, tolerance: float, settings: Settings) -> float:
        """By how much an answer may differ where probabilities may by `tolerance`."""
        return tolerance


def top(logits: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The highest probability along the last axis, and whose it is; NaN where a logit is."""
    # an infinite logit makes NaN, which is refused as NaN itself is
    with np.errstate(invalid="ignore"):
        odds = np.exp(logits - logits.max(-1, keepdims=True))
    return 1 / odds.sum(-1), logits.argmax(-1)


def sure(logits_WC: Floats, margin: float) -> bool:
    """Whether the most probable class of each row is so by `margin`; not where one is NaN."""
    odds_WC = np.exp(logits_WC - logits_WC.max(1, keepdims=True))
    odds_WC /= odds_WC.sum(1, keepdims=True)
    ordered_WC = np.sort(odds_WC)
    return bool((ordered_WC[:, -1] - ordered_WC[:, -2] > margin).all())


def logits_of(scores: pa.Scalar, classes: int) -> Floats:
    """[places, classes] of an example's stored logits."""
    return np.asarray(scores.values, np.float64).reshape(-1, classes)
