"""A schedule as EventBridge Scheduler has it, which starts SageMaker's pipelines.

Pure. Its cron has a year, counts days of the week from 1, and takes either a day of the month or
one of the week; so every field is written out, days by their names, and a line that names both is
refused. Authority: docs.aws.amazon.com/scheduler/latest/UserGuide/schedule-types.html."""

from __future__ import annotations

import hashlib
import re

from rekindle.errors import UnsupportedError
from rekindle.spec.schedule import ScheduleSpec, values

_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


def schedule_id(name: str) -> str:
    """The schedule's name there of the config `name`; names that differ stay so."""
    plain = re.sub(r"[^0-9a-zA-Z_.-]", "-", name)
    if plain == name and len(name) <= 64:
        return name
    return f"{plain[:55]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def lowered(schedule: ScheduleSpec) -> str:
    """The expression: `0 3 * * 1-5` is ``cron(0 3 ? * MON,TUE,WED,THU,FRI *)``. UnsupportedError
    for a line that the service has no words for."""
    minute, hour, day, month, weekday = values(schedule.cron)
    if day is not None and weekday is not None:
        raise UnsupportedError(
            f"`{schedule.cron}` names days of the month and of the week, and AWS takes either",
            where="schedule.cron", fix="write `*` for one of them",
        )  # fmt: skip
    days = "?" if weekday is not None else _listed(day)
    weekdays = "?" if weekday is None else ",".join(_DAYS[number] for number in weekday)
    return f"cron({_listed(minute)} {_listed(hour)} {days} {_listed(month)} {weekdays} *)"


def _listed(numbers: tuple[int, ...] | None) -> str:
    return "*" if numbers is None else ",".join(map(str, numbers))
