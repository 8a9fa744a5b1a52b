"""Times of records as microseconds since 1970, and which of them lie in a window."""

import dataclasses
import datetime as dt

import numpy as np
import numpy.typing as npt

from rekindle.data.columns import Mask, RawBatch, texts
from rekindle.data.validate import Findings
from rekindle.data.window import Window, parse_time

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
