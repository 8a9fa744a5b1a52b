"""Schedules of a project on Vertex AI.

A schedule's id is the service's; ours is its display name, looked for before. Of several
of one name, left by whatever was cut off, the newest stays. `max_concurrent_run_count`
bounds the calls that start runs; the runs `max_concurrent_active_run_count` bounds. What
a field of a schedule holds cannot be taken out, so one that queues no longer is created
again.

Authority: aiplatform_v1 of google-cloud-aiplatform 2.7 (Schedule, ResumeScheduleRequest,
UpdateScheduleRequest). No project has run it."""

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from rekindle.errors import PlatformError, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms.submission import Definition, Lowered, newest, no_schedule
from rekindle.platforms.vertex.client import Project, connected, job, where
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.spec import cron
from rekindle.spec.schedule import ScheduleSpec

if TYPE_CHECKING:
    from google.cloud import aiplatform_v1 as api

_LONGEST_SECONDS = 120.0  # that a deletion may take
_MOST = 10  # runs at once, where they may be several
_CHANGED_FIELDS = (
    "cron",
    "max_concurrent_run_count",
    "max_concurrent_active_run_count",
    "allow_queueing",
    "create_pipeline_job_request",
)


def lowered(schedule: ScheduleSpec, place: VertexSpec) -> Lowered:
    """The schedule as Vertex AI has it: ``TZ=Europe/Berlin 0 3 * * 1``. UnsupportedError
    for a line that names days of the month and of the week, since which has to fit is not
    documented."""
    _, _, day, _, weekday = cron.values(schedule.cron)
    if day is not None and weekday is not None:
        raise UnsupportedError(
            f"`{schedule.cron}` names days of the month and of the week, "
            "and Vertex AI does not say whether both have to fit",
            where="schedule.cron",
            fix="write `*` for one of them",
        )
    overlaps = {
        "skip": "is left out",
        "queue": "waits until the run has ended, as many as there are",
        "parallel": f"begins beside the run, up to {_MOST} at once",
    }
    line = f"TZ={schedule.timezone} {cron.written(schedule.cron)}"
    missed = "made up for after a pause" if schedule.catch_up else "left out after a pause"
    return Lowered(line, schedule.timezone, overlaps[schedule.overlap or "skip"], missed)


def set_schedule(
    definition: Definition, place: VertexSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    """The schedule of the config `name`, created or changed to this;
    one that pauses goes on."""
    expression = lowered(schedule, place).expression
    queues = schedule.overlap == "queue"
    runs_at_once = _MOST if schedule.overlap == "parallel" else 1
    with connected(place) as project:
        from google.cloud import aiplatform_v1 as api

        request = api.CreatePipelineJobRequest(
            parent=project.parent, pipeline_job=job(api, definition)
        )
        desired = api.Schedule(
            display_name=name,
            cron=expression,
            max_concurrent_run_count=runs_at_once,
            max_concurrent_active_run_count=runs_at_once,
            allow_queueing=queues,
            create_pipeline_job_request=request,
        )
        existing = _newest(project, name)
        # what a field holds cannot be taken out of a schedule
        if existing is None or (existing.allow_queueing and not queues):
            return _created(project, desired, place)
        desired.name = existing.name
        return _updated(project, desired, catch_up=schedule.catch_up)


def _created(project: Project, desired: "api.Schedule", place: VertexSpec) -> Schedule:
    """Create a schedule; older ones of its name are deleted."""
    name = desired.display_name
    project.schedules.create_schedule(parent=project.parent, schedule=desired, **project.patience)
    # a second one, of a call whose answer was lost, goes at once
    created = _newest(project, name)
    if created is None:
        raise PlatformError(
            f"another process deleted the schedule `{name}` at this moment",
            where=where(place),
            fix="retry the command",
        )
    return _shown(created)


def _updated(project: Project, desired: "api.Schedule", catch_up: bool) -> Schedule:
    """Change a schedule to this; one that pauses goes on."""
    from google.cloud import aiplatform_v1 as api
    from google.protobuf import field_mask_pb2

    mask = field_mask_pb2.FieldMask(paths=list(_CHANGED_FIELDS))
    updated = project.schedules.update_schedule(
        schedule=desired, update_mask=mask, **project.patience
    )
    if updated.state == api.Schedule.State.PAUSED:
        resumption = api.ResumeScheduleRequest(name=updated.name, catch_up=catch_up)
        project.schedules.resume_schedule(request=resumption, **project.patience)
        updated = project.schedules.get_schedule(name=updated.name, **project.patience)
    return _shown(updated)


def list_schedules(place: VertexSpec) -> tuple[Schedule, ...]:
    """Schedules that were set here, by name; older ones of a name are deleted."""
    with connected(place) as project:
        remove = functools.partial(_delete, project)
        return tuple(map(_shown, newest(_own_schedules(project), remove)))


def pause_schedule(place: VertexSpec, name: str) -> Schedule:
    with connected(place) as project:
        existing = _newest(project, name)
        if existing is None:
            raise no_schedule(name, where(place))
        project.schedules.pause_schedule(name=existing.name, **project.patience)
        return _shown(project.schedules.get_schedule(name=existing.name, **project.patience))


def delete_schedule(place: VertexSpec, name: str) -> bool:
    with connected(place) as project:
        schedules = _own_schedules(project, name)
        for schedule in schedules:
            _delete(project, schedule)
        return bool(schedules)


def _own_schedules(project: Project, name: str = "") -> "list[api.Schedule]":
    """Schedules whose jobs carry our label, of a config or all, the oldest first."""
    schedules = []
    for schedule in project.schedules.list_schedules(parent=project.parent, **project.patience):
        labels = schedule.create_pipeline_job_request.pipeline_job.labels
        if name in ("", schedule.display_name) and labels.get("rekindle") == "true":
            schedules.append(schedule)
    return sorted(schedules, key=lambda schedule: (schedule.create_time, schedule.name))


def _newest(project: Project, name: str) -> "api.Schedule | None":
    """The newest schedule of that name, or None; older ones are deleted."""
    schedules = newest(_own_schedules(project, name), functools.partial(_delete, project))
    return schedules[0] if schedules else None


def _delete(project: Project, schedule: "api.Schedule") -> None:
    from google.api_core.exceptions import NotFound

    with contextlib.suppress(NotFound):  # another process deleted it
        deletion: Any = project.schedules.delete_schedule(name=schedule.name, **project.patience)
        deletion.result(timeout=_LONGEST_SECONDS)


def _shown(schedule: "api.Schedule") -> Schedule:
    zone, _, line = str(schedule.cron).removeprefix("TZ=").partition(" ")
    return Schedule(schedule.display_name, line, zone, schedule.state.name == "ACTIVE")
