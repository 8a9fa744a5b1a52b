"""What a contender achieved on the rows that decide, in the form that the gate compares: its
metrics, the same on resampled rows, and what it must at least beat.

Shapes: N examples, C classes, R resamples."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from rekindle.evaluate import metrics
from rekindle.evaluate.metrics import Floats, Ints
from rekindle.records import Check
from rekindle.spec.metrics import TOKEN_METRICS


class Scores(Protocol):
    """A contender's result on N examples."""

    def __len__(self) -> int:
        """N."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """All metrics by name; NaN where a prediction is."""
        ...

    @property
    def finite(self) -> bool:
        """Whether every prediction is a number."""
        ...

    def resampled(self, metric: str, picks_RN: Ints) -> Floats:
        """[R] values of `metric`, each on the examples that a row of `picks_RN` holds."""
        ...

    def trivial(self) -> Check:
        """Whether it beats the best answer that looks at no input."""
        ...


@dataclasses.dataclass(frozen=True)
class ClassScores:
    """Probabilities of classes, [N, C], and the true ones, [N]."""

    probabilities_NC: Floats
    labels_N: Ints

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
        value = self.metrics["accuracy"]
        relation = "beats" if value > share else "does not beat"
        detail = f"accuracy {value:.4f} {relation} always answering the most frequent class"
        return Check(
            name="beats_majority", passed=value > share, detail=f"{detail} ({share:.4f})",
            value=value, threshold=share,
        )  # fmt: skip

    def of(self, pick_N: np.ndarray) -> ClassScores:
        """The same of some of the examples."""
        return ClassScores(self.probabilities_NC[pick_N], self.labels_N[pick_N])


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Of each example: the loss of its targets in nats, how many were predicted right, how many
    there are (at least one), how many bytes of text they cover; each [N].

    `unigram_nats` is the loss of the best guess that knows only how frequent each target is: the
    entropy of the targets themselves, which favours the guess."""

    nats_N: Floats
    right_N: Floats
    targets_N: Floats
    bytes_N: Floats
    unigram_nats: float

    def __len__(self) -> int:
        return len(self.nats_N)

    @functools.cached_property
    def metrics(self) -> Mapping[str, float]:
        everything = np.arange(len(self))[None]
        return {name: float(self.resampled(name, everything)[0]) for name in TOKEN_METRICS}

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.nats_N).all())

    def resampled(self, metric: str, picks_RN: Ints) -> Floats:
        """A ratio of sums over the examples picked: nats per target, perplexity, right per target,
        or bits per byte."""
        above_N = self.right_N if metric == "token_accuracy" else self.nats_N
        below_N = self.bytes_N * math.log(2) if metric == "bits_per_byte" else self.targets_N
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio_R: Floats = above_N[picks_RN].sum(1) / below_N[picks_RN].sum(1)
            return np.exp(ratio_R) if metric == "perplexity" else ratio_R

    def trivial(self) -> Check:
        value = self.metrics["log_loss"]
        relation = "beats" if value < self.unigram_nats else "does not beat"
        detail = f"log_loss {value:.4f} {relation} guessing by the frequency of single tokens"
        return Check(
            name="beats_unigram", passed=value < self.unigram_nats,
            detail=f"{detail} ({self.unigram_nats:.4f})", value=value, threshold=self.unigram_nats,
        )  # fmt: skip

    def of(self, pick_N: np.ndarray) -> TokenScores:
        """The same of some of the examples."""
        return TokenScores(
            self.nats_N[pick_N], self.right_N[pick_N], self.targets_N[pick_N], self.bytes_N[pick_N],
            self.unigram_nats,
        )  # fmt: skip
