"""Scores of a classifier: the probability of each class, of each example."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.errors import DataError
from rekindle.evaluate import metrics
from rekindle.evaluate.metrics import Floats, Ints
from rekindle.evaluate.scores.base import Scores
from rekindle.records import CalibrationBin, Check, ClassResult, Contender


@dataclasses.dataclass(frozen=True)
class ClassScores(Scores):
    """Probabilities of classes, [N, C], the true ones, [N], and what they are called, [C]."""

    probabilities_NC: Floats
    labels_N: Ints
    names: tuple[str, ...]

    METRIC: ClassVar[str] = "accuracy"
    SLICE_METRIC: ClassVar[str] = "accuracy"

    @classmethod
    def of(cls, rows: pa.Table, who: str, contender: Contender) -> Self:
        labels_N = indices_of(rows.column("label").combine_chunks(), contender.labels)
        if not len(rows):
            return cls(np.zeros((0, len(contender.labels))), labels_N, contender.labels)
        logits = rows.column(who).combine_chunks().field("logits").flatten()
        probabilities_NC = softmax(np.asarray(logits, np.float64).reshape(len(rows), -1))
        return cls(probabilities_NC, labels_N, contender.labels)

    def __len__(self) -> int:
        return len(self.labels_N)

    @functools.cached_property
    def metrics(self) -> Mapping[str, float]:
        return metrics.score(self.probabilities_NC, self.labels_N) if len(self) else {}

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.probabilities_NC).all())

    def resampled(self, metric: str, picks_RN: Ints) -> Floats:
        return metrics.resampled(metric, self.probabilities_NC, self.labels_N, picks_RN)

    def trivial(self) -> Check:
        share = float(np.bincount(self.labels_N).max() / len(self))
        return beats_majority("accuracy", self.metrics["accuracy"], share, "class")

    def picked(self, pick_N: np.ndarray) -> Self:
        probabilities_NC, labels_N = self.probabilities_NC[pick_N], self.labels_N[pick_N]
        return dataclasses.replace(self, probabilities_NC=probabilities_NC, labels_N=labels_N)

    def confusion(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(int(n) for n in row) for row in self._counts)

    def classes(self) -> tuple[ClassResult, ...]:
        counts = self._counts
        columns = (np.diagonal(counts), counts.sum(0), counts.sum(1))
        numbers = zip(self.names, *(column.tolist() for column in columns), strict=True)
        return tuple(class_result(*row) for row in numbers) if len(self) else ()

    @functools.cached_property
    def _counts(self) -> Ints:
        return metrics.confusion(self.probabilities_NC, self.labels_N)

    def calibration(self) -> tuple[CalibrationBin, ...]:
        return metrics.calibration_bins(self.probabilities_NC, self.labels_N)


def class_result(label: str, hits: int, predicted: int, rows: int) -> ClassResult:
    """A class with `rows`, that was answered `predicted` times, `hits` of them right."""
    return ClassResult(
        label=label, rows=rows, predicted=predicted,
        precision=hits / predicted if predicted else None, recall=hits / rows if rows else None,
        f1=2 * hits / (predicted + rows) if predicted + rows else None,
    )  # fmt: skip


def beats_majority(metric: str, value: float, share: float, what: str) -> Check:
    """Whether `value` is above the `share` of the most frequent class."""
    relation = "beats" if value > share else "does not beat"
    detail = f"{metric} {value:.4f} {relation} always answering the most frequent {what}"
    return Check(
        name="beats_majority", passed=value > share, detail=f"{detail} ({share:.4f})",
        value=value, threshold=share,
    )  # fmt: skip


def softmax(logits_NC: Floats) -> Floats:
    powers_NC: Floats = np.exp(logits_NC - logits_NC.max(1, keepdims=True))
    shares_NC: Floats = powers_NC / powers_NC.sum(1, keepdims=True)
    return shares_NC


def indices_of(found: pa.Array, labels: tuple[str, ...]) -> Ints:
    """Class indices of labels; raises DataError for one that is not among `labels`."""
    index = pc.index_in(found, pa.array(labels, pa.string()))
    if index.null_count:
        unknown = sorted(set(found.to_pylist()) - set(labels))
        what = f"the test split holds labels that the model does not know: {unknown[:5]}"
        fix = "list all classes in data.labels, or use more training data"
        raise DataError(what, where="data", fix=fix)
    return np.asarray(index.to_numpy(zero_copy_only=False), np.int64)
