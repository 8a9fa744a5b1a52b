"""How likely a training on spot machines is done by a time or within paid hours: the whole
distribution, of the model in risk.py, without a simulation.

The transform E[exp(-z X)] of the excess X over an uninterrupted run is a product with one factor a
segment, exact. It is evaluated on the frequencies of a grid and turned round by a Fourier transform
(the Fourier-series method: Abate and Whitt, Queueing Systems 10, 1992). What no interruption leaves
is taken out first and added exactly. What is left is smoothed over four of the 4096 cells of its
range, so a probability is exact except as close as that to a jump. There are jumps only where the
wait is always the same, and in paid hours where work is saved on notice.

numpy is imported inside functions, because the verb that prints a plan has to start quickly."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rekindle.plan.risk import Work, expected, segments, uninterrupted_seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.complex128] | NDArray[np.float64]

CELLS = 4096
SMOOTHED = 4  # cells over which a jump is spread
DEVIATIONS = 20.0  # from the mean to the end of the grid: tails fall off like an exponential's
NEGLIGIBLE = 1e-9
MOST_INTERRUPTIONS = 1e6


@dataclasses.dataclass(frozen=True)
class Curve:
    """A distribution of hours: `calm` is the chance of no interruption, in which case only the
    first wait is added to `start_hours`; otherwise the excess has the cumulative chances
    `disturbed`, one a cell."""

    start_hours: float
    wait_hours: float
    fixed_wait: bool
    calm: float
    cell_hours: float
    disturbed: tuple[float, ...]

    def at_most(self, hours: float) -> float:
        """The chance that it takes at most so long."""
        excess = hours - self.start_hours
        if excess < 0:
            return 0.0
        return self.calm * self.first_wait(hours) + (1 - self.calm) * self._disturbed(excess)

    def first_wait(self, hours: float) -> float:
        """The same chance where there is no interruption."""
        excess = hours - self.start_hours
        if self.fixed_wait or not self.wait_hours:
            return float(excess >= self.wait_hours)
        return -math.expm1(-max(0.0, excess) / self.wait_hours)

    def quantile(self, chance: float) -> float:
        """The hours that suffice with that chance; `quantile(0.5)` is the median."""
        low, high = self.start_hours, self.start_hours + self.wait_hours + self.cell_hours
        while self.at_most(high) < chance:
            low, high = high, self.start_hours + 2 * (high - self.start_hours)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.at_most(middle) >= chance else (middle, high)
        return high

    def _disturbed(self, excess: float) -> float:
        if not self.disturbed:
            return 1.0
        place = excess / self.cell_hours + 0.5
        cell = int(place)
        if cell >= len(self.disturbed):
            return 1.0
        before = self.disturbed[cell - 1] if cell else 0.0
        return before + (place - cell) * (self.disturbed[cell] - before)


@dataclasses.dataclass(frozen=True)
class Odds:
    """Both distributions: `wall` with the waits, `running` without, which is what is paid."""

    wall: Curve
    running: Curve


def hopeless(work: Work, every: int, per_hour: float) -> bool:
    """Whether there would be so many interruptions that the time has no distribution to speak
    of."""
    return expected(work, every, per_hour).interruptions > MOST_INTERRUPTIONS


def odds(work: Work, every: int, per_hour: float) -> Odds:
    """The distributions of wall and running hours. Takes some milliseconds; raises ValueError where
    it is `hopeless`."""
    if hopeless(work, every, per_hour):
        raise ValueError("an attempt has next to no chance to get through")
    running = dataclasses.replace(work, wait_seconds=0.0)
    wall, paid = (_curve(each, every, per_hour / 3600) for each in (work, running))
    return Odds(wall, paid)


@dataclasses.dataclass(frozen=True)
class Transform:
    """Factors of E[exp(-z X)] at some z: of the wait, of the first commit's excess, and of that
    which one segment (or with a notice, one step) adds. `rate` is per second. With a `mark` waits
    take no time, and powers of the mark count them."""

    work: Work
    rate: float
    mark: Values | None = None

    def waited(self, z: Values) -> Values:
        """Of one wait."""
        import numpy as np

        if self.mark is not None:
            return self.mark
        mean: float = self.work.wait_seconds
        found: Values = np.exp(-z * mean) if self.work.wait == "fixed" else 1 / (1 + z * mean)
        return found

    def struck(self, z: Values, seconds: float) -> Values:
        """Of the time until an interruption, where there is one within that time."""
        import numpy as np

        found: Values = self.rate / (self.rate + z) * (1 - np.exp(-(self.rate + z) * seconds))
        return found

    def retried(self, z: Values, seconds: float) -> Values:
        """Of all beginnings of an attempt of that length, from the first wait on: a sum, not a
        mean."""
        waited = self.waited(z)
        found: Values = waited / (1 - waited * self.struck(z, seconds))
        return found

    def started(self, z: Values, seconds: float) -> Values:
        """Of waits and failed attempts before one of `seconds` gets through; its own length is not
        counted."""
        found: Values = self.retried(z, seconds) * math.exp(-self.rate * seconds)
        return found

    def passed(self, z: Values, through: float, anew: float) -> Values:
        """Of what a segment adds to an uninterrupted run."""
        import numpy as np

        lost = self.struck(z, through) * np.exp(-z * (anew - through))
        found: Values = math.exp(-self.rate * through) + lost * self.started(z, anew)
        return found

    def noticed(self, z: Values, exposed: float, save: float) -> Values:
        """Of what a step of `exposed` seconds adds, after which a save of `save` seconds is made if
        notice is given in it."""
        import numpy as np

        calm = math.exp(-self.rate * exposed)
        added = np.exp(-z * (save + self.work.restart_seconds))
        found: Values = calm + (1 - calm) * added * self.started(z, self.work.restart_seconds)
        return found


def excess_transform(transform: Transform, every: int, z: Values) -> Values:
    """E[exp(-z X)] of the whole excess."""
    work = transform.work
    if not work.saves_on_notice:
        first, *others = segments(work, every)
        found = transform.started(z, first.anew)
        for segment in others:
            found = found * transform.passed(z, segment.through, segment.anew) ** segment.count
        return found
    saves = math.ceil(work.steps / every)
    plain = transform.noticed(z, work.step_seconds, work.whole_save_seconds)
    due = transform.noticed(z, work.step_seconds + work.save_seconds, work.commit_seconds)
    found = transform.started(z, work.restart_seconds)
    return found * plain ** (work.steps - saves) * due ** (saves - 1)


def _curve(work: Work, every: int, rate: float) -> Curve:
    least = uninterrupted_seconds(work, every)
    disturbed = Disturbed(Transform(work, rate), every)
    hours = least / 3600, work.wait_seconds / 3600, work.wait == "fixed"
    length = disturbed.reach()
    if not length:
        return Curve(*hours, 1.0, 1.0, ())
    cells = itertools.accumulate(cell_masses(disturbed, length).clip(min=0.0).tolist())
    chances = tuple(min(1.0, chance) for chance in cells)
    return Curve(*hours, disturbed.calm, length / CELLS / 3600, chances)


@dataclasses.dataclass(frozen=True)
class Disturbed:
    """The transform of the excess where there is an interruption."""

    transform: Transform
    every: int

    @property
    def calm(self) -> float:
        """The chance that there is none. With a notice, one in the last step changes nothing."""
        work = self.transform.work
        exposed = uninterrupted_seconds(work, self.every)
        if work.saves_on_notice:
            exposed -= work.step_seconds + work.whole_save_seconds
        return math.exp(-self.transform.rate * exposed)

    def __call__(self, z: Values) -> Values:
        whole = excess_transform(self.transform, self.every, z)
        found: Values = (whole - self.calm * self.transform.waited(z)) / (1 - self.calm)
        return found

    def reach(self) -> float:
        """Seconds of excess beyond which there is next to nothing; 0 where interruptions are as
        good as impossible, or take no time."""
        import numpy as np

        if 1 - self.calm < NEGLIGIBLE:
            return 0.0
        work, rate = self.transform.work, self.transform.rate
        least = uninterrupted_seconds(work, self.every)
        excess = expected(work, self.every, rate * 3600).wall_hours * 3600 - least
        mean = (excess - self.calm * work.wait_seconds) / (1 - self.calm)
        if mean < NEGLIGIBLE * least:
            return 0.0
        step = 1e-3 / mean
        below, above = self(np.array([step, -step]))
        variance = (float(below + above) - 2) / step**2 - mean**2
        return mean + DEVIATIONS * math.sqrt(max(variance, (mean / 100) ** 2))


def cell_masses(
    transform: Callable[[Values], Values], length: float, damping: float = 0.0, cells: int = CELLS
) -> NDArray[np.float64]:
    """Mass around each point of a grid over `length`, from a transform, or from several in rows.

    Lanczos' factors, squared, keep jumps from ringing. With damping what lies beyond the grid and
    folds back onto its first half counts exp(-damping) for each length."""
    import numpy as np

    count = np.arange(cells // 2 + 1)
    shift = damping / length
    frequencies = np.asarray(shift + 2j * np.pi * count / length, np.complex128)
    with np.errstate(under="ignore"):
        values = transform(frequencies)
        smooth = np.sinc(count / (cells // 2)) ** 2
        found: NDArray[np.float64] = np.fft.irfft(values * smooth, cells)
    # nothing lies below 0: what smoothing put there folded back from the end of the grid
    found[..., 0] += found[..., -SMOOTHED:].sum(axis=-1)
    found[..., -SMOOTHED:] = 0.0
    return found * np.exp(shift * np.arange(cells) * length / cells)
