"""Schedules of a workspace of Azure ML.

Azure runs cron in a time zone of Windows' and ignores days of the month and months, so those are
refused. It submits a job when one is due, whatever runs; of starts that it missed it says nothing.
A schedule holds its job whole: changed, it starts the new one.

Authority: azure-ai-ml 1.35 (schemas),
learn.microsoft.com/azure/machine-learning/how-to-schedule-pipeline-job."""

from collections.abc import Iterator
from typing import Any

from rekindle.catalog.tables import azure_zone
from rekindle.errors import Problem, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms import submission
from rekindle.platforms.azureml.client import connected, find, where
from rekindle.platforms.submission import Definition, Lowered, no_schedule, plain_name, unheeded
from rekindle.spec import cron
from rekindle.spec.platforms import AzureMLSpec
from rekindle.spec.schedule import ScheduleSpec

_LONGEST_SECONDS = 600  # that a schedule may take until it is there
_problem = submission.problems_in(__file__)


def lowered(schedule: ScheduleSpec, place: AzureMLSpec) -> Lowered:
    """The schedule with Azure's name of the zone; UnsupportedError with all that it ignores."""
    zone, problems = azure_zone(schedule.timezone), list(_problems(schedule))
    if zone is None:
        problems.append(_problem("zone", schedule=schedule))
    if problems or zone is None:
        raise UnsupportedError(problems)
    line = cron.written(schedule.cron)
    return Lowered(line, zone, "begins beside the run", "left out after a pause")


def set_(definition: Definition, place: AzureMLSpec, schedule: ScheduleSpec, name: str) -> Schedule:
    there = lowered(schedule, place)
    with connected(place) as client, definition.written() as file:
        from azure.ai.ml import load_job
        from azure.ai.ml.entities import CronTrigger, JobSchedule

        trigger = CronTrigger(expression=there.expression, time_zone=there.timezone)
        wanted = JobSchedule(
            name=schedule_id(name),
            display_name=name,
            tags={"rekindle": "true", **place.tags},
            trigger=trigger,
            create_job=load_job(str(file)),
        )
        made = client.schedules.begin_create_or_update(wanted)
        return _schedule(made.result(timeout=_LONGEST_SECONDS))


def list_(place: AzureMLSpec) -> tuple[Schedule, ...]:
    with connected(place) as client:
        from azure.ai.ml.constants import ListViewType

        found = list(client.schedules.list(list_view_type=ListViewType.ALL))
    ours = [one for one in found if (one.tags or {}).get("rekindle") == "true"]
    return tuple(sorted(map(_schedule, ours), key=lambda one: one.id))


def pause(place: AzureMLSpec, name: str) -> Schedule:
    with connected(place) as client:
        if find(client.schedules, schedule_id(name)) is None:
            raise no_schedule(name, where(place))
        paused = client.schedules.begin_disable(schedule_id(name))
        return _schedule(paused.result(timeout=_LONGEST_SECONDS))


def delete(place: AzureMLSpec, name: str) -> bool:
    """Whether there was one to take away. Azure deletes only those that pause."""
    with connected(place) as client:
        if (found := find(client.schedules, schedule_id(name))) is None:
            return False
        if found._is_enabled:
            client.schedules.begin_disable(found.name).result(timeout=_LONGEST_SECONDS)
        client.schedules.begin_delete(found.name).result(timeout=_LONGEST_SECONDS)
        return True


def schedule_id(name: str) -> str:
    """The schedule's name there of the config `name`; names that differ stay so."""
    return plain_name(name, r"[^a-z0-9_-]", 100, distinct=True)


def _problems(schedule: ScheduleSpec) -> Iterator[Problem]:
    _, _, day, month, _ = cron.values(schedule.cron)
    if (day, month) != (None, None):
        yield _problem("days", schedule=schedule)
    what = "Azure ML submits a job when it is due, whether or not the one before it goes on"
    yield from unheeded(schedule, what, "Azure ML", "azureml")


def _schedule(found: Any) -> Schedule:
    trigger = found.trigger
    zone = str(getattr(trigger.time_zone, "value", trigger.time_zone))
    return Schedule(found.name, trigger.expression, zone, bool(found._is_enabled))
