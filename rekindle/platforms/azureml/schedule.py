"""A schedule as Azure ML has it: its name, its expression and its time zone.

Pure. Azure runs cron in a time zone of Windows' and ignores days of the month and months, so those
are refused. Authority: azure-ai-ml 1.35 (schemas), learn.microsoft.com/azure/machine-learning/
how-to-schedule-pipeline-job."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from rekindle.catalog.zones import azure_zone
from rekindle.errors import Problem, UnsupportedError
from rekindle.spec.schedule import ScheduleSpec


def schedule_id(name: str) -> str:
    """The schedule's name there of the config `name`; names that differ stay so."""
    plain = re.sub(r"[^a-z0-9_-]", "-", name)
    if plain == name:
        return name
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def lowered(schedule: ScheduleSpec) -> tuple[str, str]:
    """The expression and Azure's name of the time zone; UnsupportedError with everything that Azure
    would not heed."""
    zone = azure_zone(schedule.timezone)
    problems = list(_problems(schedule))
    if zone is None:
        problems.append(Problem(
            f"Azure ML has no name for the time zone `{schedule.timezone}`", "schedule.timezone",
            "name another one with the same clock, or UTC",
        ))  # fmt: skip
    if problems or zone is None:
        raise UnsupportedError(problems)
    return " ".join(schedule.cron.split()), zone


def _problems(schedule: ScheduleSpec) -> Iterator[Problem]:
    _, _, day, month, _ = schedule.cron.split()
    if (day, month) != ("*", "*"):
        yield Problem(
            f"Azure ML ignores days of the month and months, so that `{schedule.cron}` would run "
            "more often than it says", "schedule.cron",
            "write `*` for both, and name days of the week: 0 3 * * 1",
        )  # fmt: skip
