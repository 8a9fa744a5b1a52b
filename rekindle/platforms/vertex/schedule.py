"""Schedules of a project on Vertex AI: how one is written there, and how it is set, listed, paused
and taken away.

A schedule's id is the service's; ours is its display name, looked for before.

Authority: aiplatform_v1 of google-cloud-aiplatform 2.7. No project has run it."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from rekindle.errors import PlatformError, UnsupportedError
from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Schedule
from rekindle.platforms.vertex import client
from rekindle.platforms.vertex.client import Project, connected, job, may_succeed, where
from rekindle.spec.places import VertexSpec
from rekindle.spec.schedule import ScheduleSpec, values

if TYPE_CHECKING:
    from google.cloud import aiplatform_v1 as api

_LONGEST_SECONDS = 120.0  # that a deletion may take


def set_(definition: Definition, place: VertexSpec, schedule: ScheduleSpec, name: str) -> Schedule:
    """The schedule of the config `name`, made or changed to this; one that pauses goes on."""
    with connected(place) as project:
        from google.cloud import aiplatform_v1 as api
        from google.protobuf import field_mask_pb2

        wanted = api.Schedule(
            display_name=name,
            cron=lowered(schedule),
            max_concurrent_run_count=1,
            create_pipeline_job_request=api.CreatePipelineJobRequest(
                parent=project.parent, pipeline_job=job(api, definition)
            ),
        )
        found = _schedule_of(project, name)
        if found is None:
            return _shown(_created(project, wanted))
        wanted.name = found.name
        mask = field_mask_pb2.FieldMask(
            paths=["cron", "max_concurrent_run_count", "create_pipeline_job_request"]
        )
        made = project.schedules.update_schedule(
            schedule=wanted, update_mask=mask, retry=project.retry
        )
        if made.state == api.Schedule.State.PAUSED:
            project.schedules.resume_schedule(name=made.name, retry=project.retry)
            made = project.schedules.get_schedule(name=made.name, retry=project.retry)
        return _shown(made)


def list_(place: VertexSpec) -> tuple[Schedule, ...]:
    """Schedules that were set here, those that pause too, by name."""
    with connected(place) as project:
        return tuple(sorted(map(_shown, _ours(project)), key=lambda one: one.id))


def pause(place: VertexSpec, name: str) -> Schedule:
    """The schedule of the config `name`, which starts nothing until it is set again."""
    with connected(place) as project:
        found = _schedule_of(project, name)
        if found is None:
            raise PlatformError(
                f"there is no schedule `{name}`", where=where(place), fix="rekindle schedule list"
            )
        project.schedules.pause_schedule(name=found.name, retry=project.retry)
        return _shown(project.schedules.get_schedule(name=found.name, retry=project.retry))


def delete(place: VertexSpec, name: str) -> bool:
    """Whether there was one to take away."""
    with connected(place) as project:
        found = _schedule_of(project, name)
        if found is None:
            return False
        from google.api_core.exceptions import NotFound

        with contextlib.suppress(NotFound):  # somebody else took it away
            going: Any = project.schedules.delete_schedule(name=found.name, retry=project.retry)
            going.result(timeout=_LONGEST_SECONDS)
        return True


def lowered(schedule: ScheduleSpec) -> str:
    """The expression: `TZ=Europe/Berlin 0 3 * * 1`. UnsupportedError for a line that names days of
    the month and of the week, since whether both have to fit is not documented."""
    _, _, day, _, weekday = values(schedule.cron)
    if day is not None and weekday is not None:
        raise UnsupportedError(
            f"`{schedule.cron}` names days of the month and of the week",
            where="schedule.cron", fix="write `*` for one of them",
        )  # fmt: skip
    return f"TZ={schedule.timezone} {' '.join(schedule.cron.split())}"


def _ours(project: Project) -> list[api.Schedule]:
    """Schedules whose jobs carry our label."""
    found = project.schedules.list_schedules(parent=project.parent, retry=project.retry)
    return [
        one
        for one in found
        if one.create_pipeline_job_request.pipeline_job.labels.get("rekindle") == "true"
    ]


def _created(project: Project, wanted: api.Schedule) -> api.Schedule:
    """The schedule, made once: whether a call that failed took effect is looked for."""
    from google.api_core.exceptions import GoogleAPIError
    from requests import RequestException

    for last in (False, False, True):
        try:
            return project.schedules.create_schedule(parent=project.parent, schedule=wanted)
        except (GoogleAPIError, RequestException) as error:
            if last or not may_succeed(error):
                raise
            if found := _schedule_of(project, wanted.display_name):
                return found
            time.sleep(client.FIRST_PAUSE_SECONDS)
    raise AssertionError("the last attempt returns or raises")


def _schedule_of(project: Project, name: str) -> api.Schedule | None:
    """The oldest of that name: two who made it at once are settled on one."""
    found = [one for one in _ours(project) if one.display_name == name]
    return min(found, key=lambda one: one.create_time, default=None)


def _shown(found: api.Schedule) -> Schedule:
    zone, _, cron = str(found.cron).removeprefix("TZ=").partition(" ")
    return Schedule(found.display_name, cron, zone, found.state.name == "ACTIVE")
