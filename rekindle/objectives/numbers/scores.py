"""Scores of a regression: the number predicted for each example, and the true one.

R² counts squared errors in parts of the variance of all the examples that decide, also on
resamples and slices, whose own variance may be next to nothing; it is NaN where they do
not vary. Shapes: N examples, R resamples."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa

from rekindle.objectives.numbers import KIND
from rekindle.objectives.scores import Floats, ModelScores, beats
from rekindle.records import CalibrationBin, Check, Contender

BINS = 15


@dataclasses.dataclass(frozen=True)
class NumberScores(ModelScores):
    """Predicted and true numbers, [N], and the variance of the true ones of all rows."""

    values_N: Floats
    true_N: Floats
    variance: float

    METRICS: ClassVar[tuple[str, ...]] = KIND.metrics
    METRIC: ClassVar[str] = "r2"
    SLICE_METRIC: ClassVar[str] = "r2"

    @classmethod
    def of(cls, rows: pa.Table, who: str, contender: Contender) -> Self:
        true_N = np.asarray(rows.column("label"), np.float64)
        if not len(rows):
            return cls(true_N, true_N, 0.0)
        values = rows.column(who).combine_chunks().field("value")
        return cls(np.asarray(values, np.float64), true_N, float(true_N.var()))

    def __len__(self) -> int:
        return len(self.true_N)

    @functools.cached_property
    def metrics(self) -> Mapping[str, float]:
        if len(self) and not self.finite:
            return dict.fromkeys(self.METRICS, math.nan)
        return self.measured(self.METRICS)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.values_N).all())

    def weighted(self, metric: str, weights_RN: Floats) -> Floats:
        total_R = weights_RN.sum(1)
        if metric == "mae":
            return np.asarray(weights_RN @ self._errors_N / total_R, np.float64)
        squared_R = weights_RN @ np.square(self._errors_N) / total_R
        if metric == "rmse":
            return np.asarray(np.sqrt(squared_R), np.float64)
        return np.asarray(1 - squared_R / (self.variance or math.nan), np.float64)

    @functools.cached_property
    def _errors_N(self) -> Floats:
        return np.abs(self.values_N - self.true_N)

    def worst(self, metric: str, other: Self, rare: bool = False) -> float:
        """An error, which has no bound: what costs as much as the best constant on
        average, or as the most that both differ by in a row. With `rare` as far off as
        true numbers lie apart."""
        if metric == "mae":
            most_differ = np.abs(self._errors_N - other._errors_N).max()
            blind_error = np.abs(self.true_N - np.median(self.true_N)).mean()
        else:
            squares_differ_N = np.abs(np.square(self._errors_N) - np.square(other._errors_N))
            most_differ = np.sqrt(squares_differ_N.max())
            blind_error = math.sqrt(self.variance)
        span = float(np.ptp(self.true_N)) if rare else 0.0
        return float(max(most_differ, blind_error, span))

    def with_one_more(self, cost: float) -> Self:
        # any true number will do: the metrics count the error alone
        true_N = np.append(self.true_N, 0.0)
        return dataclasses.replace(self, values_N=np.append(self.values_N, cost), true_N=true_N)

    def trivial(self, metric: str) -> Check:
        """One number for all: the median has the least absolute errors,
        the mean the others."""
        constant = float(self.true_N.mean())
        if metric == "mae":
            constant = float(np.median(self.true_N))
        blind = dataclasses.replace(self, values_N=np.full(len(self), constant))
        blind_value = blind.measured([metric])[metric]
        answer = f"always answering {constant:.4g}"
        return beats("beats_majority", metric, self.metrics[metric], blind_value, answer, ".4g")

    def picked(self, pick_N: np.ndarray) -> Self:
        return type(self)(self.values_N[pick_N], self.true_N[pick_N], self.variance)

    def numbers(self) -> Floats:
        return self.values_N

    def calibration(self) -> tuple[CalibrationBin, ...]:
        """Bins of equal size, by prediction: its mean, and that of the true numbers."""
        if not self.finite:
            return ()
        order_N = np.argsort(self.values_N, kind="stable")
        bins = list[CalibrationBin]()
        for part in np.array_split(order_N, BINS):
            if len(part):  # fewer rows than bins leave some empty
                calibration_bin = CalibrationBin(
                    lower=float(self.values_N[part[0]]),
                    upper=float(self.values_N[part[-1]]),
                    rows=len(part),
                    confidence=float(self.values_N[part].mean()),
                    accuracy=float(self.true_N[part].mean()),
                )
                bins.append(calibration_bin)
        return tuple(bins)


SCORES = NumberScores
