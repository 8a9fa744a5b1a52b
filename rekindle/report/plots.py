"""Our own small plots: inline SVG that follows the page's colours, on any width, without
a script. What lies where is decided here, and drawn by a template of its name; bars and
the rows of a timeline are macros of marks.j2.

Positions are per cent and text has its natural size; only lines lie on a stretched layer.
Axis labels stand in the margin that the style sheet gives the class, and colours are
classes: the style sheet owns light, dark and print. Every plot has a label in words;
details show on hover.

The confusion matrix is a heat map: true classes down, predicted classes across, each row
coloured by its shares. Unlike the others it has a size of its own: cells stay square, and
large ones scroll. Counts stand in the cells up to `_NUMBERS` classes, and always show on
hover."""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from rekindle import formats
from rekindle.report import page, texts
from rekindle.report.drawing import Axis, Point, axis, drawable, thin, tick_text

_MOST_POINTS = 400  # of a line, more than which no screen shows apart
_MOST_BANDS = 60  # that a pointer can tell apart
_MOST_DOTS = 80
_NOTHING = Markup("")
Counts = Sequence[Sequence[int]]  # of examples, by true and predicted class
_NUMBERS = 26  # classes, up to which counts stand in the cells
_SHRINKS = 12  # classes, up to which a matrix shrinks with the page instead of scrolling
_LONGEST = 18  # letters of a class's name
_LETTER = 6.9  # mean width in px of a 12 px letter
_SLANT = math.sqrt(0.5)  # of a label at 45 degrees


@dataclasses.dataclass(frozen=True)
class Series:
    """A line. `css` picks its colour (`a`, `b`; `faint` for raw data behind a mean);
    `marks` draws dots; `quiet` is not read out on hover. Points ascend in x."""

    name: str
    points: Sequence[Point]
    css: str = "a"
    marks: bool = False
    quiet: bool = False

    @property
    def is_drawable(self) -> bool:
        """Whether any of its points has a place."""
        return any(drawable(point) for point in self.points)


def line(
    series: Sequence[Series],
    *,
    label: str,
    x_name: str = "step",
    zero: bool = False,
    guide: tuple[str, float] | None = None,
) -> Markup:
    """Lines over a shared x axis; a gap where a value is not finite.
    `guide` is a named level."""
    drawn = [s for s in series if s.is_drawable]
    if not drawn:
        return _NOTHING
    points: list[Point] = []
    for s in drawn:
        points += s.points
    heights = [y for _, y in points]
    if guide is not None:
        heights.append(guide[1])
    x = axis([x for x, _ in points], ticks=6, tight=True)
    y = axis(heights, ticks=4, zero=zero)
    marked = []
    for s in drawn:
        if s.marks or len(s.points) == 1:  # a line of one point would not be seen
            marked.append((s, _dots(s.points)))
    return _rendered(
        "line",
        label=label,
        x=x,
        y=y,
        x_name=x_name,
        guide=guide,
        lines=[(s.css, _path(s.points, x, y)) for s in drawn],
        marked=marked,
        bands=_bands([s for s in drawn if not s.quiet], x_name),
    )


def reliability(
    points: Sequence[tuple[float, float, int]], *, label: str, numeric: bool = False
) -> Markup:
    """How often right over how confident, or true numbers over predicted ones
    (`numeric`); a dot's area is its rows; the diagonal is perfect."""
    shown = [(x, y, rows) for x, y, rows in points if rows > 0 and drawable((x, y))]
    if not shown:
        return _NOTHING
    ends = [0.0, 1.0]
    if numeric:
        ends = [x for x, _, _ in shown] + [y for _, y, _ in shown]
    unit = axis(ends, ticks=4)
    return _rendered(
        "reliability",
        label=label,
        points=shown,
        total=sum(rows for _, _, rows in shown),
        unit=unit,
        course=_path([(x, y) for x, y, _ in shown], unit, unit),
        numeric=numeric,
    )


def interval(
    *, lower: float, estimate: float, upper: float, threshold: float | None, label: str
) -> Markup:
    """A confidence interval on an axis with zero and the threshold, more is better; the
    side that promotes is shaded."""
    marks = [0.0, lower, estimate, upper]
    if threshold is not None:
        marks.append(threshold)
    if not all(drawable((mark, 0.0)) for mark in marks):
        return _NOTHING
    # the ends of the interval do not touch those of the axis
    room = 0.12 * ((max(marks) - min(marks)) or 1.0)
    x = axis([min(marks) - room, max(marks) + room], ticks=6, tight=True)
    return _rendered(
        "interval",
        x=x,
        lower=lower,
        estimate=estimate,
        upper=upper,
        threshold=threshold,
        label=label,
    )


class Candidate(NamedTuple):
    """A model that was judged: the `time` in seconds of the epoch, the metric with its
    interval (without one both ends are the value), whether it was promoted, and the same
    in words."""

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
    """Candidates over time, promoted ones filled, what was reached `live` as a line, and
    below the base line spans of `alarms` with their words. Ascending seconds of the
    epoch, up to `end`."""
    shown = [model for model in candidates if drawable((model.time, model.value))]
    if not shown:
        return _NOTHING
    first = shown[0].time
    last = max(shown[-1].time, end)
    x = axis([first, last], tight=True)
    heights = [value for _, value in live]
    for candidate in shown:
        heights += [candidate.lower, candidate.value, candidate.upper]
    y = axis(heights, ticks=3)
    return _rendered(
        "life",
        label=label,
        x=x,
        y=y,
        candidates=shown,
        alarms=alarms,
        course=_path(live, x, y),
        live=_dots(live),
        days={formats.day(time): x.at(time) for time in (first, last)},
    )


def _dots(points: Sequence[Point]) -> list[Point]:
    """The points that get a dot: few enough to tell them apart."""
    return [point for point in thin(points, _MOST_DOTS) if drawable(point)]


def _path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """SVG path data on the stretched layer, 1000 by 1000;
    a new sub-path after each gap."""
    moves = []
    command = "M"
    for point in thin(points, _MOST_POINTS):
        if not drawable(point):
            command = "M"
            continue
        # an axis counts per cent from the left and from below
        across = 10 * x.at(point[0])
        down = 1000 - 10 * y.at(point[1])
        moves.append(f"{command}{across:.1f} {down:.1f}")
        command = "L"
    return "".join(moves)


def _bands(series: Sequence[Series], x_name: str) -> list[tuple[float, float, str]]:
    """Invisible upright bands that read out, for each series, its last value in the band:
    where one begins, its width, and these words."""
    longest = max((s.points for s in series), key=len, default=())
    places = [place for place, _ in longest]
    count = min(len(places), _MOST_BANDS)
    bands = []
    for i in range(count):
        in_band = places[i * len(places) // count : (i + 1) * len(places) // count]
        read_out = []
        for s in series:
            # series may have other steps than the longest: the last one up to the band's
            # end
            end = bisect.bisect_right(s.points, in_band[-1], key=lambda point: point[0])
            if end and s.points[end - 1][0] >= in_band[0]:
                read_out.append(f"{s.name} {formats.metric(s.points[end - 1][1])}")
        begin = 100 * i / count
        right = 100 * (i + 1) / count
        hover_text = f"{x_name} {tick_text(in_band[-1])}: {', '.join(read_out)}"
        bands.append((begin, right - begin, hover_text))
    return bands


def heatmap(labels: Sequence[str], matrix: Counts, *, label: str) -> Markup:
    """`matrix[i][j]` examples of true class i predicted as j;
    hits and mistakes in two hues."""
    n = len(matrix)
    if not n:
        return _NOTHING
    names = [_class_name(labels, i) for i in range(n)]
    cell_px = _cell_px(n)
    longest = max(len(texts.shorten_middle(name, _LONGEST)) for name in names)
    longest_px = longest * _LETTER
    # margins, which hold the names
    left_px = round(longest_px + 34)
    top = 44
    right = 2
    slanted = longest_px > cell_px - 6
    if slanted:
        lean = round(longest_px * _SLANT)
        top = lean + 36
        right = lean
    return _rendered(
        "heatmap",
        names=names,
        matrix=matrix,
        label=label,
        px=cell_px,
        slanted=slanted,
        longest=_LONGEST,
        left=left_px,
        top=top,
        width=left_px + n * cell_px + right,
        height=top + n * cell_px + 2,
        shrinks=n <= _SHRINKS,
        numbers=n <= _NUMBERS,
    )


def _cell_px(classes: int) -> int:
    """The side of a cell: as large as the page allows,
    and from `_NUMBERS` on without counts."""
    if classes <= 5:
        return 64
    if classes <= _SHRINKS:
        return 40
    return 30 if classes <= _NUMBERS else 16


def _rendered(template: str, **values: Any) -> Markup:
    """The plot of that template."""
    return Markup(page.render(f"{template}.svg.j2", **values))  # noqa: S704 - it escapes


def mistakes(labels: Sequence[str], matrix: Counts) -> tuple[tuple[str, str, int], ...]:
    """The three most frequent mistakes: (true class, predicted class, how often)."""
    cells = []
    for i, row in enumerate(matrix):
        for j, count in enumerate(row):
            if i != j and count > 0:
                cells.append((-count, i, j))
    # the first of as frequent ones, by class
    most_frequent = sorted(cells)[:3]
    return tuple(
        (_class_name(labels, i), _class_name(labels, j), -count) for count, i, j in most_frequent
    )


def _class_name(labels: Sequence[str], i: int) -> str:
    """The label of class i, or its number where the record names none."""
    return labels[i] if i < len(labels) else str(i)
