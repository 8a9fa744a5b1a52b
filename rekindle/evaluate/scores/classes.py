"""Scores of a classifier: the probability of each class, of each example.

Accuracy, macro-F1, log-loss, the expected calibration error (Naeini et al. 2015, 15 equal bins of
the top probability) and what curves tell, of all examples and of resamples."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rekindle import records
from rekindle.errors import DataError
from rekindle.evaluate.scores.base import EPSILON, Bools, Floats, Ints, Scores, beats
from rekindle.records import OF_CURVES, Check, ClassResult, Contender

BINS = 15
MOST_CURVES = 20  # classes: each is ranked by itself


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
        from scipy.special import softmax  # which takes a fifth of a second

        labels_N = indices_of(rows.column("label").combine_chunks(), contender.labels)
        if not len(rows):
            return cls(np.zeros((0, len(contender.labels))), labels_N, contender.labels)
        logits = rows.column(who).combine_chunks().field("logits").flatten()
        probabilities_NC = softmax(np.asarray(logits, np.float64).reshape(len(rows), -1), 1)
        return cls(probabilities_NC, labels_N, contender.labels)

    def __len__(self) -> int:
        return len(self.labels_N)

    @functools.cached_property
    def metrics(self) -> Mapping[str, float]:
        few = self.probabilities_NC.shape[1] <= MOST_CURVES
        names = [name for name in records.METRICS if few or name not in OF_CURVES]
        if len(self) and not self.finite:
            return dict.fromkeys(names, math.nan)
        return self.measured(names)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.probabilities_NC).all())

    def weighted(self, metric: str, weights_RN: Floats) -> Floats:
        """Log-loss is the mean negative log-probability of the true class in nats (a coin flip:
        0.693); macro-F1 the mean over classes of the harmonic mean of precision and recall, without
        those that neither occur nor are predicted; the calibration error the mean gap between
        confidence and accuracy over the bins, weighted by size; for curves see `_of_curves`."""
        probabilities_NC, labels_N = self.probabilities_NC, self.labels_N
        total_R = weights_RN.sum(1)
        if metric == "accuracy":
            return np.asarray(weights_RN @ self._right_N.astype(np.float64) / total_R, np.float64)
        if metric == "log_loss":
            picked_N = np.clip(probabilities_NC[np.arange(len(labels_N)), labels_N], EPSILON, 1.0)
            return np.asarray(weights_RN @ -np.log(picked_N) / total_R, np.float64)
        if metric == "macro_f1":
            classes, guessed_N = probabilities_NC.shape[1], probabilities_NC.argmax(1)
            hits_RC = added(weights_RN * self._right_N, labels_N, classes)
            either_RC = added(weights_RN, labels_N, classes) + added(weights_RN, guessed_N, classes)
            # NaN for a class that neither occurs nor is predicted
            known_RC = np.where(either_RC > 0, either_RC, 1.0)
            each_RC = np.where(either_RC > 0, 2 * hits_RC / known_RC, np.nan)
            return np.asarray(np.nanmean(each_RC, axis=1), np.float64)
        if metric in OF_CURVES:
            return _of_curves(metric, probabilities_NC, labels_N, weights_RN)
        finite_N = np.asarray(np.isfinite(probabilities_NC).all(1))
        known_NC = np.where(finite_N[:, None], probabilities_NC, 0.0)
        top_N, right_N, index_N = _binned(known_NC, labels_N)
        gap_N = np.where(finite_N, top_N - right_N, 0.0)
        gaps_R = np.abs(added(weights_RN * gap_N, index_N, BINS)).sum(1)
        known_R = weights_RN @ finite_N.astype(np.float64)
        return np.asarray(gaps_R / np.where(known_R > 0, known_R, 1.0), np.float64)

    @functools.cached_property
    def _right_N(self) -> Bools:
        return np.asarray(self.probabilities_NC.argmax(1) == self.labels_N)

    def is_right(self, metric: str) -> Bools | None:
        return self._right_N if metric == "accuracy" else None

    def worst(self, metric: str, other: Self, rare: bool = False) -> float:
        """Probabilities count as 1e-12 at least: 27.6 nats."""
        return -math.log(EPSILON)

    def with_one_more(self, cost: float) -> Self:
        """Of the rarest class, taken for the next rarest: they lose the largest share of it."""
        counts_C = np.bincount(self.labels_N, minlength=len(self.names))
        rarest = np.argsort(np.where(counts_C > 0, counts_C, len(self) + 1), kind="stable")[:2]
        row_C = np.zeros(len(self.names))
        row_C[rarest[-1]] = 1 - math.exp(-cost)
        row_C[rarest[0]] += math.exp(-cost)
        return dataclasses.replace(
            self,
            probabilities_NC=np.vstack([self.probabilities_NC, row_C]),
            labels_N=np.append(self.labels_N, rarest[0]),
        )

    def trivial(self, metric: str) -> Check:
        if metric == "calibration_error":  # frequencies are calibrated, and know nothing
            metric = self.METRIC
        shares_C = np.bincount(self.labels_N, minlength=len(self.names)) / len(self)
        blind = dataclasses.replace(self, probabilities_NC=np.tile(shares_C, (len(self), 1)))
        known = blind.measured([metric])[metric]
        return beats_majority(metric, self.metrics[metric], known, "class")

    def picked(self, pick_N: np.ndarray) -> Self:
        probabilities_NC, labels_N = self.probabilities_NC[pick_N], self.labels_N[pick_N]
        return dataclasses.replace(self, probabilities_NC=probabilities_NC, labels_N=labels_N)

    def answers(self) -> tuple[Ints, Ints]:
        return self.probabilities_NC.argmax(1), self.labels_N

    def confidence(self) -> Floats:
        top_N: Floats = self.probabilities_NC.max(1)
        return top_N

    def confusion(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(int(n) for n in row) for row in self._counts)

    def classes(self) -> tuple[ClassResult, ...]:
        counts = self._counts
        columns = (np.diagonal(counts), counts.sum(0), counts.sum(1))
        numbers = zip(self.names, *(column.tolist() for column in columns), strict=True)
        return tuple(class_result(*row) for row in numbers) if len(self) else ()

    @functools.cached_property
    def _counts(self) -> Ints:
        classes = self.probabilities_NC.shape[1]
        flat_N = self.labels_N * classes + self.probabilities_NC.argmax(1)
        return np.bincount(flat_N, minlength=classes * classes).reshape(classes, classes)

    def calibration(self) -> tuple[records.CalibrationBin, ...]:
        """Empty bins are left out, and rows that are not numbers."""
        finite_N = np.isfinite(self.probabilities_NC).all(1)
        top_N, right_N, index_N = _binned(self.probabilities_NC[finite_N], self.labels_N[finite_N])
        bins = ((i, index_N == i) for i in range(BINS))
        return tuple(
            records.CalibrationBin(
                lower=i / BINS,
                upper=(i + 1) / BINS,
                rows=int(in_N.sum()),
                confidence=float(top_N[in_N].mean()),
                accuracy=float(right_N[in_N].mean()),
            )
            for i, in_N in bins
            if in_N.any()
        )


def added(values_RN: Floats, group_N: Ints, groups: int) -> Floats:
    """[R, groups]: the sums of values by group."""
    order_N = np.argsort(group_N, kind="stable")
    present, starts = np.unique(group_N[order_N], return_index=True)
    sums_RG = np.zeros((len(values_RN), groups))
    sums_RG[:, present] = np.add.reduceat(values_RN[:, order_N], starts, axis=1)
    return sums_RG


def _of_curves(metric: str, scores_NC: Floats, labels_N: Ints, weights_RN: Floats) -> Floats:
    """[R]: the area under the ROC curve, the average precision (the step-wise area under the curve
    of precision over recall), or the most recall at which precision is 0.9 or more, of each class
    against the others; the mean of the classes that some rows have and some have not, or 0.5."""
    found_CR = np.full((scores_NC.shape[1], len(weights_RN)), np.nan)
    for c, scores_N in enumerate(scores_NC.T):
        order_N = np.argsort(-scores_N, kind="stable")
        # equal scores are one step, G of them
        begin_G = np.flatnonzero(np.diff(scores_N[order_N], prepend=np.nan) != 0)
        is_N, sorted_RN = labels_N[order_N] == c, weights_RN[:, order_N]
        of_RG, not_RG = (np.add.reduceat(sorted_RN * x, begin_G, 1) for x in (is_N, ~is_N))
        of_R, not_R = of_RG.sum(1), not_RG.sum(1)
        hits_RG, passed_RG = of_RG.cumsum(1), not_RG.cumsum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            if metric == "roc_auc":
                below_RG = not_R[:, None] - passed_RG + not_RG / 2
                found_CR[c] = (of_RG * below_RG).sum(1) / of_R / not_R
            elif metric == "average_precision":
                found_CR[c] = np.nansum(of_RG * hits_RG / (hits_RG + passed_RG), 1) / of_R
            else:
                is_precise_RG = hits_RG >= 9 * passed_RG
                found_CR[c] = (hits_RG * is_precise_RG).max(1) / of_R
        found_CR[c, (of_R == 0) | (not_R == 0)] = np.nan
    known_CR = np.isfinite(found_CR)
    sums_R = np.where(known_CR, found_CR, 0.0).sum(0)
    return np.where(known_CR.any(0), sums_R / np.maximum(known_CR.sum(0), 1), 0.5)


def _binned(probabilities_NC: Floats, labels_N: Ints) -> tuple[Floats, NDArray[np.bool_], Ints]:
    """Confidence, whether it is right, and the bin, of predictions that are numbers."""
    top_N = probabilities_NC.max(1)
    right_N = probabilities_NC.argmax(1) == labels_N
    return top_N, right_N, np.minimum((top_N * BINS).astype(np.int64), BINS - 1)


def class_result(label: str, hits: int, predicted: int, rows: int) -> ClassResult:
    """A class with `rows`, that was answered `predicted` times, `hits` of them right."""
    return ClassResult(
        label=label,
        rows=rows,
        predicted=predicted,
        precision=hits / predicted if predicted else None,
        recall=hits / rows if rows else None,
        f1=2 * hits / (predicted + rows) if predicted + rows else None,
    )


def beats_majority(metric: str, value: float, blind: float, what: str) -> Check:
    """Whether `value` is better than that of the most frequent class, or of their frequencies."""
    answer = f"the frequency of each {what} as its probability"
    if metric.endswith(("accuracy", "f1")):
        answer = f"the most frequent {what}"
    return beats("beats_majority", metric, value, blind, f"always answering {answer}")


def indices_of(found: pa.Array, labels: tuple[str, ...]) -> Ints:
    """Class indices of labels; raises DataError for one that is not among `labels`."""
    index = pc.index_in(found, pa.array(labels, pa.string()))
    if index.null_count:
        unknown = sorted(set(found.to_pylist()) - set(labels))
        what = f"the test split holds labels that the model does not know: {unknown[:5]}"
        fix = "list all classes in data.labels, or use more training data"
        raise DataError(what, where="data", fix=fix)
    return np.asarray(index.to_numpy(zero_copy_only=False), np.int64)
