"""How much better a candidate is than the champion, by what both answered to the test
examples: bounds of the gain that err as rarely as promised, also where few examples tell
the two apart, or a rare one costs much.

All bounds follow one idea. Take numbers that cannot be below `a`, add one more number,
`a`, and weight them all at random, by a flat Dirichlet law. The quantile `tail` of such
means bounds the true mean from below (Gaffke 2005, Three test statistics for a
nonparametric one-sided hypothesis on the mean of a nonnegative variable; Learned-Miller &
Thomas 2020, arXiv:1905.06208). The added number stands for what the test split may not
have seen: where n examples all agree, a share of 1 - tail^(1/n) may still disagree, the
"rule of three". For one proportion this is the interval of Clopper and Pearson, for
paired answers at zero the exact test of McNemar.

`PairedAnswers` has the bounds in closed form. `Resamples` draws the weights, which is the
Bayesian bootstrap (Rubin 1981) with one more example that the candidate loses; how much
is lost at worst depends on the kind of scores (`Scores.worst`). Shapes: N examples, U
units that are drawn together, R resamples."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Protocol

import numpy as np

from rekindle.objectives.scores import Floats, Ints, ModelScores, gain
from rekindle.spec.model import GateSpec

CHUNK_ELEMENTS = 4_000_000
"""Weights that are in memory at once."""
MOST_ELEMENTS = 400_000_000
"""Weights that are drawn at most. A quantile that needs more is extrapolated."""
FEWEST_UNITS = 10
"""Data with clusters have to tell as much as so many clusters of equal size (`units_in`)."""

_POWER = 0.8  # the probability that a gain called detectable is detected
_FEWEST_BEYOND = 10  # resamples beyond a quantile for which it is read off, not extrapolated
_GRID = 501  # points of an integral
_NEGLIGIBLE = 1e-13


class Bounds(Protocol):
    """The gain of the candidate on these examples, and bounds of its true gain. A
    positive gain is an improvement."""

    @property
    def estimate(self) -> float:
        """The gain on these examples."""

    @property
    def resamples(self) -> int:
        """How many resamples were drawn; 0 where the bounds are exact."""

    def lower(self, tail: float) -> float:
        """The lower bound: the true gain is below it with a probability of at most `tail`."""

    def upper(self, tail: float) -> float:
        """The upper bound: the true gain is above it with a probability of at most `tail`."""

    def chance_of_loss(self) -> float:
        """The p-value of a loss: the probability that a candidate that is as good as the
        champion does as badly as this one."""

    def detectable(self, tail: float) -> float:
        """The true gain at which the lower bound would be above zero in four of five test
        splits of this size."""


@dataclasses.dataclass(frozen=True)
class PairedAnswers:
    """Both models' answers to `rows` examples. `fixed` of them only the candidate
    answered right, `broken` only the champion."""

    fixed: int
    broken: int
    rows: int
    resamples: int = 0

    @property
    def estimate(self) -> float:
        """The gain in accuracy."""
        return (self.fixed - self.broken) / self.rows

    def lower(self, tail: float) -> float:
        """See `Bounds`. At a tail of 0.025, 20 equal answers give -0.168, and 6 fixed of
        6 give 0.082."""
        return _lower_end(self.fixed, self.broken, self.rows, tail)

    def upper(self, tail: float) -> float:
        """See `Bounds`."""
        return -_lower_end(self.broken, self.fixed, self.rows, tail)

    def chance_of_loss(self) -> float:
        """The one-sided exact test of McNemar: 1 fixed and 7 broken give 0.035."""
        from scipy.special import bdtr

        return float(bdtr(self.fixed, self.fixed + self.broken, 0.5))

    def detectable(self, tail: float) -> float:
        """See `Bounds`; 1 if no gain is enough.

        As many answers are taken to be broken as would be here by chance: half of those
        that differ."""
        from scipy.special import bdtr, betaincinv

        broken = (self.fixed + self.broken) // 2
        fixed_counts = np.arange(self.rows - broken + 1)
        # McNemar's test for each number of fixed answers
        p_values = bdtr(broken, fixed_counts + broken, 0.5)
        significant = np.flatnonzero(p_values <= tail)
        if not len(significant):
            return 1.0
        least_fixed = int(significant[0])
        # the true share that gives at least so many fixed answers in four of five splits
        share = float(betaincinv(least_fixed, self.rows - least_fixed + 1, _POWER))
        return min(1.0, share - broken / self.rows)


@functools.lru_cache
def _lower_end(fixed: int, broken: int, rows: int, tail: float) -> float:
    """The quantile `tail` of the share of fixed answers less that of broken ones.

    The shares of fixed, broken and equal answers follow the Dirichlet law with these
    counts as parameters, and one more that is broken."""
    # here, because importing each of them takes a fifth of a second
    from scipy.optimize import brentq
    from scipy.special import betainc, betaincinv

    lost = broken + 1
    equal = rows - fixed - broken
    if not fixed:
        return -float(betaincinv(lost, equal, 1 - tail)) if equal else -1.0
    # The law is that of two independent beta laws: of the share of answers that differ,
    # and of the part of those that is fixed. With share s and part p the difference is
    # s (2p - 1).
    shares, weights = _beta_points(fixed + lost, equal)

    def excess(difference: float) -> float:
        part = np.clip((1 + difference / shares) / 2, 0.0, 1.0)
        return float((weights * betainc(fixed, lost, part)).sum()) - tail

    # Brent's method takes a dozen evaluations, halving [-1, 1] takes 45
    return float(brentq(excess, -1.0, 1.0, xtol=_NEGLIGIBLE))


def _beta_points(a: float, b: float) -> tuple[Floats, Floats]:
    """Points between the ends of a beta law, and their weights: a weighted sum of a
    function's values at the points is its mean under that law."""
    from scipy.special import betaincinv, xlog1py, xlogy

    if not b:
        return np.ones(1), np.ones(1)
    ends = betaincinv(a, b, _NEGLIGIBLE), 1 - betaincinv(b, a, _NEGLIGIBLE)
    points = np.linspace(*ends, _GRID)
    logs = xlogy(a - 1, points) + xlog1py(b - 1, -points)
    weights = np.exp(logs - logs.max())
    return points, weights / weights.sum()


@dataclasses.dataclass(frozen=True)
class Resamples:
    """The gains of resamples."""

    estimate: float
    low_R: Floats
    """With one more example that the candidate loses."""
    high_R: Floats
    """With one more example that the candidate wins."""

    @property
    def resamples(self) -> int:
        """How many resamples there are."""
        return len(self.low_R)

    def lower(self, tail: float) -> float:
        """See `Bounds`."""
        return _quantile(self.low_R, tail)

    def upper(self, tail: float) -> float:
        """See `Bounds`."""
        return -_quantile(-self.high_R, tail)

    def chance_of_loss(self) -> float:
        """See `Bounds`: the share of resamples without a loss."""
        share = float((self.high_R >= 0).mean())
        least_share = _FEWEST_BEYOND / self.resamples
        if share >= least_share:
            return share
        # so few tell little, and their share is extrapolated
        end, scale = _exponential_tail(-self.high_R)
        if not scale:  # the last resamples are all alike
            return float(end <= 0)
        return float(min(least_share, least_share * math.exp(-end / scale)))

    def detectable(self, tail: float) -> float:
        """See `Bounds`. The deviation between test splits is taken not to depend on the gain."""
        margin = NormalDist().inv_cdf(_POWER) * float(self.low_R.std())
        return max(0.0, self.estimate - self.lower(tail)) + margin


def _quantile(values_R: Floats, tail: float) -> float:
    """The quantile `tail`. Where too few resamples are below it, it is that of an
    exponential law, the heaviest tail that weights have."""
    least_tail = _FEWEST_BEYOND / len(values_R)
    if tail >= least_tail:
        return float(np.quantile(values_R, tail))
    end, scale = _exponential_tail(values_R)
    return end - scale * math.log(least_tail / tail)


def _exponential_tail(values_R: Floats) -> tuple[float, float]:
    """The lowest quantile that has enough resamples below it, and the scale of the
    exponential law that goes on from there: its quantile of a tail that is e times
    smaller is lower by the scale."""
    least_tail = _FEWEST_BEYOND / len(values_R)
    end, inner = np.quantile(values_R, [least_tail, min(1.0, math.e * least_tail)])
    return float(end), float(inner - end)


def gain_of(metric: str, candidate: ModelScores, champion: ModelScores) -> float:
    """By how much the candidate is better than the champion in `metric`."""
    return gain(metric, candidate.metrics[metric], champion.metrics[metric])


def bounds_of(
    spec: GateSpec,
    metric: str,
    candidate: ModelScores,
    champion: ModelScores,
    clusters_N: Ints | None = None,
    tail: float = 0.5,
) -> Bounds:
    """Bounds of the gain, from the examples that both models answered.

    They are exact where the metric is the share of right answers and examples have no
    clusters. Otherwise examples of a cluster are drawn together, in at least
    `spec.resamples` resamples, and in as many as a bound at `tail` needs."""
    if clusters_N is None:
        ours_N = candidate.is_right(metric)
        theirs_N = champion.is_right(metric)
        if ours_N is not None and theirs_N is not None:
            fixed = int((ours_N & ~theirs_N).sum())
            broken = int((theirs_N & ~ours_N).sum())
            return PairedAnswers(fixed, broken, len(candidate))
    units_N = clusters_N
    if units_N is None:
        units_N = np.arange(len(candidate))
    # so many that enough of them lie beyond the bound, as far as time allows
    needed = math.ceil(_FEWEST_BEYOND / tail)
    affordable = MOST_ELEMENTS // len(candidate)
    resamples = max(spec.resamples, min(needed, affordable))
    # "not worse" also claims that there are no rare, costly losses; "better" does not
    rare = spec.mode == "noninferiority"
    cost = max(candidate.worst(metric, champion, rare), champion.worst(metric, candidate, rare))
    our_loss = candidate.with_one_more(cost)
    our_win = candidate.with_one_more(0.0)
    their_loss = champion.with_one_more(cost)
    their_win = champion.with_one_more(0.0)
    low = list[Floats]()
    high = list[Floats]()
    for weights_RN in _weights(spec.seed, resamples, units_N, candidate.sizes_N):
        our_worst_R = our_loss.weighted(metric, weights_RN)
        their_best_R = their_win.weighted(metric, weights_RN)
        low.append(gain(metric, our_worst_R, their_best_R))
        our_best_R = our_win.weighted(metric, weights_RN)
        their_worst_R = their_loss.weighted(metric, weights_RN)
        high.append(gain(metric, our_best_R, their_worst_R))
    return Resamples(
        gain_of(metric, candidate, champion),
        low_R=np.concatenate(low),
        high_R=np.concatenate(high),
    )


def _weights(seed: int, resamples: int, units_N: Ints, sizes_N: Floats) -> Iterator[Floats]:
    """Chunks of weights, [R, N + 1]: those of the examples, which are the same for all of
    one unit, and that of the added example.

    The added example is as large as the unit of an answer that is drawn at random."""
    generator = np.random.default_rng(seed)
    sizes_U = np.bincount(units_N, sizes_N)
    # a mean over answers, not units: a random answer is often of a large unit
    typical_size = (sizes_U**2).sum() / sizes_U.sum() / sizes_N.mean()
    # The added example decides most about the ends of an interval, so its weights are not
    # drawn but spread evenly over their exponential law.
    evenly_R = (generator.permutation(resamples) + 0.5) / resamples
    one_more_R = -np.log1p(-evenly_R) * typical_size
    chunk = max(1, CHUNK_ELEMENTS // (len(units_N) + 1))
    for start in range(0, resamples, chunk):
        one_more_R1 = one_more_R[start : start + chunk, None]
        # exponential draws over their sum are flat Dirichlet; the sum cancels in a mean
        weights_RU = generator.exponential(size=(len(one_more_R1), len(sizes_U)))
        yield np.concatenate([weights_RU[:, units_N], one_more_R1], 1)


def deviation_of(
    spec: GateSpec, metric: str, scores: ModelScores, clusters_N: Ints | None = None
) -> float:
    """The standard deviation of a model's `metric` over test splits of this size.

    One more example that it answers right is added, so that the deviation is not 0 where
    all answers are wrong."""
    units_N = clusters_N
    if units_N is None:
        units_N = np.arange(len(scores))
    with_one_more = scores.with_one_more(0.0)
    draws = _weights(spec.seed, spec.resamples, units_N, scores.sizes_N)
    values_R = np.concatenate([with_one_more.weighted(metric, weights_RN) for weights_RN in draws])
    return float(values_R.std())


def units_in(clusters_N: Ints | None, sizes_N: Floats) -> float:
    """How many units of equal size would tell as much as these: (sum of sizes)^2 / sum of
    squared sizes (Kish 1965). 29 units of ten rows and one of 290 tell as much as 3.9."""
    sizes_U = sizes_N
    if clusters_N is not None:
        sizes_U = np.bincount(clusters_N, sizes_N).astype(np.float64)
    if not sizes_U.any():
        return 0.0
    return float(sizes_U.sum() ** 2 / (sizes_U**2).sum())


def least_that_differ(tail: float) -> int:
    """How many units have to be in favour of one model, and none of the other, before
    that happens by chance with a probability of at most `tail`: k with 2^-k <= tail (6 at
    0.025)."""
    return math.ceil(-math.log2(tail))
