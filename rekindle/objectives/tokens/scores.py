"""Scores of a language model: what the targets of each example cost."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa

from rekindle.objectives.scores import Floats, ModelScores, beats
from rekindle.objectives.tokens import KIND
from rekindle.records import Check, Contender


@dataclasses.dataclass(frozen=True)
class TokenScores(ModelScores):
    """Of each example: the loss of its targets in nats, how many were predicted right,
    how many there are, how many bytes of text they cover; each [N]. `unigram_nats` is the
    loss of the best guess that knows only how frequent each target is: the entropy of the
    targets."""

    nats_N: Floats
    right_N: Floats
    targets_N: Floats
    bytes_N: Floats
    unigram_nats: float

    METRIC: ClassVar[str] = "log_loss"
    SLICE_METRIC: ClassVar[str] = "log_loss"

    @classmethod
    def of(cls, rows: pa.Table, who: str, contender: Contender) -> Self:
        assert contender.unigram_nats is not None

        def sums(name: str) -> Floats:
            if not len(rows):
                return np.zeros(0)
            return np.asarray(rows.column(who).combine_chunks().field(name), np.float64)

        names = ("nats", "right", "targets", "target_bytes")
        nats_N, right_N, targets_N, bytes_N = map(sums, names)
        return cls(nats_N, right_N, targets_N, bytes_N, contender.unigram_nats)

    def __len__(self) -> int:
        return len(self.nats_N)

    @functools.cached_property
    def metrics(self) -> Mapping[str, float]:
        return self.measured(KIND.metrics)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.nats_N).all())

    @property
    def sizes_N(self) -> Floats:
        return self.targets_N

    def weighted(self, metric: str, weights_RN: Floats) -> Floats:
        """A ratio of sums over the examples; log_loss is nats per target."""
        above_N = self.nats_N
        below_N = self.targets_N
        if metric == "token_accuracy":
            above_N = self.right_N
        elif metric == "bits_per_byte":
            below_N = self.bytes_N * math.log(2)  # nats in a bit
        # no targets give NaN, and a large loss a
        # perplexity that is infinite: neither is a fault
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio_R: Floats = (weights_RN @ above_N) / (weights_RN @ below_N)
            return np.exp(ratio_R) if metric == "perplexity" else ratio_R

    def worst(self, metric: str, other: Self, rare: bool = False) -> float:
        """Nats per target, which have no bound: what guessing by frequency costs, or the
        most that both differ by in an example. With `rare` twice as much as guessing."""
        differ_N = np.abs(self.nats_N - other.nats_N) / np.maximum(self.targets_N, 1)
        guessing = self.unigram_nats
        if rare:
            guessing *= 2
        return float(max(differ_N.max(), guessing))

    def with_one_more(self, cost: float) -> Self:
        # a further text of the mean size
        targets = self.targets_N.mean()
        return dataclasses.replace(
            self,
            nats_N=np.append(self.nats_N, cost * targets),
            right_N=np.append(self.right_N, 0.0 if cost else targets),
            targets_N=np.append(self.targets_N, targets),
            bytes_N=np.append(self.bytes_N, self.bytes_N.mean()),
        )

    def trivial(self, metric: str) -> Check:
        value = self.metrics["log_loss"]
        answer = "guessing by the frequency of single tokens"
        return beats("beats_unigram", "log_loss", value, self.unigram_nats, answer)

    def picked(self, pick_N: np.ndarray) -> Self:
        names = ("nats_N", "right_N", "targets_N", "bytes_N")
        return dataclasses.replace(self, **{name: getattr(self, name)[pick_N] for name in names})


SCORES = TokenScores
