"""When a platform starts the pipeline by itself: five fields of cron in a time zone.

Of cron, what every platform reads alike: `*`, numbers, names of months and days, ranges, steps and
lists; Sunday is 0. Authority: crontab(5); zones are IANA's, as zoneinfo finds them."""

from __future__ import annotations

import difflib
import re
import zoneinfo
from collections.abc import Iterator

from pydantic import Field

from rekindle.spec.places import Section

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 6, _DAYS),
)
_ITEM = re.compile(r"(?:\*|([a-z]+|\d{1,2})(?:-([a-z]+|\d{1,2}))?)(?:/(\d{1,2}))?")
_EXAMPLE = "such as `0 3 * * 1`: Mondays at three"


class ScheduleSpec(Section):
    """When a platform starts the pipeline by itself, once `rekindle schedule set` told it to."""

    cron: str = Field(min_length=9, max_length=200)
    """Minute, hour, day of the month, month, day of the week, such as `0 3 * * 1`; Sunday is 0."""
    timezone: str = Field("UTC", min_length=1, max_length=64)
    """Time zone of `cron`, such as `Europe/Berlin`; its clocks are followed in summer, too."""


def findings(schedule: ScheduleSpec) -> Iterator[tuple[str, str, str]]:
    """What is wrong with it: field, what, fix."""
    if what := cron_problem(schedule.cron):
        yield "cron", what, f"write five fields, {_EXAMPLE}"
    known = {"UTC", *zoneinfo.available_timezones()}
    if schedule.timezone not in known:
        near = difflib.get_close_matches(schedule.timezone, known, n=1)
        fix = f"did you mean `{near[0]}`?" if near else "name one of IANA's, such as Europe/Berlin"
        yield "timezone", f"there is no time zone `{schedule.timezone}`", fix


def cron_problem(text: str) -> str:
    """Why `text` is no five fields of cron, or "". `cron_problem("61 * * * *")` is ``minute: 61 is
    not in 0-59``."""
    fields = text.split()
    if len(fields) != len(_FIELDS):
        return f"`{text}` has {len(fields)} fields, not five"
    for field, (name, low, high, names) in zip(fields, _FIELDS, strict=True):
        for item in field.split(","):
            if what := _item_problem(item.lower(), low, high, names):
                return f"{name}: {what}"
    return ""


def values(cron: str) -> tuple[tuple[int, ...] | None, ...]:
    """The numbers that each of the five fields names, in order; None for `*`. `0 */12 * * mon` is
    ``((0,), (0, 12), None, None, (1,))``."""
    return tuple(
        None if field == "*" else _numbers(field, low, high, names)
        for field, (_, low, high, names) in zip(cron.lower().split(), _FIELDS, strict=True)
    )


def _numbers(field: str, low: int, high: int, names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted({n for item in field.split(",") for n in _named(item, low, high, names)}))


def _named(item: str, low: int, high: int, names: tuple[str, ...]) -> range:
    match = _ITEM.fullmatch(item)
    assert match is not None, item
    first, last, step = match.groups()
    begin = _number(first, low, names) if first else low
    # as in crontab, `5/20` goes on to the end
    end = _number(last, low, names) if last else high if step or not first else begin
    return range(begin, end + 1, int(step or 1))


def _number(word: str, low: int, names: tuple[str, ...]) -> int:
    return int(word) if word.isdigit() else names.index(word) + low


def _item_problem(item: str, low: int, high: int, names: tuple[str, ...]) -> str:
    match = _ITEM.fullmatch(item)
    if match is None:
        return f"`{item}` is neither `*` nor a number, a range or a step"
    ends = []
    for word in filter(None, match.groups()[:2]):
        number = int(word) if word.isdigit() else names.index(word) + low if word in names else -1
        if not low <= number <= high:
            return f"{word} is not in {low}-{high}"
        ends.append(number)
    if len(ends) == 2 and ends[0] > ends[1]:
        return f"`{item}` ends before it begins"
    if match[3] is not None and not 1 <= int(match[3]) <= high:
        return f"`{item}` has a step that leads nowhere"
    return ""
