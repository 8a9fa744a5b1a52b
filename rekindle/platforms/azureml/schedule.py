"""Schedules of a workspace of Azure ML.

Azure runs cron in a time zone of Windows' and ignores days of the month and months, so
those are refused. It submits a job when one is due, whatever runs; of starts that it
missed it says nothing. A schedule holds its job whole: changed, it starts the new one.

Authority: azure-ai-ml 1.35 (schemas),
learn.microsoft.com/azure/machine-learning/how-to-schedule-pipeline-job."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.errors import Problem, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms.azureml.client import connected, find, where
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.submission import (
    Definition,
    Lowered,
    no_schedule,
    plain_name,
    unheeded,
)
from rekindle.spec import cron
from rekindle.spec.schedule import ScheduleSpec
from rekindle.tables import rows

_LONGEST_SECONDS = 600  # that a schedule may take until it is there


def azure_zone(zone: str) -> str | None:
    """Azure's name of IANA's `zone`, or None:
    `Europe/Berlin` is `W. Europe Standard Time`."""
    table = rows(Path(__file__).with_name("zones.yaml"))
    for azure_name, iana_names in table["zones"].items():
        if zone in iana_names.split():
            return str(azure_name)
    return None


def lowered(schedule: ScheduleSpec, place: AzureMLSpec) -> Lowered:
    """The schedule with Azure's name of the zone;
    UnsupportedError with all that it ignores."""
    zone = azure_zone(schedule.timezone)
    problems = list(_problems(schedule))
    if zone is None:
        problem = Problem(
            f"Azure ML has no name for the time zone `{schedule.timezone}`",
            "schedule.timezone",
            "name another one with the same clock, or UTC",
        )
        problems.append(problem)
    if problems or zone is None:
        raise UnsupportedError(problems)
    line = cron.written(schedule.cron)
    return Lowered(line, zone, "begins beside the run", "left out after a pause")


def set_schedule(
    definition: Definition, place: AzureMLSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    azure_schedule = lowered(schedule, place)
    with connected(place) as client, definition.written() as file:
        from azure.ai.ml import load_job
        from azure.ai.ml.entities import CronTrigger, JobSchedule

        trigger = CronTrigger(
            expression=azure_schedule.expression, time_zone=azure_schedule.timezone
        )
        job_schedule = JobSchedule(
            name=schedule_id(name),
            display_name=name,
            tags={"rekindle": "true", **place.tags},
            trigger=trigger,
            create_job=load_job(str(file)),
        )
        creation = client.schedules.begin_create_or_update(job_schedule)
        return _schedule(creation.result(timeout=_LONGEST_SECONDS))


def list_schedules(place: AzureMLSpec) -> tuple[Schedule, ...]:
    with connected(place) as client:
        from azure.ai.ml.constants import ListViewType

        listed = list(client.schedules.list(list_view_type=ListViewType.ALL))
    own_schedules = [s for s in listed if (s.tags or {}).get("rekindle") == "true"]
    schedules = map(_schedule, own_schedules)
    return tuple(sorted(schedules, key=lambda schedule: schedule.id))


def pause_schedule(place: AzureMLSpec, name: str) -> Schedule:
    with connected(place) as client:
        if find(client.schedules, schedule_id(name)) is None:
            raise no_schedule(name, where(place))
        disabling = client.schedules.begin_disable(schedule_id(name))
        return _schedule(disabling.result(timeout=_LONGEST_SECONDS))


def delete_schedule(place: AzureMLSpec, name: str) -> bool:
    """Delete a schedule; whether there was one."""
    with connected(place) as client:
        job_schedule = find(client.schedules, schedule_id(name))
        if job_schedule is None:
            return False
        if job_schedule._is_enabled:  # Azure deletes only those that pause
            client.schedules.begin_disable(job_schedule.name).result(timeout=_LONGEST_SECONDS)
        client.schedules.begin_delete(job_schedule.name).result(timeout=_LONGEST_SECONDS)
        return True


def schedule_id(name: str) -> str:
    """The schedule's name there of the config `name`; names that differ stay so."""
    return plain_name(name, r"[^a-z0-9_-]", 100, distinct=True)


def _problems(schedule: ScheduleSpec) -> Iterator[Problem]:
    _, _, day, month, _ = cron.values(schedule.cron)
    if day is not None or month is not None:
        yield Problem(
            "Azure ML ignores days of the month and months, so that "
            f"`{schedule.cron}` would run more often than it says",
            "schedule.cron",
            "write `*` for both, and name days of the week: 0 3 * * 1",
        )
    message = "Azure ML submits a job when it is due, whether or not the one before it goes on"
    yield from unheeded(schedule, message, "Azure ML", "azureml")


def _schedule(job_schedule: Any) -> Schedule:
    trigger = job_schedule.trigger
    zone = str(getattr(trigger.time_zone, "value", trigger.time_zone))
    is_enabled = bool(job_schedule._is_enabled)
    return Schedule(job_schedule.name, trigger.expression, zone, is_enabled)
