"""The comparison of runs as lines of text, and how it writes values."""

from __future__ import annotations

import json
from typing import Any

from rekindle import formats
from rekindle.masking import plain
from rekindle.outputs import Compared, ComparedFact, ComparedRun
from rekindle.records import Comparison
from rekindle.report.texts import lower_is_better, shorten_middle

Row = tuple[str, ...]
_MOST_LETTERS = 60


def lines(found: Compared) -> list[str]:
    """The tables, and what could not be compared."""
    columns = [facts(run) for run in found.runs]
    about: list[Row] = [("run", *(run.run_id for run in found.runs))]
    about += [
        (rows[0][0].lower(), *(value for _, value in rows)) for rows in zip(*columns, strict=True)
    ]
    title = (
        "metrics, and changes from the first run (with 95% interval; marked where it holds no zero)"
    )
    tables = {
        "": about,
        title: _metrics(found),
        "config": _facts(found.settings),
        "data": _facts(found.data),
    }
    text: list[str] = []
    for name, rows in tables.items():
        text += [*(["", name] if name else []), *_aligned(rows)]
    return [*text, *(["", *(f"note: {note}" for note in found.notes)] if found.notes else [])]


def facts(run: ComparedRun) -> tuple[tuple[str, str], ...]:
    """What a run came to, as (name, value)."""
    trained = "from the cache" if run.training_seconds == 0 else None
    return (
        ("Started", formats.date(run.started_at)),
        ("Status", run.status),
        ("Time", formats.duration(run.seconds)),
        ("Training", trained or formats.duration(run.training_seconds)),
        ("Gate", (run.decision or "–").replace("_", " ")),
        ("Model", run.model or "–"),
        ("Judged on", f"{formats.count(run.rows)} rows" if run.rows is not None else "–"),
    )


def value_text(value: Any) -> str:
    """A setting as a config would have it; "–" for one that is not there."""
    if value is None:
        return "–"
    if isinstance(value, float) and value.is_integer():
        return f"{value:g}"
    is_line = isinstance(value, str) and "\n" not in value
    return value if is_line else json.dumps(value, ensure_ascii=False)


def change_text(change: Comparison | None) -> str:
    """The change of the value and its interval; "" for none."""
    if change is None:
        return ""
    ends = [change.estimate, change.lower, change.upper]
    if lower_is_better(change.metric):  # a comparison is turned so that more is better
        ends = [-change.estimate, -change.upper, -change.lower]
    middle, lower, upper = map(formats.signed, ends)
    return f"{middle} [{lower}, {upper}]"


def certainly(change: Comparison | None) -> str:
    """`better` or `worse` where the interval holds no zero, else nothing."""
    if change is None or change.lower <= 0 <= change.upper:
        return ""
    return "better" if change.lower > 0 else "worse"


def _metrics(found: Compared) -> list[Row]:
    rows: list[Row] = []
    for metric in found.metrics:
        rows.append((metric.name, *(formats.metric(value) for value in metric.values)))
        if any(metric.changes):
            rows.append(("", *(f"{change_text(c)} {certainly(c)}".strip() for c in metric.changes)))
    return rows or [("no run was evaluated",)]


def _facts(rows: tuple[ComparedFact, ...]) -> list[Row]:
    return [
        (row.name, *(shorten_middle(value_text(value), _MOST_LETTERS) for value in row.values))
        for row in rows
    ] or [("the same",)]


def _aligned(rows: list[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{width}}}" for width in widths).format
    return [plain(form(*row)).rstrip() for row in rows]
