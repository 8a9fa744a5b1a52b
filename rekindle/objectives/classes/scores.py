"""Scores of a classifier: the probability of each class, of each example.

Accuracy, macro-F1, log-loss, the expected calibration error (Naeini et al. 2015, 15 equal
bins of the top probability) and numbers of the ROC and precision-recall curves, of all
examples and of resamples. Shapes: N examples, C classes, R resamples, each of which gives
a weight to every example."""

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
from rekindle.objectives.classes import KIND, OF_CURVES
from rekindle.objectives.scores import EPSILON, Bools, Floats, Ints, ModelScores, beats
from rekindle.records import Check, ClassResult, Contender

BINS = 15
MOST_CURVES = 20  # classes with curves: examples are sorted once for each class


@dataclasses.dataclass(frozen=True)
class ClassScores(ModelScores):
    """Probabilities of classes, [N, C], the true classes, [N], and their names, [C]."""

    probabilities_NC: Floats
    labels_N: Ints
    names: tuple[str, ...]

    METRIC: ClassVar[str] = "accuracy"
    SLICE_METRIC: ClassVar[str] = "accuracy"

    @classmethod
    def of(cls, rows: pa.Table, who: str, contender: Contender) -> Self:
        from scipy.special import softmax  # which takes a fifth of a second

        labels_N = indices_of(rows.column("label").combine_chunks(), contender.labels)
        # the reshape below cannot find C in an empty column
        if not len(rows):
            return cls(np.zeros((0, len(contender.labels))), labels_N, contender.labels)
        logits = rows.column(who).combine_chunks().field("logits").flatten()
        probabilities_NC = softmax(np.asarray(logits, np.float64).reshape(len(rows), -1), 1)
        return cls(probabilities_NC, labels_N, contender.labels)

    def __len__(self) -> int:
        return len(self.labels_N)

    @functools.cached_property
    def metrics(self) -> Mapping[str, float]:
        has_curves = self.probabilities_NC.shape[1] <= MOST_CURVES
        names = [name for name in KIND.metrics if has_curves or name not in OF_CURVES]
        if len(self) and not self.finite:
            return dict.fromkeys(names, math.nan)
        return self.measured(names)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.probabilities_NC).all())

    def weighted(self, metric: str, weights_RN: Floats) -> Floats:
        """[R]: values of `metric`, in which examples count as a row of `weights_RN` says.

        Log-loss is the mean negative log-probability of the true class in nats (a coin
        flip: 0.693). Macro-F1 is the mean over classes of the harmonic mean of precision
        and recall, without classes that neither occur nor are predicted. The calibration
        error is the mean gap between confidence and accuracy over the bins, weighted by
        size. For curves see `_of_curves`."""
        total_R = weights_RN.sum(1)
        if metric == "accuracy":
            return np.asarray(weights_RN @ self._right_N.astype(np.float64) / total_R, np.float64)
        if metric == "log_loss":
            of_true_N = self.probabilities_NC[np.arange(len(self)), self.labels_N]
            nats_N = -np.log(np.clip(of_true_N, EPSILON, 1.0))
            return np.asarray(weights_RN @ nats_N / total_R, np.float64)
        if metric == "macro_f1":
            return self._macro_f1(weights_RN)
        if metric in OF_CURVES:
            return _of_curves(metric, self.probabilities_NC, self.labels_N, weights_RN)
        return self._calibration_error(weights_RN)

    def _macro_f1(self, weights_RN: Floats) -> Floats:
        classes = self.probabilities_NC.shape[1]
        predicted_N = self.probabilities_NC.argmax(1)
        hits_RC = sums_by_group(weights_RN * self._right_N, self.labels_N, classes)
        rows_RC = sums_by_group(weights_RN, self.labels_N, classes)
        predicted_RC = sums_by_group(weights_RN, predicted_N, classes)
        both_RC = rows_RC + predicted_RC
        # NaN for a class that neither occurs nor is predicted
        f1_RC = np.where(both_RC > 0, 2 * hits_RC / np.where(both_RC > 0, both_RC, 1.0), np.nan)
        return np.asarray(np.nanmean(f1_RC, axis=1), np.float64)

    def _calibration_error(self, weights_RN: Floats) -> Floats:
        """The expected calibration error; rows whose probabilities are not numbers are
        left out."""
        finite_N = np.asarray(np.isfinite(self.probabilities_NC).all(1))
        finite_NC = np.where(finite_N[:, None], self.probabilities_NC, 0.0)
        top_N, right_N, bin_N = _binned(finite_NC, self.labels_N)
        gap_N = np.where(finite_N, top_N - right_N, 0.0)
        gaps_R = np.abs(sums_by_group(weights_RN * gap_N, bin_N, BINS)).sum(1)
        finite_R = weights_RN @ finite_N.astype(np.float64)
        return np.asarray(gaps_R / np.where(finite_R > 0, finite_R, 1.0), np.float64)

    @functools.cached_property
    def _right_N(self) -> Bools:
        return np.asarray(self.probabilities_NC.argmax(1) == self.labels_N)

    def is_right(self, metric: str) -> Bools | None:
        return self._right_N if metric == "accuracy" else None

    def worst(self, metric: str, other: Self, rare: bool = False) -> float:
        """No example costs more than 27.6 nats: log-loss takes probabilities as 1e-12 or
        more."""
        return -math.log(EPSILON)

    def with_one_more(self, cost: float) -> Self:
        """See `ModelScores`. The example is of the rarest class and is taken for the next
        rarest: of all classes, these lose the largest share by one error."""
        counts_C = np.bincount(self.labels_N, minlength=len(self.names))
        # the two rarest of those that occur: the others are sorted behind all
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
        # always answering the frequencies is perfectly calibrated, so no model beats it in that
        if metric == "calibration_error":
            metric = self.METRIC
        shares_C = np.bincount(self.labels_N, minlength=len(self.names)) / len(self)
        blind = dataclasses.replace(self, probabilities_NC=np.tile(shares_C, (len(self), 1)))
        blind_value = blind.measured([metric])[metric]
        return beats_majority(metric, self.metrics[metric], blind_value, "class")

    def picked(self, pick_N: np.ndarray) -> Self:
        return dataclasses.replace(
            self,
            probabilities_NC=self.probabilities_NC[pick_N],
            labels_N=self.labels_N[pick_N],
        )

    def answers(self) -> tuple[Ints, Ints]:
        return self.probabilities_NC.argmax(1), self.labels_N

    def confidence(self) -> Floats:
        top_N: Floats = self.probabilities_NC.max(1)
        return top_N

    def confusion(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self._counts_CC.tolist()))

    def classes(self) -> tuple[ClassResult, ...]:
        if not len(self):
            return ()
        hits = np.diagonal(self._counts_CC).tolist()
        predicted = self._counts_CC.sum(0).tolist()
        rows = self._counts_CC.sum(1).tolist()
        results = zip(self.names, hits, predicted, rows, strict=True)
        return tuple(class_result(*result) for result in results)

    @functools.cached_property
    def _counts_CC(self) -> Ints:
        """[true class, predicted class]: how many rows have these."""
        classes = self.probabilities_NC.shape[1]
        flat_N = self.labels_N * classes + self.probabilities_NC.argmax(1)
        return np.bincount(flat_N, minlength=classes * classes).reshape(classes, classes)

    def calibration(self) -> tuple[records.CalibrationBin, ...]:
        """The reliability diagram, without empty bins and without rows whose probabilities
        are not numbers."""
        finite_N = np.isfinite(self.probabilities_NC).all(1)
        top_N, right_N, bin_N = _binned(self.probabilities_NC[finite_N], self.labels_N[finite_N])
        bins = list[records.CalibrationBin]()
        for number in range(BINS):
            in_N = bin_N == number
            if in_N.any():
                calibration_bin = records.CalibrationBin(
                    lower=number / BINS,
                    upper=(number + 1) / BINS,
                    rows=int(in_N.sum()),
                    confidence=float(top_N[in_N].mean()),
                    accuracy=float(right_N[in_N].mean()),
                )
                bins.append(calibration_bin)
        return tuple(bins)


def sums_by_group(values_RN: Floats, group_N: Ints, groups: int) -> Floats:
    """[R, groups]: the sums of the values in each group."""
    # one `reduceat` sums all resamples, if the examples are sorted by group; np.bincount
    # would take a call for each resample
    order_N = np.argsort(group_N, kind="stable")
    present, starts = np.unique(group_N[order_N], return_index=True)
    sums_RG = np.zeros((len(values_RN), groups))
    sums_RG[:, present] = np.add.reduceat(values_RN[:, order_N], starts, axis=1)
    return sums_RG


def _of_curves(metric: str, scores_NC: Floats, labels_N: Ints, weights_RN: Floats) -> Floats:
    """[R]: a number of a curve of each class against all others, as the mean over classes.

    It is the area under the ROC curve, the average precision (the step-wise area under the
    curve of precision over recall), or the most recall at which precision is 0.9 or more.
    Classes that no row has, or all have, are left out; 0.5 where none is left."""
    values_CR = np.full((scores_NC.shape[1], len(weights_RN)), np.nan)
    for class_, scores_N in enumerate(scores_NC.T):
        order_N = np.argsort(-scores_N, kind="stable")
        # equal scores are one step, G of them
        begin_G = np.flatnonzero(np.diff(scores_N[order_N], prepend=np.nan) != 0)
        is_class_N = labels_N[order_N] == class_
        sorted_RN = weights_RN[:, order_N]
        # weights of rows of the class, and of others: in each step, in all, down to each step
        class_RG = np.add.reduceat(sorted_RN * is_class_N, begin_G, 1)
        others_RG = np.add.reduceat(sorted_RN * ~is_class_N, begin_G, 1)
        class_R = class_RG.sum(1)
        others_R = others_RG.sum(1)
        hits_RG = class_RG.cumsum(1)
        false_hits_RG = others_RG.cumsum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            if metric == "roc_auc":
                # the others that are ranked below; those of the same score count half
                below_RG = others_R[:, None] - false_hits_RG + others_RG / 2
                values_CR[class_] = (class_RG * below_RG).sum(1) / class_R / others_R
            elif metric == "average_precision":
                precision_parts_RG = class_RG * hits_RG / (hits_RG + false_hits_RG)
                values_CR[class_] = np.nansum(precision_parts_RG, 1) / class_R
            else:
                is_precise_RG = hits_RG >= 9 * false_hits_RG  # a precision of 0.9
                values_CR[class_] = (hits_RG * is_precise_RG).max(1) / class_R
        values_CR[class_, (class_R == 0) | (others_R == 0)] = np.nan
    finite_CR = np.isfinite(values_CR)
    sums_R = np.where(finite_CR, values_CR, 0.0).sum(0)
    return np.where(finite_CR.any(0), sums_R / np.maximum(finite_CR.sum(0), 1), 0.5)


def _binned(probabilities_NC: Floats, labels_N: Ints) -> tuple[Floats, NDArray[np.bool_], Ints]:
    """Of each prediction: its confidence, whether it is right, and the number of its bin."""
    top_N = probabilities_NC.max(1)
    right_N = probabilities_NC.argmax(1) == labels_N
    return top_N, right_N, np.minimum((top_N * BINS).astype(np.int64), BINS - 1)


def class_result(label: str, hits: int, predicted: int, rows: int) -> ClassResult:
    """The result of a class that `rows` have and that was answered `predicted` times,
    `hits` of them right."""
    return ClassResult(
        label=label,
        rows=rows,
        predicted=predicted,
        precision=_share(hits, predicted),
        recall=_share(hits, rows),
        f1=_share(2 * hits, predicted + rows),
    )


def _share(part: int, whole: int) -> float | None:
    """`part` over `whole`; None where `whole` is 0."""
    if not whole:
        return None
    return part / whole


def beats_majority(metric: str, value: float, blind: float, kind: str) -> Check:
    """The check whether `value` beats `blind`: that of always answering the most frequent
    class, or for metrics of probabilities the classes' frequencies."""
    answer = f"the frequency of each {kind} as its probability"
    if metric.endswith(("accuracy", "f1")):
        answer = f"the most frequent {kind}"
    return beats("beats_majority", metric, value, blind, f"always answering {answer}")


def indices_of(column: pa.Array, labels: tuple[str, ...]) -> Ints:
    """Class indices of a column of labels. Raises DataError for one not in `labels`."""
    index = pc.index_in(column, pa.array(labels, pa.string()))
    if index.null_count:
        unknown = sorted(set(column.to_pylist()) - set(labels))
        message = f"the test split holds labels that the model does not know: {unknown[:5]}"
        fix = "list all classes in data.labels, or use more training data"
        raise DataError(message, where="data", fix=fix)
    return np.asarray(index.to_numpy(zero_copy_only=False), np.int64)


SCORES = ClassScores
