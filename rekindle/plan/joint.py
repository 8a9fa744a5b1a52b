"""How likely a training on spot machines keeps a limit of wall hours and one of paid hours at once.

Wall time is paid time and the waits. A mark m for each wait makes the transform of the paid time
one of both, E[exp(-z X) m^waits]; on the roots of unity a second Fourier transform tells the counts
of waits apart, and so many waits together last as a gamma distribution says, or always the same."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from rekindle.plan.odds import NEGLIGIBLE, Disturbed, Odds, Transform, cell_masses
from rekindle.plan.risk import Work, expected, segments, uninterrupted_seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rekindle.plan.odds import Values

    Numbers = NDArray[np.float64]

CELLS = 1024
MOST_COUNTS = 512
DEVIATIONS = 6.0  # of the number of waits, to either side
CLOSE = 0.001


def chance_of_both(
    both: Odds, work: Work, every: int, per_hour: float, wall_hours: float, running_hours: float
) -> tuple[float, float]:
    """The least and the largest chance of keeping both limits: the same number twice, which is
    exact, or with thousands of interruptions Fréchet's bounds."""
    chances = both.wall.at_most(wall_hours), both.running.at_most(running_hours)
    most = min(chances)
    least = min(most, max(0.0, sum(chances) - 1))
    unwaited = dataclasses.replace(work, wait_seconds=0.0)
    disturbed = Disturbed(Transform(unwaited, per_hour / 3600), every)
    counts = _counts(work, every, per_hour)
    length = disturbed.reach()
    if most - least < CLOSE or len(counts) > MOST_COUNTS or not length:
        return least, most
    start = uninterrupted_seconds(work, every)
    paid, wall = running_hours * 3600 - start, wall_hours * 3600 - start
    exact = _within(disturbed, length, counts, paid, wall, work)
    calm = disturbed.calm * both.wall.first_wait(wall_hours) if paid >= 0 else 0.0
    found = min(most, max(least, calm + (1 - disturbed.calm) * exact))
    return found, found


def _counts(work: Work, every: int, per_hour: float) -> range:
    """How many waits there may be, a power of two of them, around the mean. Each success after
    failures in a row is geometric, which scatters more than a rate would."""
    often = expected(work, every, per_hour).interruptions
    longest = max(segment.anew for segment in segments(work, every))
    again = work.restart_seconds if work.saves_on_notice else longest
    variance = often * (1 + 2 * math.expm1(per_hour / 3600 * again))
    size = 2 ** math.ceil(math.log2(32 + 2 * DEVIATIONS * math.sqrt(variance)))
    size = min(size, 2 * MOST_COUNTS)
    first = max(0, math.floor(often - size / 2))
    return range(first, first + size)


def _within(
    disturbed: Disturbed, length: float, counts: range, paid: float, wall: float, work: Work
) -> float:
    """Chance that an excess of paid seconds and that with its waits stay within those limits, where
    there is an interruption."""
    import numpy as np

    size = len(counts)
    marks = np.exp(2j * np.pi * np.arange(size) / size)[:, None]

    def counted(z: Values) -> Values:
        marked = dataclasses.replace(disturbed.transform, mark=marks)
        found: Values = np.fft.fft(Disturbed(marked, disturbed.every)(z), axis=0) / size
        return np.roll(found, -(counts.start % size), axis=0)

    mass = cell_masses(counted, length, cells=CELLS)
    cell = length / CELLS
    points: Numbers = np.asarray(np.arange(CELLS) * cell, np.float64)
    inside = np.clip((paid - points) / cell + 0.5, 0, 1)
    return float((mass * inside * _over(counts, wall - points, work)).sum())


def _over(counts: range, seconds: Numbers, work: Work) -> Numbers:
    """Chance that so many waits, a count a row, are over within each of those times."""
    import numpy as np

    mean = work.wait_seconds
    if work.wait == "fixed" or mean < NEGLIGIBLE:
        return (seconds >= np.array(counts)[:, None] * mean).astype(np.float64)
    load = np.maximum(seconds, NEGLIGIBLE) / mean
    fewer = np.arange(counts.stop - 1)[:, None]
    factorials = np.array([[math.lgamma(n + 1)] for n in range(counts.stop - 1)])
    exactly = np.exp(fewer * np.log(load) - load - factorials)
    at_most = np.vstack([np.zeros_like(load), exactly.cumsum(axis=0)])[counts.start :]
    found: Numbers = np.where(seconds < 0, 0.0, 1 - at_most)
    return found
