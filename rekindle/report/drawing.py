"""What plots are made of: linear axes with ticks at round numbers, for values and for time, the
thinning of long lines."""

import dataclasses
import math
from collections.abc import Sequence

Point = tuple[float, float]

_LARGEST = 1e100
_SMALLEST = 1e-300  # below it, doubles lose digits and logarithms their footing
_TIME_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600)


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
    """An axis that holds all drawable `values`; it includes zero with `zero`, and ends at the data
    instead of at a tick with `tight`. 0.3 and 9.1 give 0 to 10 with ticks 0, 2, ... 10."""
    shown = [value for value in values if abs(value) < _LARGEST] or [0.0, 1.0]
    low, high = min(shown), max(shown)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(1e-12 * max(abs(low), abs(high)), _SMALLEST):
        pad = abs(high) / 2 if abs(high) > _SMALLEST else 0.5
        low, high = (0.0, high + pad) if zero and high > 0 else (low - pad, high + pad)
    # the round number (1, 2, 2.5 or 5 times a power of ten) that is not below `rough`
    rough = (high - low) / max(ticks, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * (1 - 1e-9))
    if not tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # without the dust of binary arithmetic
    return Axis(low, high, tuple(float(f"{i * step:.12g}") for i in range(first, last + 1)))


def time_axis(total: float) -> Axis:
    """From zero to `total` seconds, with at most five ticks at round times."""
    days = math.ceil(total / 4 / 86_400) * 86_400
    step = next((s for s in _TIME_STEPS if total / s <= 4.5), days)
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
    """At most about `most` points that look the same: of each stretch the lowest and the highest,
    so spikes stay. A stretch that has a gap keeps one."""
    if len(points) <= most:
        return list(points)
    width = 2 * len(points) / most
    kept: list[Point] = [points[0]]
    for i in range(most // 2):
        stretch = points[int(i * width) : int((i + 1) * width)]
        shown = [point for point in stretch if drawable(point)]
        if len(shown) < len(stretch):
            kept.append((stretch[0][0], math.nan))
        if shown:
            ends = {min(shown, key=lambda p: p[1]), max(shown, key=lambda p: p[1])}
            kept.extend(sorted(ends))
    return [*kept, points[-1]]
