"""How much better a candidate is than the champion, by what both answered to the test
examples: bounds of the gain that err as rarely as promised, also where few examples tell
the two apart, or a rare one costs much.

All bounds have one idea. The mean of numbers that cannot be below `a` is bounded from
below by adding one more number, `a`, and weighting all of them at random (weights of a
flat Dirichlet law): the quantile `tail` of such means (Gaffke 2005, Three test statistics
for a nonparametric one-sided hypothesis on the mean of a nonnegative variable;
Learned-Miller & Thomas 2020, arXiv:1905.06208). The one more stands for what the test
split may not have seen: of n examples that all agree a share of 1 - tail^(1/n) may be
otherwise, the "rule of three". Of one proportion this is the interval of Clopper and
Pearson, of paired answers at zero the exact test of McNemar.

`PairedAnswers` has it in closed form; `Resamples` draws the weights, which is the
Bayesian bootstrap (Rubin 1981) with one more example that the candidate loses. What is
lost at worst each kind of scores says (`Scores.worst`). Shapes: N examples, U units that
are drawn together, R resamples."""

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
MOST_ELEMENTS = 400_000_000
"""Weights that are drawn at most; beyond them the end of a tail is extrapolated."""
FEWEST_UNITS = 10
"""Clusters of equal size that the ones at hand have to weigh as much as."""

_POWER = 0.8
_FEWEST_BEYOND = 10  # resamples that an end of an interval leaves beyond it
_GRID = 501  # points of an integral
_NEGLIGIBLE = 1e-13


class Bounds(Protocol):
    """The gain of the candidate, more is better, and bounds of the true one."""

    @property
    def estimate(self) -> float:
        """The gain on these examples."""

    @property
    def resamples(self) -> int:
        """How many were drawn; 0: none, the bounds are exact."""

    def lower(self, tail: float) -> float:
        """What the true gain is below with a probability of at most `tail`."""

    def upper(self, tail: float) -> float:
        """What it is above with such a probability."""

    def chance_of_loss(self) -> float:
        """How often a candidate as good as the champion seems as bad as this one."""

    def detectable(self, tail: float) -> float:
        """The gain whose lower bound lies above zero in four of five cases."""


@dataclasses.dataclass(frozen=True)
class PairedAnswers:
    """Of `rows` answers, `fixed` were wrong before and are right,
    `broken` the reverse."""

    fixed: int
    broken: int
    rows: int
    resamples: int = 0

    @property
    def estimate(self) -> float:
        """The gain in accuracy."""
        return (self.fixed - self.broken) / self.rows

    def lower(self, tail: float) -> float:
        """See `Bounds`. 20 equal answers at a tail
        of 0.025: -0.168; 6 of 6 fixed: 0.082."""
        return _lower_end(self.fixed, self.broken, self.rows, tail)

    def upper(self, tail: float) -> float:
        """See `Bounds`."""
        return -_lower_end(self.broken, self.fixed, self.rows, tail)

    def chance_of_loss(self) -> float:
        """The one-sided exact test of McNemar: 1 fixed and 7 broken give 0.035."""
        from scipy.special import bdtr

        return float(bdtr(self.fixed, self.fixed + self.broken, 0.5))

    def detectable(self, tail: float) -> float:
        """See `Bounds`; half of the answers that
        differ count as chance. 1 if none is enough."""
        from scipy.special import bdtr, betaincinv

        broken = (self.fixed + self.broken) // 2
        fixed = np.arange(self.rows - broken + 1)
        chance = bdtr(broken, fixed + broken, 0.5)  # that so few are broken
        enough = np.flatnonzero(chance <= tail)
        if not len(enough):
            return 1.0
        least = int(enough[0])
        # the share of fixed answers that gives so many in four of five cases
        share = float(betaincinv(least, self.rows - least + 1, _POWER))
        return min(1.0, share - broken / self.rows)


@functools.lru_cache
def _lower_end(fixed: int, broken: int, rows: int, tail: float) -> float:
    """The quantile `tail` of the difference of two of three shares, whose law is a flat
    Dirichlet's after these counts and one more that is broken."""
    from scipy.optimize import brentq  # which takes a fifth of a second, as the other one does
    from scipy.special import betainc, betaincinv

    lost = broken + 1
    equal = rows - fixed - broken
    if not fixed:
        return -float(betaincinv(lost, equal, 1 - tail)) if equal else -1.0
    shares, weights = _of_beta(fixed + lost, equal)

    def excess(difference: float) -> float:
        # of the answers that differ so many are fixed where the difference is this
        part = np.clip((1 + difference / shares) / 2, 0.0, 1.0)
        return float((weights * betainc(fixed, lost, part)).sum()) - tail

    # Brent's method: a dozen evaluations, where halving [-1, 1] takes 45 for as many
    # digits
    return float(brentq(excess, -1.0, 1.0, xtol=_NEGLIGIBLE))


def _of_beta(a: float, b: float) -> tuple[Floats, Floats]:
    """Points of a beta law, and the weights that make a sum over them its mean."""
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
    """Gains of resamples: `low_R` with one more example that the candidate loses,
    `high_R` with one that it wins."""

    estimate: float
    low_R: Floats
    high_R: Floats

    @property
    def resamples(self) -> int:
        """How many there are."""
        return len(self.low_R)

    def lower(self, tail: float) -> float:
        """See `Bounds`."""
        return _end(self.low_R, tail)

    def upper(self, tail: float) -> float:
        """See `Bounds`."""
        return -_end(-self.high_R, tail)

    def chance_of_loss(self) -> float:
        """See `Bounds`."""
        beyond = float((self.high_R >= 0).mean())
        least = _FEWEST_BEYOND / self.resamples
        if beyond >= least:
            return beyond
        end, scale = _tail_of(-self.high_R)
        if not scale:  # the last resamples are all alike
            return float(end <= 0)
        return float(min(least, least * math.exp(-end / scale)))

    def detectable(self, tail: float) -> float:
        """See `Bounds`; the deviation is taken as the same with another gain."""
        reach = NormalDist().inv_cdf(_POWER) * float(self.low_R.std())
        return max(0.0, self.estimate - self.lower(tail)) + reach


def _end(values_R: Floats, tail: float) -> float:
    """The quantile `tail`; beyond the last resamples that of an exponential law, the
    heaviest that weights have."""
    least = _FEWEST_BEYOND / len(values_R)
    if tail >= least:
        return float(np.quantile(values_R, tail))
    end, scale = _tail_of(values_R)
    return end - scale * math.log(least / tail)


def _tail_of(values_R: Floats) -> tuple[float, float]:
    """The last quantile that enough resamples lie below, and by how much each e-th part
    of them is lower."""
    least = _FEWEST_BEYOND / len(values_R)
    end, nearer = np.quantile(values_R, [least, min(1.0, math.e * least)])
    return float(end), float(nearer - end)


def gain_of(metric: str, candidate: ModelScores, champion: ModelScores) -> float:
    """Candidate minus champion in `metric`, more is better."""
    return gain(metric, candidate.metrics[metric], champion.metrics[metric])


def bounds_of(
    spec: GateSpec,
    metric: str,
    candidate: ModelScores,
    champion: ModelScores,
    clusters_N: Ints | None = None,
    tail: float = 0.5,
) -> Bounds:
    """What the examples that both answered say of the gain; examples of one cluster are
    drawn together. At least `spec.resamples`, and as many as an end at `tail` needs."""
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
    # so that enough of them lie beyond the end of the interval
    resamples = max(spec.resamples, math.ceil(_FEWEST_BEYOND / tail))
    resamples = max(spec.resamples, min(resamples, MOST_ELEMENTS // len(candidate)))
    # that nothing was lost is a claim about rare losses, that something was gained is not
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
    """In chunks [R, N + 1]: how much each example counts, those of a unit alike, and the
    one more, which has the size of the unit that an answer drawn at random belongs to."""
    generator = np.random.default_rng(seed)
    sizes_U = np.bincount(units_N, sizes_N)
    # an answer drawn at random lies in a large unit more often
    typical_size = (sizes_U**2).sum() / sizes_U.sum() / sizes_N.mean()
    # its own draws lie evenly, because the ends of the interval are mostly theirs
    evenly_R = (generator.permutation(resamples) + 0.5) / resamples
    one_more_R = -np.log1p(-evenly_R) * typical_size
    chunk = max(1, CHUNK_ELEMENTS // (len(units_N) + 1))
    for start in range(0, resamples, chunk):
        one_more_R1 = one_more_R[start : start + chunk, None]
        # a flat Dirichlet's up to their sum, which cancels in a mean
        weights_RU = generator.exponential(size=(len(one_more_R1), len(sizes_U)))
        yield np.concatenate([weights_RU[:, units_N], one_more_R1], 1)


def deviation_of(
    spec: GateSpec, metric: str, scores: ModelScores, clusters_N: Ints | None = None
) -> float:
    """The standard deviation of a model's own `metric`, had other examples been drawn;
    with one more example that it answers right, so that it is not 0 where all are
    wrong."""
    units_N = clusters_N
    if units_N is None:
        units_N = np.arange(len(scores))
    with_one_more = scores.with_one_more(0.0)
    draws = _weights(spec.seed, spec.resamples, units_N, scores.sizes_N)
    values_R = np.concatenate([with_one_more.weighted(metric, weights_RN) for weights_RN in draws])
    return float(values_R.std())


def units_in(clusters_N: Ints | None, sizes_N: Floats) -> float:
    """How many units of equal size tell as much: (sum of sizes)^2 / sum of their squares
    (Kish 1965). 29 of ten rows and one of 290 tell as much as 3.9."""
    sizes_U = sizes_N
    if clusters_N is not None:
        sizes_U = np.bincount(clusters_N, sizes_N).astype(np.float64)
    if not sizes_U.any():
        return 0.0
    return float(sizes_U.sum() ** 2 / (sizes_U**2).sum())


def least_that_differ(tail: float) -> int:
    """How many units have to speak for one of two, and none for the other, before chance
    explains it with a probability of at most `tail`: 2^-k (6 at 0.025)."""
    return math.ceil(-math.log2(tail))
