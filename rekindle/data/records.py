"""What `fingerprint` and `ingest` have to see alike of records: their times, as
microseconds since 1970, which of them lie in a window, and a hash of them, however their
values come in batches."""

import contextlib
import dataclasses
import datetime as dt
import hashlib
import json
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.data.split import Times, content_views
from rekindle.data.window import Window, parse_duration, parse_time, shift
from rekindle.rows import Columns, Kind
from rekindle.rows.columns import Mask, RawBatch, as_python, content_of, texts
from rekindle.rows.findings import Findings
from rekindle.spec.identity import digest

_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)


@dataclasses.dataclass
class Span:
    oldest: int | None = None
    newest: int | None = None
    rows: int = 0

    def include(self, times: Times) -> None:
        self.rows += len(times)
        if len(times):
            oldest = int(times.min())
            newest = int(times.max())
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)
            self.newest = newest if self.newest is None else max(self.newest, newest)

    def join(self, other: Self) -> None:
        """Include what another one spans."""
        ends = [time for time in (other.oldest, other.newest) if time is not None]
        self.include(np.array(ends, np.int64))
        self.rows += other.rows - len(ends)

    def __str__(self) -> str:
        if self.oldest is None or self.newest is None:
            return "none"
        return f"{to_datetime(self.oldest).isoformat()} to {to_datetime(self.newest).isoformat()}"


def microseconds(time: dt.datetime) -> int:
    """A naive UTC time as microseconds since 1970."""
    return (time - _EPOCH) // _MICROSECOND


def to_datetime(time: int) -> dt.datetime:
    return _EPOCH + time * _MICROSECOND


def before(time: int, duration: str) -> int:
    """The time that lies `duration`, such as `3 days`, before another."""
    return microseconds(shift(to_datetime(time), parse_duration(duration), back=True))


def read_times(raw: RawBatch, column: str, findings: Findings) -> tuple[Times, Mask]:
    """The time of each row, and where it has one; the others are noted."""
    column_texts = texts(raw, column, "scalar", findings)
    # each different text is parsed once: many records have one time
    encoded = column_texts.values.fill_null("").dictionary_encode()
    parsed = [_parse(text) for text in encoded.dictionary.to_pylist()]
    indices = np.asarray(encoded.indices)
    times = np.array([time or 0 for time in parsed], np.int64)[indices]
    has_time = np.array([time is not None for time in parsed], bool)[indices]
    for row in np.flatnonzero(~has_time & ~column_texts.noted).tolist():
        findings.add("time", raw.place(row), repr(column_texts.values[row].as_py()))
    return times, has_time


def inside(times: Times, window: Window) -> Mask:
    mask: Mask = (times >= microseconds(window.start)) & (times < microseconds(window.end))
    return mask


def _parse(text: str) -> int | None:
    try:
        return microseconds(parse_time(text.strip()))
    except (ValueError, OverflowError):
        return None


class RecordsHash:
    """Hash of the values of some columns, one after the other; and how many `rows`."""

    def __init__(self, columns: Columns) -> None:
        self.rows = 0
        self._kinds = {name: columns[name] for name in sorted(columns)}
        # of each column: where there is a value, how long values are, and their bytes;
        # apart, so that it does not matter how the rows come in batches
        self._hashes = {name: [hashlib.sha256() for _ in range(3)] for name in self._kinds}

    def update(self, raw: RawBatch) -> None:
        self.rows += len(raw)
        for name, kind in self._kinds.items():
            values = _comparable(raw, name, kind)
            present, lengths, content = self._hashes[name]
            present.update(np.asarray(values.is_valid(), np.uint8).tobytes())
            values = values.fill_null(b"" if kind == "image" else "")
            lengths.update(np.asarray(pc.binary_length(values), np.int32).tobytes())
            content.update(b"".join(content_views(values)))

    def digest(self) -> str:
        by_column = list[list[str]]()
        for name, hashes in self._hashes.items():
            by_column.append([name, "".join(running.hexdigest() for running in hashes)])
        return digest(by_column)


def _comparable(raw: RawBatch, name: str, kind: Kind) -> pa.Array:
    """The values of a column as strings or bytes, alike where what is read of them is."""
    if kind == "image":
        images = list[bytes]()
        for value in raw.columns[name]:
            with contextlib.suppress(OSError, ValueError):  # `ingest` says so
                value = content_of(raw, value)
            images.append(value if isinstance(value, bytes) else repr(value).encode())
        return pa.array(images, pa.binary())
    if kind == "list":
        lists = list[str]()
        for value in raw.columns[name]:
            lists.append(json.dumps(as_python(value), sort_keys=True, default=repr))
        return pa.array(lists, pa.string())
    return texts(raw, name, kind, Findings()).values
