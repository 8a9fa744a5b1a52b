"""Our own small plots: inline SVG that follows the page's colours, on any width, without a script.
What lies where is decided here, and drawn by a template of its name; bars and the rows of a
timeline are macros of marks.j2.

Positions are per cent and text has its natural size; only lines lie on a stretched layer. Axis
labels stand in the margin that the style sheet gives the class, and colours are classes: the style
sheet owns light, dark and print. Every plot has a label in words; details show on hover.

The confusion matrix is a heat map: true classes down, predicted classes across, each row coloured
by its shares. Unlike the others it has a size of its own: cells stay square, and large ones scroll.
Counts stand in the cells up to `_NUMBERS` classes, and always show on hover."""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from rekindle import formats
from rekindle.report import page, texts
from rekindle.report.drawing import Axis, Point, axis, drawable, thin, tick_text

_MOST_POINTS = 400
_MOST_BANDS = 60
_NOTHING = Markup("")
Counts = Sequence[Sequence[int]]  # of examples, by true and predicted class
_NUMBERS = 26
_SHRINKS = 12
_LONGEST = 18
_LETTER = 6.9  # mean width in px of a 12 px letter
_SLANT = math.sqrt(0.5)  # of a label at 45 degrees


@dataclasses.dataclass(frozen=True)
class Series:
    """A line. `css` picks its colour (`a`, `b`; `faint` for raw data behind a mean); `marks` draws
    dots; `quiet` is not read out on hover. Points ascend in x."""

    name: str
    points: Sequence[Point]
    css: str = "a"
    marks: bool = False
    quiet: bool = False


def line(
    series: Sequence[Series],
    *,
    label: str,
    x_name: str = "step",
    zero: bool = False,
    guide: tuple[str, float] | None = None,
) -> Markup:
    """Lines over a shared x axis; a gap where a value is not finite. `guide` is a named level."""
    drawn = [s for s in series if any(drawable(point) for point in s.points)]
    if not drawn:
        return _NOTHING
    points = [point for s in drawn for point in s.points]
    heights = [y for _, y in points] + ([guide[1]] if guide else [])
    x = axis([x for x, _ in points], ticks=6, tight=True)
    y = axis(heights, ticks=4, zero=zero)
    marked = (s for s in drawn if s.marks or len(s.points) == 1)
    return _filled(
        "line",
        label=label,
        x=x,
        y=y,
        x_name=x_name,
        guide=guide,
        lines=[(s.css, _path(s.points, x, y)) for s in drawn],
        marked=[(s, list(filter(drawable, thin(s.points, 80)))) for s in marked],
        bands=_bands([s for s in drawn if not s.quiet], x_name),
    )


def reliability(
    points: Sequence[tuple[float, float, int]], *, label: str, numeric: bool = False
) -> Markup:
    """How often right over how confident, or true numbers over predicted ones (`numeric`); a dot's
    area is its rows; the diagonal is perfect."""
    shown = [p for p in points if p[2] > 0 and drawable((p[0], p[1]))]
    total = sum(rows for _, _, rows in shown)
    if not shown:
        return _NOTHING
    ends = [value for x, y, _ in shown for value in (x, y)]
    unit = axis(ends if numeric else [0.0, 1.0], ticks=4)
    course = _path([(confidence, right) for confidence, right, _ in shown], unit, unit)
    values: dict[str, Any] = {"points": shown, "total": total, "unit": unit, "course": course}
    values["numeric"] = numeric
    return _filled("reliability", label=label, **values)


def interval(
    *, lower: float, estimate: float, upper: float, threshold: float | None, label: str
) -> Markup:
    """A confidence interval on an axis with zero and the threshold, more is better; the side that
    promotes is shaded."""
    marks = [0.0, lower, estimate, upper] + ([threshold] if threshold is not None else [])
    if not all(drawable((mark, 0.0)) for mark in marks):
        return _NOTHING
    room = 0.12 * ((max(marks) - min(marks)) or 1.0)
    x = axis([min(marks) - room, max(marks) + room], ticks=6, tight=True)
    return _filled(
        "interval",
        x=x,
        lower=lower,
        estimate=estimate,
        upper=upper,
        threshold=threshold,
        label=label,
    )


class Candidate(NamedTuple):
    """A model that was judged: the `time` in seconds of the epoch, the metric with its interval
    (without one both ends are the value), whether it was promoted, and the same in words."""

    time: float
    value: float
    lower: float
    upper: float
    promoted: bool
    words: str


def life(
    candidates: Sequence[Candidate],
    live: Sequence[Point],
    alarms: Mapping[Point, str],
    *,
    end: float,
    label: str,
) -> Markup:
    """Candidates over time, promoted ones filled, what was reached `live` as a line, and below the
    base line spans of `alarms` with their words. Ascending seconds of the epoch, up to `end`."""
    shown = [one for one in candidates if drawable((one.time, one.value))]
    if not shown:
        return _NOTHING
    first, last = shown[0].time, max(shown[-1].time, end)
    x = axis([first, last], tight=True)
    heights = [value for one in shown for value in (one.lower, one.value, one.upper)]
    y = axis([*heights, *(value for _, value in live)], ticks=3)
    return _filled(
        "life",
        label=label,
        x=x,
        y=y,
        candidates=shown,
        alarms=alarms,
        course=_path(live, x, y),
        live=list(filter(drawable, thin(live, 80))),
        days={formats.day(time): x.at(time) for time in (first, last)},
    )


def _path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """SVG path data on the stretched layer; a new sub-path after each gap."""
    moves, pen = [], "M"
    for point in thin(points, _MOST_POINTS):
        if drawable(point):
            moves.append(f"{pen}{10 * x.at(point[0]):.1f} {1000 - 10 * y.at(point[1]):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(moves)


def _bands(series: Sequence[Series], x_name: str) -> list[tuple[float, float, str]]:
    """Invisible upright bands that read out, for each series, its last value in the band: where one
    begins, its width, and these words."""
    places = [place for place, _ in max((s.points for s in series), key=len, default=())]
    count = min(len(places), _MOST_BANDS)
    bands = []
    for i in range(count):
        here = places[i * len(places) // count : (i + 1) * len(places) // count]
        read_out = []
        for s in series:
            end = bisect.bisect_right(s.points, here[-1], key=lambda point: point[0])
            if end and s.points[end - 1][0] >= here[0]:
                read_out.append(f"{s.name} {formats.metric(s.points[end - 1][1])}")
        left, right = (100 * k / count for k in (i, i + 1))
        words = f"{x_name} {tick_text(here[-1])}: {', '.join(read_out)}"
        bands.append((left, right - left, words))
    return bands


def heatmap(labels: Sequence[str], matrix: Counts, *, label: str) -> Markup:
    """`matrix[i][j]` examples of true class i predicted as j; hits and mistakes in two hues."""
    n = len(matrix)
    if not n:
        return _NOTHING
    names = [_class_name(labels, i) for i in range(n)]
    size = 64 if n <= 5 else 40 if n <= _SHRINKS else 30 if n <= _NUMBERS else 16
    longest = max(len(texts.shorten_middle(name, _LONGEST)) for name in names) * _LETTER
    slanted, lean = longest > size - 6, round(longest * _SLANT)
    left = round(longest + 34)  # margins in px, which hold the names
    top, right = (lean + 36, lean) if slanted else (44, 2)
    width, height = left + n * size + right, top + n * size + 2
    return _filled(
        "heatmap",
        names=names,
        matrix=matrix,
        label=label,
        px=size,
        slanted=slanted,
        longest=_LONGEST,
        left=left,
        top=top,
        width=width,
        height=height,
        shrinks=n <= _SHRINKS,
        numbers=n <= _NUMBERS,
    )


def _filled(template: str, **values: Any) -> Markup:
    """The plot of that template."""
    return Markup(page.render(f"{template}.svg.j2", **values))  # noqa: S704 - it escapes


def mistakes(labels: Sequence[str], matrix: Counts) -> tuple[tuple[str, str, int], ...]:
    """The three most frequent mistakes: (true class, predicted class, how often)."""
    cells = ((-n, i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) if n > 0)
    first = sorted(cell for cell in cells if cell[1] != cell[2])[:3]
    return tuple((_class_name(labels, i), _class_name(labels, j), -n) for n, i, j in first)


def _class_name(labels: Sequence[str], i: int) -> str:
    """The label of class i, or its number where the record names none."""
    return labels[i] if i < len(labels) else str(i)
