"""What `fingerprint` and `ingest` have to see alike of records: their times, as microseconds since
1970, which of them lie in a window, and a hash of them, however their values come in batches."""

import contextlib
import dataclasses
import datetime as dt
import hashlib
import json

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.data.columns import Mask, RawBatch, as_python, content_of, texts
from rekindle.data.roles import Columns, Kind
from rekindle.data.split import content_views
from rekindle.data.validate import Findings
from rekindle.data.window import Window, parse_time
from rekindle.spec.identity import digest

Times = npt.NDArray[np.int64]
_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)


@dataclasses.dataclass
class Span:
    """The oldest and newest time seen so far."""

    oldest: int | None = None
    newest: int | None = None
    rows: int = 0

    def include(self, times: Times) -> None:
        """Widen the span to hold these times."""
        self.rows += len(times)
        if len(times):
            low, high = int(times.min()), int(times.max())
            self.oldest = low if self.oldest is None else min(self.oldest, low)
            self.newest = high if self.newest is None else max(self.newest, high)

    def __str__(self) -> str:
        if self.oldest is None or self.newest is None:
            return "none"
        return f"{to_datetime(self.oldest).isoformat()} to {to_datetime(self.newest).isoformat()}"


def microseconds(time: dt.datetime) -> int:
    """A naive UTC time as microseconds since 1970."""
    return (time - _EPOCH) // _MICROSECOND


def to_datetime(time: int) -> dt.datetime:
    """The inverse of `microseconds`."""
    return _EPOCH + time * _MICROSECOND


def read_times(raw: RawBatch, column: str, findings: Findings) -> tuple[Times, Mask]:
    """The time of each row, and where it has one; the others are noted."""
    found = texts(raw, column, "scalar", findings)
    encoded = found.values.fill_null("").dictionary_encode()
    parsed = [_parse(text) for text in encoded.dictionary.to_pylist()]
    indices = np.asarray(encoded.indices)
    times = np.array([time or 0 for time in parsed], np.int64)[indices]
    known = np.array([time is not None for time in parsed], bool)[indices]
    for row in np.flatnonzero(~known & ~found.noted).tolist():
        findings.add("time", raw.place(row), repr(found.values[row].as_py()))
    return times, known


def inside(times: Times, window: Window) -> Mask:
    """Which times lie in the window."""
    mask: Mask = (times >= microseconds(window.start)) & (times < microseconds(window.end))
    return mask


def _parse(text: str) -> int | None:
    try:
        return microseconds(parse_time(text.strip()))
    except (ValueError, OverflowError):
        return None


class RecordsHash:
    """Hash of the values of some columns, and the number of `rows`."""

    def __init__(self, columns: Columns) -> None:
        self.rows = 0
        self._columns = {name: _ColumnHash(columns[name]) for name in sorted(columns)}

    def update(self, raw: RawBatch) -> None:
        """Take in a batch."""
        self.rows += len(raw)
        for name, column in self._columns.items():
            column.update(raw, name)

    def digest(self) -> str:
        """The hash of all rows so far."""
        return digest([[name, column.digest()] for name, column in self._columns.items()])


class _ColumnHash:
    """Hash of a column's values, one after the other, however they come in batches."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._present, self._lengths, self._bytes = (hashlib.sha256() for _ in range(3))

    def update(self, raw: RawBatch, column: str) -> None:
        """Take in the column's values of a batch."""
        if self._kind == "image":
            images = []
            for value in raw.columns[column]:
                with contextlib.suppress(OSError, ValueError):  # `ingest` says so
                    value = content_of(raw, value)
                images.append(value if isinstance(value, bytes) else repr(value).encode())
            values = pa.array(images, pa.binary())
        elif self._kind == "list":
            plain = map(as_python, raw.columns[column])
            lists = [json.dumps(value, sort_keys=True, default=repr) for value in plain]
            values = pa.array(lists, pa.string())
        else:
            values = texts(raw, column, self._kind, Findings()).values
        self._present.update(np.asarray(values.is_valid(), np.uint8).tobytes())
        values = values.fill_null(b"" if self._kind == "image" else "")
        self._lengths.update(np.asarray(pc.binary_length(values), np.int32).tobytes())
        self._bytes.update(b"".join(content_views(values)))

    def digest(self) -> str:
        """The hash of all values so far."""
        return "".join(part.hexdigest() for part in (self._present, self._lengths, self._bytes))
