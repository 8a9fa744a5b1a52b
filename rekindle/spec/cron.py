"""Lines of cron: five fields, of which only what every platform reads alike is taken: `*`, numbers,
names of months and days, ranges, steps and lists; Sunday is 0.

A line that names days of the month and of the week starts on either, and a step over all days
beside other days (`*/2`) is refused, since crons disagree on whether then both have to fit.
Authority: crontab(5)."""

import datetime
import itertools
import re
import zoneinfo
from collections.abc import Iterator

Fields = tuple[tuple[int, ...] | None, ...]

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 6, _DAYS),
)
_LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_ITEM = re.compile(r"(?:\*|([a-z]+|\d{1,2})(?:-([a-z]+|\d{1,2}))?)(?:/(\d{1,2}))?")
_NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_EXAMPLE = "write five fields, such as `0 3 * * 1`: Mondays at three"


def cron_problem(text: str) -> tuple[str, str] | None:
    """Why `text` is not a line that can be taken, and what to write; None if it is one.
    `cron_problem("61 * * * *")` is ``("minute: 61 is not in 0-59", ...)``."""
    fields = text.lower().split()
    if len(fields) != len(_FIELDS):
        what = f"`{text}` has {len(fields)} field{'s' * (len(fields) != 1)}, not five"
        if len(fields) in (6, 7):
            return what, "leave seconds and the year out, such as `0 3 * * 1`: Mondays at three"
        return what, _EXAMPLE
    for field, (name, low, high, names) in zip(fields, _FIELDS, strict=True):
        for item in field.split(","):
            try:
                _span(item, low, high, names)
            except ValueError as error:
                return f"{name}: {error}", _way_out(item, name)
    return _days_problem(fields)


def five_fields(text: str) -> str:
    """The line that a name such as `@daily` stands for, or `text` as it is."""
    return _NAMED.get(text.strip().lower(), text)


def values(cron: str) -> Fields:
    """The numbers that each of the five fields names, in order; None for `*`."""
    found = list[tuple[int, ...] | None]()
    for field, (_, low, high, names) in zip(cron.lower().split(), _FIELDS, strict=True):
        numbers = {n for item in field.split(",") for n in _span(item, low, high, names)}
        found.append(None if field == "*" else tuple(sorted(numbers)))
    return tuple(found)


def listed(numbers: tuple[int, ...] | None) -> str:
    """A field in numbers, ranges and lists. `(1, 2, 3, 7)` is ``1-3,7``, None ``*``."""
    if numbers is None:
        return "*"
    # numbers that follow each other are as far from their places
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = ([number for _, number in group] for _, group in groups)
    spans = ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs)
    return ",".join(itertools.chain.from_iterable(spans))


def written(cron: str) -> str:
    """The same line without names and steps: `*/30 9-17 * * mon` is ``0,30 9-17 * * 1``."""
    return " ".join(map(listed, values(cron)))


def next_times(
    cron: str, timezone: str, after: datetime.datetime, count: int
) -> list[datetime.datetime]:
    """The next `count` starts after `after`, in the zone: a time that a change of clocks skips is
    left out, one that it repeats counts once, the first time. Fewer within nine years, if so."""
    minutes, hours, *_ = fields = values(cron)
    zone, found = zoneinfo.ZoneInfo(timezone), list[datetime.datetime]()
    day = after.astimezone(zone).date() - datetime.timedelta(days=1)
    for _ in range(9 * 366):  # between two days of 29 February lie eight years at most
        if day_fits(fields, day):
            found += sorted(
                moment
                for hour in (range(24) if hours is None else hours)
                for minute in (range(60) if minutes is None else minutes)
                if (moment := _moment(day, hour, minute, zone)) is not None and moment > after
            )
        if len(found) >= count:
            break
        day += datetime.timedelta(days=1)
    return found[:count]


def starts(cron: str, timezone: str, after: datetime.datetime, count: int) -> Iterator[str]:
    """The next starts for people: in the zone, and in UTC."""
    for moment in next_times(cron, timezone, after, count):
        utc = moment.astimezone(datetime.UTC)
        yield f"{moment:%a %Y-%m-%d %H:%M} {timezone} = {utc:%Y-%m-%d %H:%M} UTC"


def unsteady(cron: str, timezone: str, after: datetime.datetime) -> Iterator[str]:
    """The first times within a year after `after` that a change of clocks skips, and repeats."""
    minutes, hours, *_ = fields = values(cron)
    zone, said = zoneinfo.ZoneInfo(timezone), set[str]()
    for n in range(366):
        day = after.astimezone(zone).date() + datetime.timedelta(days=n)
        around = (day + datetime.timedelta(days=d) for d in (-1, 1))
        noons = [datetime.datetime.combine(d, datetime.time(12), zone) for d in around]
        if noons[0].utcoffset() == noons[1].utcoffset() or not day_fits(fields, day):
            continue
        for hour in range(24) if hours is None else hours:
            for minute in range(60) if minutes is None else minutes:
                local = datetime.datetime.combine(day, datetime.time(hour, minute), zone)
                how = "is skipped" if _moment(day, hour, minute, zone) is None else ""
                if not how and local.utcoffset() != local.replace(fold=1).utcoffset():
                    how = "comes twice"
                if how and how not in said:
                    said.add(how)
                    yield f"{local:%Y-%m-%d %H:%M} {how}"


def day_fits(fields: Fields, day: datetime.date) -> bool:
    """Whether the line may start on this day: of days of the month and of the week either fits."""
    _, _, days, months, weekdays = fields
    if months is not None and day.month not in months:
        return False
    on_day = days is not None and day.day in days
    on_weekday = weekdays is not None and day.isoweekday() % 7 in weekdays
    return on_day or on_weekday or (days is None and weekdays is None)


def _moment(
    day: datetime.date, hour: int, minute: int, zone: zoneinfo.ZoneInfo
) -> datetime.datetime | None:
    local = datetime.datetime.combine(day, datetime.time(hour, minute), zone)
    there = local.astimezone(datetime.UTC).astimezone(zone)
    return local if there.replace(tzinfo=None) == local.replace(tzinfo=None) else None


def _span(item: str, low: int, high: int, names: tuple[str, ...]) -> range:
    """The numbers that an item of a field names; ValueError says what is wrong with it."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"`{item}` is neither `*` nor a number, a range or a step")
    first, last, step = match.groups()
    ends = []
    for word in filter(None, (first, last)):
        number = int(word) if word.isdigit() else names.index(word) + low if word in names else -1
        if not low <= number <= high:
            raise ValueError(f"{word} is not in {low}-{high}")
        ends.append(number)
    if len(ends) == 2 and ends[0] > ends[1]:
        raise ValueError(f"`{item}` ends before it begins")
    if step is not None and not 1 <= int(step) <= high:
        raise ValueError(f"`{item}` has a step that leads nowhere")
    # as in crontab, `5/20` goes on to the end
    end = ends[-1] if last or (first and not step) else high
    return range(ends[0] if ends else low, end + 1, int(step or 1))


def _way_out(item: str, field: str) -> str:
    if field == "day of the week" and "7" in item:
        return "write 0 for Sunday"
    if item == "?":
        return "write `*`"
    if field.startswith("day") and re.search(r"[lw#]", item) and item not in _DAYS:
        return "name days that every month has, or start more often: not every platform has L, W, #"
    if "-" in item and _ITEM.fullmatch(item):
        return "write two ranges, such as `22-23,0-5`"
    return _EXAMPLE


def _days_problem(fields: list[str]) -> tuple[str, str] | None:
    """What is wrong with the days, each field being right."""
    day, month, weekday = fields[2:]
    if "*" not in (day, weekday) and "*" in f"{day}{weekday}":
        what = f"`{day}` and `{weekday}`: some crons want both to fit, some either"
        return what, "write the days out, such as `1,15`, or `*` for one of them"
    _, _, days, months, weekdays = values(" ".join(fields))
    if days is not None and weekdays is None:
        longest = max(_LONGEST_MONTHS[number - 1] for number in months or range(1, 13))
        if days[0] > longest:
            return f"day {day} of month {month} never comes", "name a day that the month has"
    return None
