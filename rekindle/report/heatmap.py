"""The confusion matrix as a heat map: true classes down, predicted classes across, each row
coloured by its shares.

Unlike the plots in `plots.py` it has a size of its own: cells stay square, small matrices shrink
with the page and large ones scroll in their own box. Counts stand in the cells up to `_NUMBERS`
classes, and always show on hover."""

import dataclasses
import math
from collections.abc import Sequence

from markupsafe import Markup

from rekindle import formats
from rekindle.report import texts
from rekindle.report.drawing import join, plot, tag, title

_NUMBERS = 26
_SHRINKS = 12
_LONGEST = 18
_LETTER = 6.9  # mean width in px of a 12 px letter
_SLANT = math.sqrt(0.5)  # of a label at 45 degrees


@dataclasses.dataclass(frozen=True)
class _Frame:
    """Sizes in px: of a cell, and of the margins that hold the class names."""

    cell: int
    left: int
    top: int
    right: int
    slanted: bool


def heatmap(labels: Sequence[str], matrix: Sequence[Sequence[int]], *, label: str) -> Markup:
    """`matrix[i][j]` examples of true class i predicted as j; hits and mistakes in two hues."""
    n = len(matrix)
    if not n:
        return Markup("")
    names = [class_name(labels, i) for i in range(n)]
    frame = _frame(names)
    cells = join(_row(i, row, names, frame) for i, row in enumerate(matrix))
    named = join(_names(i, name, frame) for i, name in enumerate(names))
    turned = f"translate(14 {frame.top}) rotate(-90)"
    width = frame.left + n * frame.cell + frame.right
    height = frame.top + n * frame.cell + 2
    return plot(
        "heat shrinks" if n <= _SHRINKS else "heat",
        label,
        tag("g", cells, named, transform=f"translate({frame.left} {frame.top})"),
        tag("text", "predicted →", css="name", x=frame.left, y=14),
        tag("text", "← true", css="name", transform=turned, text_anchor="end"),
        viewBox=f"0 0 {width} {height}", width=width, height=height,
    )  # fmt: skip


def mistakes(
    labels: Sequence[str], matrix: Sequence[Sequence[int]], most: int = 3
) -> tuple[tuple[str, str, int], ...]:
    """The most frequent mistakes: (true class, predicted class, how often)."""
    cells = ((-n, i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) if n > 0)
    first = sorted(cell for cell in cells if cell[1] != cell[2])[:most]
    return tuple((class_name(labels, i), class_name(labels, j), -n) for n, i, j in first)


def class_name(labels: Sequence[str], i: int) -> str:
    """The label of class i, or its number where the record names none."""
    return labels[i] if i < len(labels) else str(i)


def _frame(names: Sequence[str]) -> _Frame:
    n = len(names)
    cell = 64 if n <= 5 else 40 if n <= _SHRINKS else 30 if n <= _NUMBERS else 16
    longest = max(len(texts.shorten_middle(name, _LONGEST)) for name in names) * _LETTER
    slanted = longest > cell - 6
    lean = round(longest * _SLANT)
    return _Frame(
        cell=cell, left=round(longest + 34), top=lean + 36 if slanted else 44,
        right=lean if slanted else 2, slanted=slanted,
    )  # fmt: skip


def _row(i: int, row: Sequence[int], names: Sequence[str], frame: _Frame) -> Markup:
    total, shown = sum(row), enumerate(row[: len(names)])
    return join(_cell(i, j, times, total, names, frame) for j, times in shown)


def _cell(i: int, j: int, times: int, total: int, names: Sequence[str], frame: _Frame) -> Markup:
    part = times / total if total else 0.0
    strength = 0.1 + 0.9 * math.sqrt(part) if times > 0 else 0.0
    said = f"{names[i]} → {names[j]}: {formats.count(times)} of {formats.count(total)}"
    place = {"x": j * frame.cell, "y": i * frame.cell}
    size = {"width": frame.cell - 1, "height": frame.cell - 1}
    parts = [title(f"{said} ({formats.percent(part)})"), tag("rect", css="empty", **place, **size)]
    if times:
        css = "hit" if i == j else "miss"
        parts.append(tag("rect", css=css, **place, **size, fill_opacity=strength))
    if times and len(names) <= _NUMBERS:
        x, y = (j + 0.5) * frame.cell, (i + 0.5) * frame.cell + 4
        parts.append(tag("text", str(times), x=x, y=y, text_anchor="middle"))
    return tag("g", *parts)


def _names(i: int, name: str, frame: _Frame) -> Markup:
    """The name of class i, beside its row and above its column."""
    middle = (i + 0.5) * frame.cell
    turn = f"translate({middle + 2:g} -8) rotate(-45)" if frame.slanted else None
    turn = turn or f"translate({middle:g} -8)"
    anchor = "start" if frame.slanted else "middle"
    text = (title(name), texts.shorten_middle(name, _LONGEST))
    row = tag("text", *text, css="class", x=-8, y=middle + 4, text_anchor="end")
    return row + tag("text", *text, css="class", transform=turn, text_anchor=anchor)
