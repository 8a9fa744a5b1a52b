"""How good predictions are: accuracy, macro-F1, log-loss and the expected calibration error (Naeini
et al. 2015, 15 equal bins of the top probability), of all examples and of resamples. Inputs:
`probabilities_NC` float64 with rows summing to 1, `labels_N` int class indices."""

import math

import numpy as np
from numpy.typing import NDArray

from rekindle.records import CalibrationBin
from rekindle.spec.metrics import METRICS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BINS = 15
EPSILON = 1e-12


def calibration_bins(probabilities_NC: Floats, labels_N: Ints) -> tuple[CalibrationBin, ...]:
    """The reliability diagram; empty bins are left out, and rows that are not numbers."""
    finite_N = np.isfinite(probabilities_NC).all(1)
    probabilities_NC, labels_N = probabilities_NC[finite_N], labels_N[finite_N]
    top_N, right_N, index_N = _binned(probabilities_NC, labels_N)
    return tuple(
        CalibrationBin(
            lower=i / BINS, upper=(i + 1) / BINS, rows=int((index_N == i).sum()),
            confidence=float(top_N[index_N == i].mean()),
            accuracy=float(right_N[index_N == i].mean()),
        )
        for i in range(BINS)
        if (index_N == i).any()
    )  # fmt: skip


def _binned(probabilities_NC: Floats, labels_N: Ints) -> tuple[Floats, NDArray[np.bool_], Ints]:
    """Confidence, whether it is right, and the bin, of predictions that are numbers."""
    top_N = probabilities_NC.max(1)
    right_N = probabilities_NC.argmax(1) == labels_N
    return top_N, right_N, np.minimum((top_N * BINS).astype(np.int64), BINS - 1)


def confusion(probabilities_NC: Floats, labels_N: Ints) -> Ints:
    """[C, C] counts: row = true class, column = predicted class."""
    classes = probabilities_NC.shape[1]
    flat = labels_N * classes + probabilities_NC.argmax(1)
    return np.bincount(flat, minlength=classes * classes).reshape(classes, classes).astype(np.int64)


def score(probabilities_NC: Floats, labels_N: Ints) -> dict[str, float]:
    """All metrics by name; see `rekindle.spec.metrics.METRICS`. NaN for all if a probability is."""
    if not np.isfinite(probabilities_NC).all():
        return dict.fromkeys(METRICS, math.nan)
    everything = np.arange(len(labels_N))[None]
    found = {name: resampled(name, probabilities_NC, labels_N, everything) for name in METRICS}
    return {name: float(value_R[0]) for name, value_R in found.items()}


def resampled(metric: str, probabilities_NC: Floats, labels_N: Ints, picks_RN: Ints) -> Floats:
    """[R] values of `metric`, each on the rows that `picks_RN` holds. Log-loss is the mean negative
    log-probability of the true class in nats (a coin flip: 0.693); macro-F1 the mean over classes
    of the harmonic mean of precision and recall, without those that neither occur nor are
    predicted; the calibration error the mean gap between confidence and accuracy over the bins,
    weighted by size."""
    if metric == "accuracy":
        right_N = (probabilities_NC.argmax(1) == labels_N).astype(np.float64)
        return np.asarray(right_N[picks_RN].mean(1), np.float64)
    if metric == "log_loss":
        picked = np.clip(probabilities_NC[np.arange(len(labels_N)), labels_N], EPSILON, 1.0)
        return np.asarray(-np.log(picked)[picks_RN].mean(1), np.float64)
    if metric == "macro_f1":
        classes = probabilities_NC.shape[1]
        flat_N = labels_N * classes + probabilities_NC.argmax(1)
        counts = np.stack([np.bincount(flat_N[row], minlength=classes**2) for row in picks_RN])
        confusion_RCC = counts.reshape(-1, classes, classes)
        hits = np.diagonal(confusion_RCC, axis1=1, axis2=2).astype(np.float64)
        either = confusion_RCC.sum(1) + confusion_RCC.sum(2)
        # NaN for a class that neither occurs nor is predicted
        each_RC = np.where(either > 0, 2 * hits / np.maximum(either, 1), np.nan)
        return np.asarray(np.nanmean(each_RC, axis=1), np.float64)
    finite_N = np.asarray(np.isfinite(probabilities_NC).all(1))
    top_N, right_N, index_N = _binned(np.where(finite_N[:, None], probabilities_NC, 0.0), labels_N)
    gap_N = np.where(finite_N, top_N - right_N, 0.0)
    place_RN = index_N[picks_RN] + BINS * np.arange(len(picks_RN))[:, None]
    sums = np.bincount(place_RN.ravel(), gap_N[picks_RN].ravel(), BINS * len(picks_RN))
    gaps_R: Floats = np.abs(sums.reshape(-1, BINS)).sum(1)
    return np.asarray(gaps_R / np.maximum(finite_N[picks_RN].sum(1), 1), np.float64)
