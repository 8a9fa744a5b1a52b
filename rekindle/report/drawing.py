"""What plots are made of: linear axes with ticks at round numbers, for values and for
time, the thinning of long lines."""

import dataclasses
import math
from collections.abc import Sequence

Point = tuple[float, float]

_LARGEST = 1e100  # from it on, a number has no place on an axis
_SMALLEST = 1e-300  # below it, doubles lose digits and logarithms their footing
# round times between two ticks, in seconds
_TIME_STEPS = (
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    21600,
)


@dataclasses.dataclass(frozen=True)
class Axis:
    """A linear axis from `low` to `high`."""

    low: float
    high: float
    ticks: tuple[float, ...] = ()

    def at(self, value: float) -> float:
        """Where `value` lies, in per cent of the axis; clipped to it."""
        return min(max(100 * (value - self.low) / (self.high - self.low), 0.0), 100.0)


def axis(
    values: Sequence[float], *, ticks: int = 5, zero: bool = False, tight: bool = False
) -> Axis:
    """An axis that holds all drawable `values`; it includes zero with `zero`, and ends at
    the data instead of at a tick with `tight`. 0.3 and 9.1 give 0 to 10 with ticks 0, 2,
    ... 10."""
    shown = [value for value in values if abs(value) < _LARGEST] or [0.0, 1.0]
    low = min(shown)
    high = max(shown)
    if zero:
        low = min(low, 0.0)
        high = max(high, 0.0)
    if high - low <= max(1e-12 * max(abs(low), abs(high)), _SMALLEST):
        low, high = _widened(low, high, zero)
    # the round number (1, 2, 2.5 or 5 times a power of ten) that is not below `rough`
    rough = (high - low) / max(ticks, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * (1 - 1e-9))
    if not tight:
        low = math.floor(low / step + 1e-9) * step
        high = math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # without the dust of binary arithmetic
    return Axis(low, high, tuple(float(f"{i * step:.12g}") for i in range(first, last + 1)))


def _widened(low: float, high: float, zero: bool) -> tuple[float, float]:
    """Ends of an axis for values that are all the same, which has room around them."""
    pad = abs(high) / 2 if abs(high) > _SMALLEST else 0.5
    if zero and high > 0:
        return 0.0, high + pad
    return low - pad, high + pad


def time_axis(total: float) -> Axis:
    """An axis from zero to `total` seconds, with at most five ticks at round times."""
    # whole days where no step is long enough: there are at most four of them on an axis
    days = math.ceil(total / 4 / 86_400) * 86_400
    step = next((step for step in _TIME_STEPS if total / step <= 4.5), days)
    ticks = tuple(i * step for i in range(int(total / step + 1e-9) + 1))
    return Axis(0.0, max(total, 1e-9), ticks)


def tick_text(value: float) -> str:
    """A tick: short, with k and M for thousands and millions."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e")


def drawable(point: Point) -> bool:
    """Whether a point has a place; NaN, infinity and absurdly large numbers have none."""
    return abs(point[0]) < _LARGEST and abs(point[1]) < _LARGEST


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most about `most` points that look the same: of each stretch the lowest and the
    highest, so spikes stay. A stretch that has a gap keeps one."""
    if len(points) <= most:
        return list(points)
    width = 2 * len(points) / most
    thinned: list[Point] = [points[0]]
    for i in range(most // 2):
        stretch = points[int(i * width) : int((i + 1) * width)]
        shown = [point for point in stretch if drawable(point)]
        if len(shown) < len(stretch):
            # one point without a place breaks the line
            thinned.append((stretch[0][0], math.nan))
        if shown:
            lowest = min(shown, key=lambda point: point[1])
            highest = max(shown, key=lambda point: point[1])
            thinned.extend(sorted({lowest, highest}))
    return [*thinned, points[-1]]
