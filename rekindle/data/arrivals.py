"""What a source holds beyond what a run had: whether it changed, and how many new rows.

New rows are counted, not recognised: those in the window now, less those that the run had
of what both windows span. So rows that fill a month that has begun count, rows that left
the window do not, and a row that was replaced by another is none.

What a run would refuse is refused here: a file without a column that is wanted, one that
cannot be read, rows that cannot. Left out of the count it would say that nothing is
new."""

import dataclasses

from rekindle.data.fingerprint import content_in_window
from rekindle.data.quarantine import is_too_many
from rekindle.data.records import inside, read_times
from rekindle.data.roles import wanted_columns
from rekindle.data.source import FileSource, open_source
from rekindle.data.window import Window, parse_window
from rekindle.errors import DataError
from rekindle.records import Fingerprint, ShardManifest
from rekindle.rows.findings import Findings
from rekindle.spec.model import DataSpec
from rekindle.tasks import load_task


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """`data`, `window` as in a Fingerprint;
    `rows` now, `had` by the run, `new` of them."""

    data: str
    window: str
    rows: int
    had: int = 0
    new: int = 0


def arrivals(
    task: str, data: DataSpec, before: Fingerprint | None, shards: ShardManifest | None
) -> Arrivals:
    """What `data` holds now, and what is new since a run with this fingerprint and these
    shards; raises DataError if it holds nothing, or what a run would refuse."""
    modality = load_task(task).modality
    window, content, _ = content_in_window(data, modality)
    by_time = window is not None and not any("{window" in part.source for part in data.parts)
    if before is not None and (content, str(window or "")) == (before.data, before.window):
        had = _rows_read(shards, by_time)
        return Arrivals(content, before.window, had, had)
    rows = _rows(data, modality, window)
    if not rows:
        raise DataError(
            "the data hold no rows that can be read",
            where=data.named,
            fix="check data.source and data.columns",
        )
    if before is None:
        return Arrivals(content, str(window or ""), rows, new=rows)
    had = _rows_read(shards, by_time)
    old_window = parse_window(before.window)
    shared_rows = rows
    if window is not None and old_window is not None and old_window != window:
        start = max(window.start, old_window.start)
        end = min(window.end, old_window.end)
        shared_rows = _rows(data, modality, Window(start, end)) if start < end else 0
    return Arrivals(content, str(window or ""), rows, had, rows - min(had, shared_rows))


def _rows_read(shards: ShardManifest | None, by_time: bool) -> int:
    """Rows that a run read, as `_rows` counts: no unparsed ones, and none whose time
    cannot be read where that tells whether they are in the window; one with two faults
    twice."""
    if shards is None:
        return 0
    uncounted = ("malformed", "time") if by_time else ("malformed",)
    rows = sum(shards.rows.values()) + sum(shards.dropped.values())
    rows += sum(shards.left_out.values())
    rows += sum(count for kind, count in shards.bad_rows.items() if kind not in uncounted)
    return rows


def _rows(data: DataSpec, modality: str, window: Window | None) -> int:
    """How many rows a run with this window would read."""
    rows = 0
    for part in data.parts:
        part_window = window if part.window else None
        rows += _rows_of(part, modality, part_window)
    return rows


def _rows_of(data: DataSpec, modality: str, window: Window | None) -> int:
    """How many rows a run with this window would read of one source."""
    try:
        source = open_source(data, modality, window)
    except DataError:
        if window is None or "{window" not in data.source:
            raise
        return 0  # no partition of the source is in the window
    columns = wanted_columns(data, modality)
    findings = Findings(needed=columns)
    if isinstance(source, FileSource) and source.files.format == "images":
        findings.missing_columns(data.source, columns, [data.columns.image, data.columns.label])
        findings.raise_if_any()
        return source.extent()[0]
    time_column = data.columns.time if window and "{window" not in data.source else None
    name = time_column or next(reversed(columns))  # the last one is short: a label, a key
    count = 0
    read_rows = 0
    for raw in source.read({name: columns[name]}, findings):
        read_rows += len(raw)
        if time_column and window:
            times, has_time = read_times(raw, time_column, findings)
            raw = raw.filter(has_time & inside(times, window))
        count += len(raw)
    _refuse_bad(data, findings, read_rows)
    return count


def _refuse_bad(data: DataSpec, findings: Findings, read_rows: int) -> None:
    """Raise DataError for faults in so many rows, where a run would raise one, too."""
    may_be_left_out = data.on_bad_rows == "drop" and findings.droppable
    if not may_be_left_out or is_too_many(data, findings.rows, read_rows):
        findings.raise_if_any()
