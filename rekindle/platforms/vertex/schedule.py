"""Schedules of a project on Vertex AI.

A schedule's id is the service's; ours is its display name, looked for before. Of several of one
name, left by whatever was cut off, the newest stays. `max_concurrent_run_count` bounds the calls
that start runs; the runs `max_concurrent_active_run_count` bounds. What a field of a schedule holds
cannot be taken out, so one that queues no longer is created again.

Authority: aiplatform_v1 of google-cloud-aiplatform 2.7 (Schedule, ResumeScheduleRequest,
UpdateScheduleRequest). No project has run it."""

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from rekindle.errors import PlatformError, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms.submission import Definition, Lowered, newest, no_schedule, problems_in
from rekindle.platforms.vertex.client import Project, connected, job, where
from rekindle.spec import cron
from rekindle.spec.platforms import VertexSpec
from rekindle.spec.schedule import ScheduleSpec

if TYPE_CHECKING:
    from google.cloud import aiplatform_v1 as api

_LONGEST_SECONDS = 120.0  # that a deletion may take
_MOST = 10  # runs at once, where they may be several
_problem = problems_in(__file__)
_CHANGED = (
    "cron",
    "max_concurrent_run_count",
    "max_concurrent_active_run_count",
    "allow_queueing",
    "create_pipeline_job_request",
)


def lowered(schedule: ScheduleSpec, place: VertexSpec) -> Lowered:
    """The schedule as Vertex AI has it: ``TZ=Europe/Berlin 0 3 * * 1``. UnsupportedError for a line
    that names days of the month and of the week, since which has to fit is not documented."""
    _, _, day, _, weekday = cron.values(schedule.cron)
    if day is not None and weekday is not None:
        raise UnsupportedError([_problem("days", cron=schedule.cron)])
    overlaps = {
        "skip": "is left out",
        "queue": "waits until the run has ended, as many as there are",
        "parallel": f"begins beside the run, up to {_MOST} at once",
    }
    line = f"TZ={schedule.timezone} {cron.written(schedule.cron)}"
    missed = "made up for after a pause" if schedule.catch_up else "left out after a pause"
    return Lowered(line, schedule.timezone, overlaps[schedule.overlap or "skip"], missed)


def set_(definition: Definition, place: VertexSpec, schedule: ScheduleSpec, name: str) -> Schedule:
    """The schedule of the config `name`, made or changed to this; one that pauses goes on."""
    there, queues = lowered(schedule, place), schedule.overlap == "queue"
    at_once = _MOST if schedule.overlap == "parallel" else 1
    with connected(place) as project:
        from google.cloud import aiplatform_v1 as api
        from google.protobuf import field_mask_pb2

        started = api.CreatePipelineJobRequest(
            parent=project.parent, pipeline_job=job(api, definition)
        )
        wanted = api.Schedule(
            display_name=name,
            cron=there.expression,
            max_concurrent_run_count=at_once,
            max_concurrent_active_run_count=at_once,
            allow_queueing=queues,
            create_pipeline_job_request=started,
        )
        if (found := _settled(project, name)) is None or (found.allow_queueing and not queues):
            # a second one, of a call whose answer was lost, goes at once
            project.schedules.create_schedule(
                parent=project.parent, schedule=wanted, **project.patience
            )
            if (made := _settled(project, name)) is None:
                raise PlatformError([_problem("deleted", where=where(place), name=name)])
            return _shown(made)
        wanted.name = found.name
        mask = field_mask_pb2.FieldMask(paths=list(_CHANGED))
        made = project.schedules.update_schedule(
            schedule=wanted, update_mask=mask, **project.patience
        )
        if made.state == api.Schedule.State.PAUSED:
            again = api.ResumeScheduleRequest(name=made.name, catch_up=schedule.catch_up)
            project.schedules.resume_schedule(request=again, **project.patience)
            made = project.schedules.get_schedule(name=made.name, **project.patience)
        return _shown(made)


def list_(place: VertexSpec) -> tuple[Schedule, ...]:
    """Schedules that were set here, by name; older ones of a name are taken away."""
    with connected(place) as project:
        return tuple(map(_shown, newest(_ours(project), functools.partial(_deleted, project))))


def pause(place: VertexSpec, name: str) -> Schedule:
    with connected(place) as project:
        if (found := _settled(project, name)) is None:
            raise no_schedule(name, where(place))
        project.schedules.pause_schedule(name=found.name, **project.patience)
        return _shown(project.schedules.get_schedule(name=found.name, **project.patience))


def delete(place: VertexSpec, name: str) -> bool:
    with connected(place) as project:
        found = _ours(project, name)
        for one in found:
            _deleted(project, one)
        return bool(found)


def _ours(project: Project, name: str = "") -> "list[api.Schedule]":
    """Schedules whose jobs carry our label, of a config or all, the oldest first."""
    found = project.schedules.list_schedules(parent=project.parent, **project.patience)
    named = (one for one in found if name in ("", one.display_name))
    labels = [(one, one.create_pipeline_job_request.pipeline_job.labels) for one in named]
    ours = [one for one, own in labels if own.get("rekindle") == "true"]
    return sorted(ours, key=lambda one: (one.create_time, one.name))


def _settled(project: Project, name: str) -> "api.Schedule | None":
    """The newest of that name, or None."""
    found = newest(_ours(project, name), functools.partial(_deleted, project))
    return found[0] if found else None


def _deleted(project: Project, one: "api.Schedule") -> None:
    from google.api_core.exceptions import NotFound

    with contextlib.suppress(NotFound):  # another process took it away
        going: Any = project.schedules.delete_schedule(name=one.name, **project.patience)
        going.result(timeout=_LONGEST_SECONDS)


def _shown(found: "api.Schedule") -> Schedule:
    zone, _, line = str(found.cron).removeprefix("TZ=").partition(" ")
    return Schedule(found.display_name, line, zone, found.state.name == "ACTIVE")
