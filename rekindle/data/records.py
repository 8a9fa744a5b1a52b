"""What `fingerprint` and `ingest` have to see alike of records: their times, as microseconds since
1970, which of them lie in a window, and a hash of them, however their values come in batches."""

import contextlib
import dataclasses
import datetime as dt
import hashlib
import json
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.data.columns import Mask, RawBatch, as_python, content_of, texts
from rekindle.data.roles import Columns
from rekindle.data.split import Times, content_views
from rekindle.data.validate import Findings
from rekindle.data.window import Window, parse_duration, parse_time, shift
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
            low, high = int(times.min()), int(times.max())
            self.oldest = low if self.oldest is None else min(self.oldest, low)
            self.newest = high if self.newest is None else max(self.newest, high)

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
    mask: Mask = (times >= microseconds(window.start)) & (times < microseconds(window.end))
    return mask


def _parse(text: str) -> int | None:
    try:
        return microseconds(parse_time(text.strip()))
    except (ValueError, OverflowError):
        return None


class RecordsHash:
    """Hash of the values of some columns, one after the other, and the number of `rows`."""

    def __init__(self, columns: Columns) -> None:
        self.rows = 0
        self._kinds = {name: columns[name] for name in sorted(columns)}
        # of each column: where there is a value, how long values are, and their bytes
        self._hashes = {name: [hashlib.sha256() for _ in range(3)] for name in self._kinds}

    def update(self, raw: RawBatch) -> None:
        self.rows += len(raw)
        for name, kind in self._kinds.items():
            if kind == "image":
                images = []
                for value in raw.columns[name]:
                    with contextlib.suppress(OSError, ValueError):  # `ingest` says so
                        value = content_of(raw, value)
                    images.append(value if isinstance(value, bytes) else repr(value).encode())
                values = pa.array(images, pa.binary())
            elif kind == "list":
                plain = map(as_python, raw.columns[name])
                lists = [json.dumps(value, sort_keys=True, default=repr) for value in plain]
                values = pa.array(lists, pa.string())
            else:
                values = texts(raw, name, kind, Findings()).values
            present, lengths, content = self._hashes[name]
            present.update(np.asarray(values.is_valid(), np.uint8).tobytes())
            values = values.fill_null(b"" if kind == "image" else "")
            lengths.update(np.asarray(pc.binary_length(values), np.int32).tobytes())
            content.update(b"".join(content_views(values)))

    def digest(self) -> str:
        hashes = self._hashes.items()
        return digest([[name, "".join(h.hexdigest() for h in each)] for name, each in hashes])
