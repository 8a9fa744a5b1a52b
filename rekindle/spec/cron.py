"""Lines of cron: five fields, of which only what every platform reads alike is taken:
`*`, numbers, names of months and days, ranges, steps and lists; Sunday is 0.

A line that names days of the month and of the week starts on either, and a step over all
days beside other days (`*/2`) is refused, since crons disagree on whether then both have
to fit. Authority: crontab(5).

Next times are computed here and not by croniter: it starts a time that clocks skip after
the gap, and one that they repeat twice, so both would be corrected here. It takes 0.1 s to
import and would replace some twenty lines, for platforms are given the numbers of each
field. The tests compare `next_times` with croniter's."""

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
        noun = "field" if len(fields) == 1 else "fields"
        message = f"`{text}` has {len(fields)} {noun}, not five"
        if len(fields) in (6, 7):
            return message, "leave seconds and the year out, such as `0 3 * * 1`: Mondays at three"
        return message, _EXAMPLE
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
    fields: list[tuple[int, ...] | None] = []
    for field, (_, low, high, names) in zip(cron.lower().split(), _FIELDS, strict=True):
        if field == "*":
            fields.append(None)
            continue
        numbers = set[int]()
        for item in field.split(","):
            numbers.update(_span(item, low, high, names))
        fields.append(tuple(sorted(numbers)))
    return tuple(fields)


def listed(numbers: tuple[int, ...] | None) -> str:
    """A field in numbers, ranges and lists. `(1, 2, 3, 7)` is ``1-3,7``, None ``*``."""
    if numbers is None:
        return "*"
    parts: list[str] = []
    run: list[int] = []
    for number, following in itertools.zip_longest(numbers, numbers[1:]):
        run.append(number)
        if following == number + 1:
            continue
        if len(run) > 2:
            parts.append(f"{run[0]}-{run[-1]}")
        else:
            parts += map(str, run)
        run = []
    return ",".join(parts)


def written(cron: str) -> str:
    """The same line without names and steps: `*/30 9-17 * * mon` is ``0,30 9-17 * * 1``."""
    return " ".join(map(listed, values(cron)))


def next_times(
    cron: str, timezone: str, after: datetime.datetime, count: int
) -> list[datetime.datetime]:
    """The next `count` starts after `after`, in the zone: a time that a change of clocks
    skips is left out, one that it repeats counts once, the first time. Fewer within nine
    years, if so."""
    fields = values(cron)
    zone = zoneinfo.ZoneInfo(timezone)
    moments: list[datetime.datetime] = []
    day = after.astimezone(zone).date() - datetime.timedelta(days=1)
    for _ in range(9 * 366):  # between two days of 29 February lie eight years at most
        if day_fits(fields, day):
            times = [_moment(day, hour, minute, zone) for hour, minute in _times(fields)]
            moments += sorted(moment for moment in times if moment is not None and moment > after)
        if len(moments) >= count:
            break
        day += datetime.timedelta(days=1)
    return moments[:count]


def _times(fields: Fields) -> Iterator[tuple[int, int]]:
    """Hours and minutes of a day on which the line starts."""
    minutes, hours, *_ = fields
    yield from itertools.product(
        range(24) if hours is None else hours, range(60) if minutes is None else minutes
    )


def starts(cron: str, timezone: str, after: datetime.datetime, count: int) -> Iterator[str]:
    """The next starts for people: in the zone, and in UTC."""
    for moment in next_times(cron, timezone, after, count):
        utc = moment.astimezone(datetime.UTC)
        yield f"{moment:%a %Y-%m-%d %H:%M} {timezone} = {utc:%Y-%m-%d %H:%M} UTC"


def unsteady(cron: str, timezone: str, after: datetime.datetime) -> Iterator[str]:
    """The first times within a year after `after` that a change of clocks skips, and repeats."""
    fields = values(cron)
    zone = zoneinfo.ZoneInfo(timezone)
    first_day = after.astimezone(zone).date()
    reported = set[str]()
    for number in range(366):
        day = first_day + datetime.timedelta(days=number)
        if not day_fits(fields, day) or not _clocks_change(day, zone):
            continue
        for hour, minute in _times(fields):
            local = datetime.datetime.combine(day, datetime.time(hour, minute), zone)
            if _moment(day, hour, minute, zone) is None:
                event = "is skipped"
            elif local.utcoffset() != local.replace(fold=1).utcoffset():
                event = "comes twice"
            else:
                continue
            if event not in reported:
                reported.add(event)
                yield f"{local:%Y-%m-%d %H:%M} {event}"


def _clocks_change(day: datetime.date, zone: zoneinfo.ZoneInfo) -> bool:
    """Whether clocks show another distance from UTC after this day than before it."""
    one_day = datetime.timedelta(days=1)
    noon = datetime.time(12)
    before = datetime.datetime.combine(day - one_day, noon, zone)
    after = datetime.datetime.combine(day + one_day, noon, zone)
    return before.utcoffset() != after.utcoffset()


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
    """The moment of a local time, the first of two; None where clocks skip it."""
    local = datetime.datetime.combine(day, datetime.time(hour, minute), zone)
    # what does not exist comes back from UTC as another time
    there_and_back = local.astimezone(datetime.UTC).astimezone(zone)
    if there_and_back.replace(tzinfo=None) != local.replace(tzinfo=None):
        return None
    return local


def _span(item: str, low: int, high: int, names: tuple[str, ...]) -> range:
    """The numbers that an item of a field names; ValueError says what is wrong with it."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"`{item}` is neither `*` nor a number, a range or a step")
    first, last, step = match.groups()
    begin = low
    end = high
    if first is not None:
        begin = _number(first, low, high, names)
        if last is not None:
            end = _number(last, low, high, names)
        elif step is None:  # as in crontab, `5/20` goes on to the end
            end = begin
    if begin > end:
        raise ValueError(f"`{item}` ends before it begins")
    if step is not None and not 1 <= int(step) <= high:
        raise ValueError(f"`{item}` has a step that leads nowhere")
    return range(begin, end + 1, int(step or 1))


def _number(word: str, low: int, high: int, names: tuple[str, ...]) -> int:
    """The number that a word stands for, by digits or by a name."""
    if word in names:
        return names.index(word) + low
    if not word.isdigit() or not low <= int(word) <= high:
        raise ValueError(f"{word} is not in {low}-{high}")
    return int(word)


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
        message = f"`{day}` and `{weekday}`: some crons want both to fit, some either"
        return message, "write the days out, such as `1,15`, or `*` for one of them"
    _, _, days, months, weekdays = values(" ".join(fields))
    if days is not None and weekdays is None:
        longest = max(_LONGEST_MONTHS[number - 1] for number in months or range(1, 13))
        if days[0] > longest:
            return f"day {day} of month {month} never comes", "name a day that the month has"
    return None
