"""Schedules of an account, by which EventBridge Scheduler starts SageMaker's pipelines: how one is
written there, and how it is set, listed, paused and taken away.

Its cron has a year, counts days of the week from 1, and takes either a day of the month or one of
the week; so every field is written out, days by their names, and a line that names both is refused.
Authority: docs.aws.amazon.com/scheduler/latest/UserGuide/schedule-types.html, botocore's model."""

from __future__ import annotations

import contextlib
import hashlib
import re
from typing import Any

from rekindle.errors import UnsupportedError
from rekindle.platforms.definition import Definition
from rekindle.platforms.sagemaker.client import connected, pipeline_name, upload, version_of
from rekindle.platforms.submission import Schedule
from rekindle.spec.places import SageMakerSpec
from rekindle.spec.schedule import ScheduleSpec, values

_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_GROUP = "rekindle"  # of schedules
_KEPT = (
    "Description", "ScheduleExpression", "ScheduleExpressionTimezone", "FlexibleTimeWindow",
    "Target",
)  # fmt: skip


def set_(
    definition: Definition, place: SageMakerSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    """The schedule of the config `name`, made or changed to this; UnsupportedError for what AWS has
    no words for. It starts a pipeline of its own, which no submission changes."""
    expression = lowered(schedule)
    pipeline = f"{pipeline_name(definition)[:200].rstrip('-')}-scheduled"
    with connected(place) as session:
        sagemaker, scheduler = session("sagemaker"), session("scheduler")
        upload(session("s3"), definition, place)
        version_of(sagemaker, pipeline, definition, place)
        arn = sagemaker.describe_pipeline(PipelineName=pipeline)["PipelineArn"]
        _group_is_there(scheduler)
        body = {
            "Name": schedule_id(name), "GroupName": _GROUP, "State": "ENABLED",
            "Description": f"{name}: {schedule.cron}", "ScheduleExpression": expression,
            "ScheduleExpressionTimezone": schedule.timezone, "FlexibleTimeWindow": {"Mode": "OFF"},
            "Target": {
                "Arn": arn, "RoleArn": place.schedule_role_arn or place.role_arn,
                "SageMakerPipelineParameters": {"PipelineParameterList": []},
            },
        }  # fmt: skip
        try:
            scheduler.update_schedule(**body)
        except scheduler.exceptions.ResourceNotFoundException:
            with contextlib.suppress(scheduler.exceptions.ConflictException):  # or somebody did
                scheduler.create_schedule(**body)
        return _schedule(scheduler, schedule_id(name))


def list_(place: SageMakerSpec) -> tuple[Schedule, ...]:
    """Schedules that were set here, those that pause too, by name."""
    with connected(place) as session:
        scheduler, found = session("scheduler"), list[str]()
        try:
            for listed in scheduler.get_paginator("list_schedules").paginate(GroupName=_GROUP):
                found += [one["Name"] for one in listed["Schedules"]]
        except scheduler.exceptions.ResourceNotFoundException:
            return ()  # no group yet
        return tuple(_schedule(scheduler, name) for name in sorted(found))


def pause(place: SageMakerSpec, name: str) -> Schedule:
    """The schedule of the config `name`, which starts nothing until it is set again."""
    with connected(place) as session:
        scheduler, id = session("scheduler"), schedule_id(name)
        found = scheduler.get_schedule(Name=id, GroupName=_GROUP)
        same = {member: found[member] for member in _KEPT}
        scheduler.update_schedule(Name=id, GroupName=_GROUP, State="DISABLED", **same)
        return _schedule(scheduler, id)


def delete(place: SageMakerSpec, name: str) -> bool:
    """Whether there was one to take away. Its pipeline stays, with the runs that it started."""
    with connected(place) as session:
        scheduler = session("scheduler")
        try:
            scheduler.delete_schedule(Name=schedule_id(name), GroupName=_GROUP)
        except scheduler.exceptions.ResourceNotFoundException:
            return False
        return True


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


def _group_is_there(scheduler: Any) -> None:
    try:
        scheduler.get_schedule_group(Name=_GROUP)
    except scheduler.exceptions.ResourceNotFoundException:
        with contextlib.suppress(scheduler.exceptions.ConflictException):  # or somebody made it
            scheduler.create_schedule_group(Name=_GROUP)


def _schedule(scheduler: Any, id: str) -> Schedule:
    found = scheduler.get_schedule(Name=id, GroupName=_GROUP)
    cron = str(found.get("Description", "")).rpartition(": ")[2]
    zone = found["ScheduleExpressionTimezone"]
    return Schedule(id, cron or found["ScheduleExpression"], zone, found["State"] == "ENABLED")
