"""Schedules of an account, by which EventBridge Scheduler starts SageMaker's pipelines.

Its cron has a year, counts days of the week from 1, and takes either a day of the month or one of
the week; so days are named, and a line that names both is refused. It starts a pipeline when it is
due, whatever runs, at least once; what AWS refuses it tries again for a day. Each config has a
pipeline of its own there, which no submission changes.

Authority: docs.aws.amazon.com/scheduler/latest/UserGuide/schedule-types.html, botocore's model."""

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from rekindle.errors import Problem, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms import submission
from rekindle.platforms.sagemaker.client import connected, upload, version_of
from rekindle.platforms.submission import Definition, Lowered, plain_name, unheeded
from rekindle.spec import cron
from rekindle.spec.platforms import SageMakerSpec
from rekindle.spec.schedule import ScheduleSpec

_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_GROUP = "rekindle"  # of schedules
_problem, _request = submission.problems_in(__file__), submission.requests_in(__file__)
_KEPT = (
    "Description",
    "ScheduleExpression",
    "ScheduleExpressionTimezone",
    "FlexibleTimeWindow",
    "Target",
)


def lowered(schedule: ScheduleSpec, place: SageMakerSpec) -> Lowered:
    """The schedule as AWS has it: `0 3 * * 1-5` is ``cron(0 3 ? * MON,TUE,WED,THU,FRI *)``.
    UnsupportedError for what the service has no words for."""
    if problems := list(_problems(schedule)):
        raise UnsupportedError(problems)
    minute, hour, day, month, weekday = cron.values(schedule.cron)
    days = "?" if weekday is not None else cron.listed(day)
    weekdays = "?" if weekday is None else ",".join(_DAYS[number] for number in weekday)
    times = f"{cron.listed(minute)} {cron.listed(hour)}"
    return Lowered(
        f"cron({times} {days} {cron.listed(month)} {weekdays} *)",
        schedule.timezone,
        "begins beside the run",
        "left out after a pause; one that AWS refuses is tried again for a day",
        "what is skipped is left out, what comes twice starts once",
    )


def set_(
    definition: Definition, place: SageMakerSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    there, pipeline = lowered(schedule, place), pipeline_of(name)
    with connected(place) as session:
        sagemaker, scheduler = session("sagemaker"), session("scheduler")
        upload(session("s3"), definition, place)
        version_of(sagemaker, pipeline, definition, place)
        arn = sagemaker.describe_pipeline(PipelineName=pipeline)["PipelineArn"]
        try:
            scheduler.get_schedule_group(Name=_GROUP)
        except scheduler.exceptions.ResourceNotFoundException:
            with contextlib.suppress(scheduler.exceptions.ConflictException):  # another made it
                scheduler.create_schedule_group(Name=_GROUP)
        body = _request(
            "schedule",
            name=schedule_id(name),
            group=_GROUP,
            arn=arn,
            description=f"{name}: {schedule.cron}",
            expression=there.expression,
            timezone=schedule.timezone,
            role=place.schedule_role_arn or place.role_arn,
        )
        try:
            scheduler.update_schedule(**body)
        except scheduler.exceptions.ResourceNotFoundException:
            with contextlib.suppress(scheduler.exceptions.ConflictException):  # another did
                scheduler.create_schedule(**body)
        return _schedule(scheduler, schedule_id(name))


def list_(place: SageMakerSpec) -> tuple[Schedule, ...]:
    with connected(place) as session:
        scheduler, found = session("scheduler"), list[str]()
        try:
            for listed in scheduler.get_paginator("list_schedules").paginate(GroupName=_GROUP):
                found += [one["Name"] for one in listed["Schedules"]]
        except scheduler.exceptions.ResourceNotFoundException:
            return ()  # no group yet
        return tuple(_schedule(scheduler, name) for name in sorted(found))


def pause(place: SageMakerSpec, name: str) -> Schedule:
    with connected(place) as session:
        scheduler, id = session("scheduler"), schedule_id(name)
        found = scheduler.get_schedule(Name=id, GroupName=_GROUP)
        same = {member: found[member] for member in _KEPT}
        scheduler.update_schedule(Name=id, GroupName=_GROUP, State="DISABLED", **same)
        return _schedule(scheduler, id)


def delete(place: SageMakerSpec, name: str) -> bool:
    """Whether there was one to take away. Its pipeline goes too, unless it has runs."""
    with connected(place) as session:
        scheduler, sagemaker, there = session("scheduler"), session("sagemaker"), True
        try:
            scheduler.delete_schedule(Name=schedule_id(name), GroupName=_GROUP)
        except scheduler.exceptions.ResourceNotFoundException:
            there = False
        pipeline, unused = pipeline_of(name), False
        with contextlib.suppress(sagemaker.exceptions.ResourceNotFound):
            listed = sagemaker.list_pipeline_executions(
                PipelineName=pipeline, SortBy="CreationTime", SortOrder="Descending", MaxResults=1
            )
            unused = not listed["PipelineExecutionSummaries"]
        if unused:
            with contextlib.suppress(sagemaker.exceptions.ResourceNotFound):  # another process did
                sagemaker.delete_pipeline(
                    PipelineName=pipeline, ClientRequestToken=uuid.uuid4().hex
                )
        return there


def schedule_id(name: str) -> str:
    """The schedule's name there of the config `name`; names that differ stay so."""
    return plain_name(name, r"[^0-9a-zA-Z_.-]", 64, distinct=True)


def pipeline_of(name: str) -> str:
    """The pipeline that the schedule of the config `name` starts; names that differ stay so."""
    return plain_name(name, r"[^0-9a-zA-Z]+", 209, distinct=True) + "-scheduled"


def _problems(schedule: ScheduleSpec) -> Iterator[Problem]:
    _, _, day, _, weekday = cron.values(schedule.cron)
    if day is not None and weekday is not None:
        yield _problem("days", cron=schedule.cron)
    what = "AWS starts a run when it is due, whether or not the run before it goes on"
    yield from unheeded(schedule, what, "AWS", "sagemaker")


def _schedule(scheduler: Any, id: str) -> Schedule:
    found = scheduler.get_schedule(Name=id, GroupName=_GROUP)
    line = str(found.get("Description", "")).rpartition(": ")[2]
    zone = found["ScheduleExpressionTimezone"]
    return Schedule(id, line or found["ScheduleExpression"], zone, found["State"] == "ENABLED")
