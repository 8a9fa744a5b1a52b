"""What a source holds beyond what a run had: whether the data changed, how many rows are new.

New rows are counted, not recognised: those in the window now, less those that the run had of what
both windows span. So rows that fill a month that has begun count, rows that left the window do
not, and a row that was replaced by another is none.

What a run would refuse is refused here: a file without a column that is wanted, one that cannot be
read, rows that cannot. Left out of the count it would say that nothing is new."""

import dataclasses

from rekindle.data.fingerprint import content_in_window
from rekindle.data.quarantine import is_too_many
from rekindle.data.records import inside, read_times
from rekindle.data.roles import wanted_columns
from rekindle.data.source import FileSource, open_source
from rekindle.data.validate import Findings
from rekindle.data.window import Window, parse_window
from rekindle.errors import DataError
from rekindle.records import Fingerprint, ShardManifest
from rekindle.spec.model import DataSpec
from rekindle.tasks import load_task


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """`data` and `window` as in a Fingerprint; `rows` now, `had` by the run, `new` of them."""

    data: str
    window: str
    rows: int
    had: int = 0
    new: int = 0


def arrivals(
    task: str, data: DataSpec, before: Fingerprint | None, shards: ShardManifest | None
) -> Arrivals:
    """What `data` holds now, and what is new since a run with this fingerprint and these shards;
    raises DataError if it holds nothing, or what a run would refuse."""
    modality = load_task(task).modality
    window, content, _ = content_in_window(data, modality)
    by_time = window is not None and not any("{window" in part.source for part in data.parts)
    if before is not None and (content, str(window or "")) == (before.data, before.window):
        return Arrivals(content, before.window, had := _had(shards, by_time), had)
    rows = _rows(data, modality, window)
    if not rows:
        raise DataError(
            "the data hold no rows that can be read",
            where=data.named,
            fix="check data.source and data.columns",
        )
    if before is None:
        return Arrivals(content, str(window or ""), rows, new=rows)
    old, had = parse_window(before.window), _had(shards, by_time)
    kept = rows
    if window is not None and old is not None and old != window:
        start, end = max(window.start, old.start), min(window.end, old.end)
        kept = _rows(data, modality, Window(start, end)) if start < end else 0
    return Arrivals(content, str(window or ""), rows, had, rows - min(had, kept))


def _had(shards: ShardManifest | None, by_time: bool) -> int:
    """Rows that a run read, as `_rows` counts: no unparsed ones, and none whose time cannot be read
    where that tells whether they are in the window; one with two faults twice."""
    if shards is None:
        return 0
    aside = ("malformed", "time") if by_time else ("malformed",)
    bad = {kind: number for kind, number in shards.bad_rows.items() if kind not in aside}
    counts = (shards.rows, shards.dropped, bad, shards.left_out)
    return sum(number for count in counts for number in count.values())


def _rows(data: DataSpec, modality: str, window: Window | None) -> int:
    """How many rows a run with this window would read."""
    return sum(_rows_of(part, modality, window if part.window else None) for part in data.parts)


def _rows_of(data: DataSpec, modality: str, window: Window | None) -> int:
    try:
        source = open_source(data, modality, window)
    except DataError:
        if window is None or "{window" not in data.source:
            raise
        return 0  # no partition of the source is in the window
    wanted = wanted_columns(data, modality)
    findings = Findings(needed=wanted)
    if isinstance(source, FileSource) and source.files.format == "images":
        findings.missing_columns(data.source, wanted, [data.columns.image, data.columns.label])
        findings.raise_if_any()
        return source.extent()[0]
    column = data.columns.time if window and "{window" not in data.source else None
    name = column or next(reversed(wanted))  # the last one is short: a label, a key
    count, read = 0, 0
    for raw in source.read({name: wanted[name]}, findings):
        read += len(raw)
        if column and window:
            times, known = read_times(raw, column, findings)
            raw = raw.filter(known & inside(times, window))
        count += len(raw)
    _refuse_bad(data, findings, read)
    return count


def _refuse_bad(data: DataSpec, findings: Findings, read: int) -> None:
    """Raise DataError for what was found in so many rows, where a run would raise one, too."""
    may_be_left_out = data.on_bad_rows == "drop" and findings.droppable
    if not (may_be_left_out and not is_too_many(data, findings.rows, read)):
        findings.raise_if_any()
