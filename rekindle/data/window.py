"""The span of time that a run trains on: the half-open interval of `data.window`.

Times are naive UTC; a time with an offset is converted, a partial one (`2026-03`) is the
first instant of its period. Months and years are calendar months, and a day that a
shorter month lacks becomes its last one. Pure arithmetic."""

import calendar
import dataclasses
import datetime as dt
import re
from typing import Self

from rekindle.errors import DataError, RequestError
from rekindle.spec.model import WindowSpec

_UNITS = ("hour", "day", "week", "month", "year")
_SECONDS = {"hour": 3_600, "day": 86_400, "week": 604_800}
# how a partition of each length is named where `{window}` names no format
_PARTITION_FORMAT = {
    "hour": "%Y-%m-%dT%H",
    "day": "%Y-%m-%d",
    "week": "%Y-%m-%d",
    "month": "%Y-%m",
    "year": "%Y",
}
_PLACEHOLDER = re.compile(r"\{window(?::([^{}]+))?\}")
_DIRECTIVES = {"%Y": r"\d{4}", "%m": r"\d{2}", "%d": r"\d{2}", "%H": r"\d{2}"}
_DIRECTIVE = re.compile(f"({'|'.join(_DIRECTIVES)})")
_FINENESS = {"%Y": "year", "%m": "month", "%d": "day", "%H": "hour"}
_DEADLINE = dt.datetime(9999, 12, 31)  # the last day that `datetime` has


@dataclasses.dataclass(frozen=True)
class Duration:
    """A length of calendar time; `unit` is the word it was written with."""

    months: int
    seconds: int
    unit: str

    def __mul__(self, times: int) -> Self:
        return type(self)(self.months * times, self.seconds * times, self.unit)

    def __add__(self, other: Self) -> Self:
        return type(self)(self.months + other.months, self.seconds + other.seconds, self.unit)


@dataclasses.dataclass(frozen=True)
class Window:
    """The times t with start <= t < end,
    as text 2026-03-01T00:00:00/2026-06-01T00:00:00."""

    start: dt.datetime
    end: dt.datetime

    def __str__(self) -> str:
        return f"{self.start.isoformat()}/{self.end.isoformat()}"

    def __contains__(self, time: dt.datetime) -> bool:
        return self.start <= time < self.end


def parse_window(text: str) -> Window | None:
    """The window that `str(window)` wrote;
    None for an empty text, which means all records."""
    if not text:
        return None
    start, separator, end = text.partition("/")
    try:
        window = Window(dt.datetime.fromisoformat(start), dt.datetime.fromisoformat(end))
    except ValueError:
        separator = ""
    if not separator or window.start.tzinfo or window.end.tzinfo or window.start >= window.end:
        raise RequestError(
            f"{text!r} is not a window",
            fix="write it as 2026-03-01T00:00:00/2026-06-01T00:00:00",
        )
    return window


def parse_duration(text: str) -> Duration:
    """`6 months` as a Duration.
    Raises ValueError. `parse_duration("2 years").months == 24`."""
    match = re.fullmatch(r"([0-9]+) ?([a-z]+?)s?", text)
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a duration such as `6 months`")
    count = int(match[1])
    unit = match[2]
    if unit == "month":
        return Duration(count, 0, unit)
    if unit == "year":
        return Duration(12 * count, 0, unit)
    return Duration(0, count * _SECONDS[unit], unit)


def parse_time(text: str) -> dt.datetime:
    """An ISO 8601 time as naive UTC, also a partial one (see above).
    Raises ValueError."""
    if re.fullmatch(r"\d{4}(-\d{2})?", text):
        text += "-01-01" if len(text) == 4 else "-01"
    time = dt.datetime.fromisoformat(text)
    if time.tzinfo:
        return time.astimezone(dt.UTC).replace(tzinfo=None)
    return time


def shift(time: dt.datetime, by: Duration, *, back: bool = False) -> dt.datetime:
    """`time` moved by a duration, months first; held within the years 1 to 9999."""
    sign = -1 if back else 1
    last = dt.datetime.min if back else _DEADLINE
    months = time.year * 12 + time.month - 1 + sign * by.months
    if not 12 <= months < 120_000:  # the years 1 to 9999
        return last.replace(tzinfo=time.tzinfo)
    year = months // 12
    month = months % 12 + 1
    _, days_in_month = calendar.monthrange(year, month)
    day = min(time.day, days_in_month)
    try:
        moved = time.replace(year=year, month=month, day=day)
        return moved + dt.timedelta(seconds=sign * by.seconds)
    except OverflowError:
        return last.replace(tzinfo=time.tzinfo)


def floor(time: dt.datetime, unit: str) -> dt.datetime:
    """The start of the hour, day, ISO week (Monday), month or year of `time`."""
    if unit == "hour":
        return time.replace(minute=0, second=0, microsecond=0)
    day = time.replace(hour=0, minute=0, second=0, microsecond=0)
    if unit == "week":
        # never before the first day that there is
        return day - dt.timedelta(days=min(day.weekday(), day.toordinal() - 1))
    if unit == "year":
        return day.replace(month=1, day=1)
    if unit == "month":
        return day.replace(day=1)
    return day


def step(spec: WindowSpec) -> Duration:
    """The distance between two windows, and the length of one partition."""
    return parse_duration(spec.every or spec.size)


def resolve(spec: WindowSpec, newest: dt.datetime | None, unit: str | None = None) -> Window:
    """The interval that `spec` stands for, given the `newest` time of the source:
    `latest` ends with the calendar unit that holds it, that of `every`, or `unit`. `size:
    3 months` and a newest record of 2026-05-17 give
    2026-03-01T00:00:00/2026-06-01T00:00:00."""
    every = step(spec)
    if spec.end != "latest":
        end = _end_of(spec.end)
    elif newest is None:
        raise DataError(
            "the window ends at the latest record, and there is none", where="data.window"
        )
    else:
        unit = unit or every.unit
        end = shift(floor(newest, unit), parse_duration(f"1 {unit}"))
    ago = every * spec.offset
    start = shift(end, ago + parse_duration(spec.size), back=True)
    window = Window(start, shift(end, ago, back=True))
    if window.start >= window.end:
        raise DataError(
            "the window lies before all time",
            where="data.window.offset",
            fix="take a smaller offset, or a larger size",
        )
    return window


def _end_of(text: str) -> dt.datetime:
    """The instant after the period that a date names:
    2026-04-01T00:00:00 for `2026-03`."""
    try:
        time = parse_time(text)
    except ValueError as error:
        raise RequestError(
            f"{text!r} is not a date: {error}",
            where="data.window.end",
            fix="write a date that exists, such as 2026-03-31",
        ) from None
    # the length tells how fine the date is: 2026, 2026-03, 2026-03-31, 2026-03-31T12, ...
    if len(text) <= 13:
        unit = {4: "year", 7: "month", 10: "day", 13: "hour"}[len(text)]
        return shift(time, parse_duration(f"1 {unit}"))
    seconds = 60 if len(text) == 16 else 1
    return shift(time, Duration(0, seconds, "second"))


@dataclasses.dataclass(frozen=True)
class Partitions:
    """A path with `{window}` or, once or several times, the like of `{window:%Y-%m}` in
    it: the globs around the formats, and the formats at odd places between them."""

    parts: tuple[str, ...]

    @classmethod
    def of(cls, path: str, spec: WindowSpec) -> Self:
        """The partitions of `path`.
        Raises RequestError for a format that does not order time."""
        default = _PARTITION_FORMAT[step(spec).unit]
        parts = _PLACEHOLDER.split(path)
        parts[1::2] = [text or default for text in parts[1::2]]
        for text in parts[1::2]:
            plain = _DIRECTIVE.sub("", text)
            if plain == text or "%" in plain or "/" in plain:
                fix = f"use {', '.join(_DIRECTIVES)} and plain text"
                message = f"{{window:{text}}} is not a format of a time"
                raise RequestError(message, where="data.source", fix=fix)
        return cls(tuple(parts))

    @property
    def unit(self) -> str:
        """The calendar unit that the finest part of a name stands for."""
        return _FINENESS[max(self._names(), key=list(_FINENESS).index)]

    @property
    def glob(self) -> str:
        return "*".join(self.parts[::2])

    def time_of(self, path: str) -> dt.datetime | None:
        """The start of the partition that holds the file `path`; None if none does."""
        patterns = [_glob_pattern(part) for part in self.parts]
        patterns[1::2] = [_time_pattern(text) for text in self.parts[1::2]]
        match = re.fullmatch("".join(patterns), path)
        if match is None:
            return None
        fields = {"%Y": 1, "%m": 1, "%d": 1, "%H": 0}
        for name, value in zip(self._names(), match.groups(), strict=True):
            fields[name] = int(value)
        try:
            # in the order of the fields: year, month, day, hour
            return dt.datetime(*fields.values())  # type: ignore[arg-type]
        except ValueError:
            return None

    def _names(self) -> list[str]:
        """The directives of all formats, in their order."""
        names = list[str]()
        for text in self.parts[1::2]:
            names += _DIRECTIVE.findall(text)
        return names


def _time_pattern(text: str) -> str:
    """A format as a regular expression with a group for each directive."""
    groups = {name: f"({digits})" for name, digits in _DIRECTIVES.items()}
    return "".join(groups.get(piece, re.escape(piece)) for piece in _DIRECTIVE.split(text))


def _glob_pattern(text: str) -> str:
    """A glob as a regular expression;
    `**` crosses folders, and a folder means its files."""
    pieces = re.split(r"(\*\*/?|\*|\?)", text)
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(wildcards.get(piece, re.escape(piece)) for piece in pieces)
