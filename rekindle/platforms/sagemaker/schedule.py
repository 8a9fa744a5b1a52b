"""Schedules of an account, by which EventBridge Scheduler starts SageMaker's pipelines.

Its cron has a year, counts days of the week from 1, and takes either a day of the month
or one of the week; so days are named, and a line that names both is refused. It starts a
pipeline when it is due, whatever runs, at least once; what AWS refuses it tries again for
a day. Each config has a pipeline of its own there, which no submission changes.

Authority: docs.aws.amazon.com/scheduler/latest/UserGuide/schedule-types.html, botocore's
model."""

import contextlib
import uuid
from collections.abc import Iterator

from rekindle.errors import Problem, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms.sagemaker.client import Client, connected, upload, version_of
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Definition, Lowered, plain_name, unheeded
from rekindle.spec import cron
from rekindle.spec.schedule import ScheduleSpec

_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_GROUP = "rekindle"  # of schedules
# what an update has to give again, since it replaces the whole schedule
_UPDATED_MEMBERS = (
    "Description",
    "ScheduleExpression",
    "ScheduleExpressionTimezone",
    "FlexibleTimeWindow",
    "Target",
)


def lowered(schedule: ScheduleSpec, place: SageMakerSpec) -> Lowered:
    """The schedule as AWS has it: `0 3 * * 1-5` is ``cron(0 3 ? * MON,TUE,WED,THU,FRI
    *)``. UnsupportedError for what the service has no words for."""
    problems = list(_problems(schedule))
    if problems:
        raise UnsupportedError(problems)
    minute, hour, day, month, weekday = cron.values(schedule.cron)
    # AWS wants `?` in the place of the one of the two that is not given
    if weekday is None:
        days = cron.listed(day)
        weekdays = "?"
    else:
        days = "?"
        weekdays = ",".join(_DAYS[number] for number in weekday)
    times = f"{cron.listed(minute)} {cron.listed(hour)}"
    return Lowered(
        expression=f"cron({times} {days} {cron.listed(month)} {weekdays} *)",
        timezone=schedule.timezone,
        overlap="begins beside the run",
        missed="left out after a pause; one that AWS refuses is tried again for a day",
        clocks="what is skipped is left out, what comes twice starts once",
    )


def set_schedule(
    definition: Definition, place: SageMakerSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    aws_schedule = lowered(schedule, place)
    pipeline = pipeline_of(name)
    with connected(place) as client_of:
        sagemaker = client_of("sagemaker")
        scheduler = client_of("scheduler")
        upload(client_of("s3"), definition, place)
        # a start runs the newest version of the schedule's own pipeline
        version_of(sagemaker, pipeline, definition, place)
        arn = sagemaker.describe_pipeline(PipelineName=pipeline)["PipelineArn"]
        try:
            scheduler.get_schedule_group(Name=_GROUP)
        except scheduler.exceptions.ResourceNotFoundException:
            # another process may create it meanwhile
            with contextlib.suppress(scheduler.exceptions.ConflictException):
                scheduler.create_schedule_group(Name=_GROUP)
        request = {
            "Name": schedule_id(name),
            "GroupName": _GROUP,
            "State": "ENABLED",
            "Description": f"{name}: {schedule.cron}",
            "ScheduleExpression": aws_schedule.expression,
            "ScheduleExpressionTimezone": schedule.timezone,
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "Target": {
                "Arn": arn,
                "RoleArn": place.schedule_role_arn or place.role_arn,
                "SageMakerPipelineParameters": {"PipelineParameterList": []},
            },
        }
        try:
            scheduler.update_schedule(**request)
        except scheduler.exceptions.ResourceNotFoundException:
            with contextlib.suppress(scheduler.exceptions.ConflictException):  # another did
                scheduler.create_schedule(**request)
        return _schedule(scheduler, schedule_id(name))


def list_schedules(place: SageMakerSpec) -> tuple[Schedule, ...]:
    with connected(place) as client_of:
        scheduler = client_of("scheduler")
        names: list[str] = []
        try:
            for listed in scheduler.get_paginator("list_schedules").paginate(GroupName=_GROUP):
                names += [schedule["Name"] for schedule in listed["Schedules"]]
        except scheduler.exceptions.ResourceNotFoundException:
            return ()  # no group yet
        return tuple(_schedule(scheduler, name) for name in sorted(names))


def pause_schedule(place: SageMakerSpec, name: str) -> Schedule:
    with connected(place) as client_of:
        scheduler = client_of("scheduler")
        id = schedule_id(name)
        schedule = scheduler.get_schedule(Name=id, GroupName=_GROUP)
        same = {member: schedule[member] for member in _UPDATED_MEMBERS}
        scheduler.update_schedule(Name=id, GroupName=_GROUP, State="DISABLED", **same)
        return _schedule(scheduler, id)


def delete_schedule(place: SageMakerSpec, name: str) -> bool:
    """Delete a schedule; whether there was one.
    Its pipeline goes too, unless it has runs."""
    with connected(place) as client_of:
        scheduler = client_of("scheduler")
        sagemaker = client_of("sagemaker")
        was_there = True
        try:
            scheduler.delete_schedule(Name=schedule_id(name), GroupName=_GROUP)
        except scheduler.exceptions.ResourceNotFoundException:
            was_there = False
        pipeline = pipeline_of(name)
        is_unused = False
        with contextlib.suppress(sagemaker.exceptions.ResourceNotFound):
            listed = sagemaker.list_pipeline_executions(
                PipelineName=pipeline,
                SortBy="CreationTime",
                SortOrder="Descending",
                MaxResults=1,
            )
            is_unused = not listed["PipelineExecutionSummaries"]
        if is_unused:
            with contextlib.suppress(sagemaker.exceptions.ResourceNotFound):  # another process did
                sagemaker.delete_pipeline(
                    PipelineName=pipeline, ClientRequestToken=uuid.uuid4().hex
                )
        return was_there


def schedule_id(name: str) -> str:
    """The schedule's name there of the config `name`; names that differ stay so."""
    return plain_name(name, r"[^0-9a-zA-Z_.-]", 64, distinct=True)


def pipeline_of(name: str) -> str:
    """The pipeline that the schedule of the config `name` starts;
    names that differ stay so."""
    return plain_name(name, r"[^0-9a-zA-Z]+", 209, distinct=True) + "-scheduled"


def _problems(schedule: ScheduleSpec) -> Iterator[Problem]:
    _, _, day, _, weekday = cron.values(schedule.cron)
    if day is not None and weekday is not None:
        yield Problem(
            f"`{schedule.cron}` names days of the month and of the week, and AWS takes either",
            "schedule.cron",
            "write `*` for one of them",
        )
    message = "AWS starts a run when it is due, whether or not the run before it goes on"
    yield from unheeded(schedule, message, "AWS", "sagemaker")


def _schedule(scheduler: Client, id: str) -> Schedule:
    schedule = scheduler.get_schedule(Name=id, GroupName=_GROUP)
    # the description ends in the line of the config, which AWS's own cron is only made from
    line = str(schedule.get("Description", "")).rpartition(": ")[2]
    return Schedule(
        id,
        line or schedule["ScheduleExpression"],
        schedule["ScheduleExpressionTimezone"],
        schedule["State"] == "ENABLED",
    )
