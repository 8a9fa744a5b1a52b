"""When each platform starts what a schedule asks for, from the platform's own syntax and what it says
of changing clocks; written from their documentation, and from nothing of ours.

- `kubeflow`: robfig/cron's `SpecSchedule.Next` (spec.go, with its repair for days without midnight),
  step for step, as the controller of scheduled workflows calls it: six fields, the zone is the controller's. A field of `*` or `*/n`
  makes days of the month and of the week both count, otherwise either does.
- `sagemaker`: EventBridge Scheduler's `cron(minutes hours day month weekday year)`; either day field
  is `?`, 1 is Sunday. A time that the clock skips is left out, one that it repeats starts once
  (docs.aws.amazon.com/scheduler/latest/UserGuide/schedule-types.html, time zones and summer time).
- `vertex`: `TZ=ZONE` and five fields of unix-cron. What happens when clocks change, and to a line
  that names days of both kinds, is documented nowhere: such starts are not in the answer.
- `azureml`: five fields, of which days of the month and months are ignored, and a zone of Windows'
  (CLDR's windowsZones.xml, territory 001). What happens when clocks change is documented nowhere.
"""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from collections.abc import Iterator

WINDOWS = {
    "UTC": "Etc/UTC",
    "W. Europe Standard Time": "Europe/Berlin",
    "GMT Standard Time": "Europe/London",
    "Eastern Standard Time": "America/New_York",
    "Pacific Standard Time": "America/Los_Angeles",
    "Lord Howe Standard Time": "Australia/Lord_Howe",
    "AUS Eastern Standard Time": "Australia/Sydney",
    "India Standard Time": "Asia/Calcutta",
    "Nepal Standard Time": "Asia/Katmandu",
    "Tokyo Standard Time": "Asia/Tokyo",
    "Morocco Standard Time": "Africa/Casablanca",
    "Egypt Standard Time": "Africa/Cairo",
    "New Zealand Standard Time": "Pacific/Auckland",
    "Cuba Standard Time": "America/Havana",
    "Chatham Islands Standard Time": "Pacific/Chatham",
    "Paraguay Standard Time": "America/Asuncion",
}
_NAMES = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
_MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]


def after(
    platform: str, expression: str, timezone: str, moment: dt.datetime
) -> Iterator[dt.datetime]:
    """The starts after `moment`, in UTC."""
    evaluate = {
        "kubeflow": _robfig,
        "sagemaker": _eventbridge,
        "vertex": _unix,
        "azureml": _windows,
    }[platform]
    return evaluate(expression, timezone, moment)


# Kubeflow


def _robfig(expression: str, timezone: str, moment: dt.datetime) -> Iterator[dt.datetime]:
    words = expression.split()
    assert len(words) == 6, "five fields would be read as if they began with seconds"
    bounds = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
    fields = [_bits(word, *bound) for word, bound in zip(words, bounds, strict=True)]
    at = int(moment.timestamp())
    while True:
        at = _next(fields, zoneinfo.ZoneInfo(timezone), at)
        yield dt.datetime.fromtimestamp(at, dt.UTC)


def _bits(word: str, low: int, high: int) -> tuple[frozenset[int], bool]:
    """The numbers, and whether the field has a star."""
    numbers, star = set[int](), False
    for item in word.split(","):
        span, _, step = item.partition("/")
        first, _, last = span.partition("-")
        if first in ("*", "?"):
            star, begin, end = True, low, high
        else:
            begin = int(first)
            end = int(last) if last else high if step else begin
        assert low <= begin <= end <= high
        numbers.update(range(begin, end + 1, int(step or 1)))
    return frozenset(numbers), star


def _next(  # noqa: C901 - one function there, too
    fields: list[tuple[frozenset[int], bool]], zone: zoneinfo.ZoneInfo, at: int
) -> int:
    seconds, minutes, hours, (days, any_day), (months, _), (weekdays, any_weekday) = fields

    def local(t: int) -> dt.datetime:
        return dt.datetime.fromtimestamp(t, zone)

    def date(year: int, month: int, day: int, hour: int = 0) -> int:
        """time.Date: reads the clock with the offset that holds there, or next to there."""
        months_on = year * 12 + month - 1
        naive = dt.datetime(months_on // 12, months_on % 12 + 1, 1) + dt.timedelta(
            day - 1, hour * 3600
        )
        unix = int(naive.replace(tzinfo=dt.UTC).timestamp())
        first = _offset(zone, unix)
        return unix - _offset(zone, unix - first)

    def fits(t: int) -> bool:
        now = local(t)
        on_day, on_weekday = now.day in days, now.isoweekday() % 7 in weekdays
        return on_day and on_weekday if any_day or any_weekday else on_day or on_weekday

    t, added = at + 1, False
    while True:
        wrapped = False
        while local(t).month not in months:
            now = local(t)
            t = date(now.year, now.month, 1) if not added else t
            added, now = True, local(t)
            t = date(now.year, now.month + 1, now.day, now.hour)
            if local(t).month == 1:
                wrapped = True
                break
        while not wrapped and not fits(t):
            now = local(t)
            t = date(now.year, now.month, now.day) if not added else t
            added, now = True, local(t)
            t = date(now.year, now.month, now.day + 1, now.hour)
            if hour := local(t).hour:  # no midnight that day
                t += (24 - hour if hour > 12 else -hour) * 3600
            wrapped = local(t).day == 1
        for numbers, unit in ((hours[0], 3600), (minutes[0], 60), (seconds[0], 1)):
            while not wrapped and _part(local(t), unit) not in numbers:
                now = local(t)
                if not added:
                    t = (
                        date(now.year, now.month, now.day, now.hour)
                        if unit == 3600
                        else t - t % unit
                    )
                added = True
                t += unit
                wrapped = _part(local(t), unit) == 0
        if not wrapped:
            return t


def _part(now: dt.datetime, unit: int) -> int:
    return {3600: now.hour, 60: now.minute, 1: now.second}[unit]


def _offset(zone: zoneinfo.ZoneInfo, unix: int) -> int:
    offset = dt.datetime.fromtimestamp(unix, zone).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


# the others


def _eventbridge(expression: str, timezone: str, moment: dt.datetime) -> Iterator[dt.datetime]:
    match = re.fullmatch(r"cron\((\S+) (\S+) (\S+) (\S+) (\S+) (\S+)\)", expression)
    assert match is not None, "six fields in cron()"
    assert len(expression) <= 256
    minute, hour, day, month, weekday, year = match.groups()
    assert (day == "?") != (weekday == "?"), "`?` in one of the days, and in one only"
    assert year == "*"
    fields = (
        _set(minute, 0, 59),
        _set(hour, 0, 23),
        _set(day, 1, 31),
        _set(month, 1, 12, _MONTHS, 1),
        {number - 1 for number in _set(weekday, 1, 7, _NAMES, 1)},
    )
    for instants in _walked(fields, zoneinfo.ZoneInfo(timezone), moment):
        yield from instants[:1]


def _unix(expression: str, timezone: str, moment: dt.datetime) -> Iterator[dt.datetime]:
    prefix, *words = expression.split()
    assert prefix == f"TZ={timezone}"
    assert len(words) == 5
    assert "*" in (words[2], words[4]), "which of both days has to fit is not documented"
    bounds = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
    fields = [_set(word, *bound) for word, bound in zip(words, bounds, strict=True)]
    for instants in _walked(fields, zoneinfo.ZoneInfo(timezone), moment):
        yield from instants if len(instants) == 1 else ()


def _windows(expression: str, timezone: str, moment: dt.datetime) -> Iterator[dt.datetime]:
    minute, hour, _, _, weekday = expression.split()
    fields = (
        _set(minute, 0, 59),
        _set(hour, 0, 23),
        _set("*", 1, 31),
        _set("*", 1, 12),
        _set(weekday, 0, 6),
    )
    for instants in _walked(fields, zoneinfo.ZoneInfo(WINDOWS[timezone]), moment):
        yield from instants if len(instants) == 1 else ()


def _set(
    word: str, low: int, high: int, names: list[str] | None = None, first: int = 0
) -> set[int]:
    numbers = set[int]()
    for item in word.split(","):
        if item in ("*", "?"):
            numbers.update(range(low, high + 1))
            continue
        ends = [
            names.index(end) + first if names and end in names else int(end)
            for end in item.split("-")
        ]
        assert low <= ends[0] <= ends[-1] <= high
        numbers.update(range(ends[0], ends[-1] + 1))
    return numbers


def _walked(
    fields: tuple[set[int], ...] | list[set[int]], zone: zoneinfo.ZoneInfo, moment: dt.datetime
) -> Iterator[list[dt.datetime]]:
    """For each time on the wall, the moments at which the clock shows it: one, none or two."""
    minutes, hours, days, months, weekdays = fields
    day = moment.astimezone(zone).date() - dt.timedelta(1)
    while day.year < moment.year + 10:
        if day.day in days and day.month in months and day.isoweekday() % 7 in weekdays:
            noon = dt.datetime(day.year, day.month, day.day, 12, tzinfo=dt.UTC)
            offsets = {
                (noon + dt.timedelta(hours=h)).astimezone(zone).utcoffset()
                for h in range(-36, 37, 12)
            }
            for hour in sorted(hours):
                for minute in sorted(minutes):
                    wall = dt.datetime(day.year, day.month, day.day, hour, minute)
                    found = {
                        utc
                        for offset in offsets
                        if offset is not None
                        and (utc := (wall - offset).replace(tzinfo=dt.UTC))
                        .astimezone(zone)
                        .replace(tzinfo=None)
                        == wall
                    }
                    if kept := sorted(utc for utc in found if utc > moment):
                        yield kept if len(kept) == len(found) else sorted(found)
        day += dt.timedelta(1)
