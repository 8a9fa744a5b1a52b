"""Vertex AI Pipelines in a project: PipelineJobs are submitted, looked at and cancelled, schedules
set and taken away, through the generated client of google-cloud-aiplatform, over REST; it is
imported when that is done.

A job's id is ours and follows from its definition and the submission's token: creating it twice is
refused by the service, and that is how it is found. A schedule's id is the service's; ours is its
display name, looked for before. Reads, and what may be said twice, are repeated after 429, 5xx and
broken connections for two minutes.

Authority: aiplatform_v1 of google-cloud-aiplatform 2.7, ../shared/facts/vertex.md. No project has
run it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rekindle.errors import (
    PlatformError,
    Problem,
    SpecError,
    UnreachableError,
    UnsupportedError,
)
from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Mark, Outline, Placed, Schedule, digest_of
from rekindle.platforms.vertex.labels import labels_of
from rekindle.platforms.vertex.outline import job_of, steps
from rekindle.spec.places import VertexSpec
from rekindle.spec.schedule import ScheduleSpec, values

if TYPE_CHECKING:
    from google.cloud import aiplatform_v1 as api

_SECTION = "platforms.vertex"
_PATIENCE_SECONDS, FIRST_PAUSE_SECONDS = 120.0, 1.0
_EXAMPLES = {
    "project": "my-project", "region": "europe-west4", "artifact_root": "gs://my-bucket/rekindle",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Project:
    """The clients of one project and region, and how each call is repeated."""

    parent: str
    pipelines: api.PipelineServiceClient
    schedules: api.ScheduleServiceClient
    retry: Any


def submit(definition: Definition, place: VertexSpec, mark: Mark) -> Placed:
    """The job, made now or by the same submission before; PlatformError if the project refuses it
    or does not answer, SpecError if `place` does not say which."""
    id = job_id(definition, mark.token)
    with connected(place) as project:
        from google.api_core.exceptions import Conflict
        from google.cloud import aiplatform_v1 as api

        name = f"{project.parent}/pipelineJobs/{id}"
        anew, marked = True, _job(api, definition)
        marked.labels.update(labels_of(mark))
        try:
            project.pipelines.create_pipeline_job(
                parent=project.parent, pipeline_job=marked, pipeline_job_id=id,
                retry=project.retry,
            )  # fmt: skip
        except Conflict:  # by the same submission, or by a call whose answer was lost
            anew = False
        return Placed(name, page(place, id), anew)


def schedule_set(
    definition: Definition, place: VertexSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    """The schedule of the config `name`, made or changed to this; one that pauses goes on."""
    with connected(place) as project:
        from google.cloud import aiplatform_v1 as api
        from google.protobuf import field_mask_pb2

        wanted = api.Schedule(
            display_name=name,
            cron=lowered(schedule),
            max_concurrent_run_count=1,
            create_pipeline_job_request=api.CreatePipelineJobRequest(
                parent=project.parent, pipeline_job=_job(api, definition)
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


def schedule_list(place: VertexSpec) -> tuple[Schedule, ...]:
    """Schedules that were set here, those that pause too, by name."""
    with connected(place) as project:
        return tuple(sorted(map(_shown, _ours(project)), key=lambda one: one.id))


def schedule_pause(place: VertexSpec, name: str) -> Schedule:
    """The schedule of the config `name`, which starts nothing until it is set again."""
    with connected(place) as project:
        found = _schedule_of(project, name)
        if found is None:
            raise PlatformError(
                f"there is no schedule `{name}`", where=where(place), fix="rekindle schedule list"
            )
        project.schedules.pause_schedule(name=found.name, retry=project.retry)
        return _shown(project.schedules.get_schedule(name=found.name, retry=project.retry))


def schedule_delete(place: VertexSpec, name: str) -> bool:
    """Whether there was one to take away."""
    with connected(place) as project:
        found = _schedule_of(project, name)
        if found is None:
            return False
        from google.api_core.exceptions import NotFound

        with contextlib.suppress(NotFound):  # somebody else took it away
            going: Any = project.schedules.delete_schedule(name=found.name, retry=project.retry)
            going.result(timeout=_PATIENCE_SECONDS)
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


def job_id(definition: Definition, token: str) -> str:
    """Id of the job of this submission."""
    plain = re.sub(r"[^a-z0-9-]", "-", str(job_of(definition)["displayName"]).lower()).strip("-")
    return f"{plain[:100] or 'run'}-{digest_of(definition.files, token)}"


def outline(definition: Definition, place: VertexSpec, token: str) -> Outline:
    """What `submit` with the same arguments will make; asks nobody."""
    return Outline(where(place), job_id(definition, token), steps(definition))


def lacks(place: VertexSpec) -> tuple[Problem, ...]:
    """What the config does not say about the project."""
    return tuple(
        Problem(f"Vertex AI needs `{name}`", at := f"{_SECTION}.{name}", f"set {at}: {value}")
        for name, value in _EXAMPLES.items()
        if not getattr(place, name)
    )


def where(place: VertexSpec) -> str:
    """The project and region, for people."""
    return f"project {place.project} in {place.region}"


def endpoint(place: VertexSpec) -> dict[str, str]:
    """Options of clients of the region."""
    return {"api_endpoint": f"{place.region}-aiplatform.googleapis.com"}


def page(place: VertexSpec, id: str) -> str:
    """Where to look in the console."""
    runs = "https://console.cloud.google.com/vertex-ai/pipelines"
    return f"{runs}/locations/{place.region}/runs/{id}?project={place.project}"


@contextlib.contextmanager
def connected(place: VertexSpec) -> Iterator[Project]:
    """The project's clients; what they raise becomes a PlatformError."""
    if problems := lacks(place):
        raise SpecError(problems)
    try:
        from google.api_core import exceptions, retry
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import aiplatform_v1 as api
    except ImportError as error:
        raise PlatformError(
            f"{error.name} is not installed here", where="vertex",
            fix="pip install google-cloud-aiplatform",
        ) from None  # fmt: skip
    from requests import RequestException

    at = endpoint(place)
    try:
        yield Project(
            f"projects/{place.project}/locations/{place.region}",
            api.PipelineServiceClient(transport="rest", client_options=at),
            api.ScheduleServiceClient(transport="rest", client_options=at),
            retry.Retry(
                predicate=_may_succeed, initial=FIRST_PAUSE_SECONDS, timeout=_PATIENCE_SECONDS
            ),
        )
    except (exceptions.GoogleAPIError, GoogleAuthError, RequestException) as error:
        raise _explained(error, place) from error


def _job(api: Any, definition: Definition) -> Any:
    return api.PipelineJob.from_json(json.dumps(job_of(definition)))


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
            if last or not _may_succeed(error):
                raise
            if found := _schedule_of(project, wanted.display_name):
                return found
            time.sleep(FIRST_PAUSE_SECONDS)
    raise AssertionError("the last attempt returns or raises")


def _may_succeed(error: Exception) -> bool:
    """Whether the same call may yet succeed, or did."""
    from google.api_core import exceptions
    from requests import ConnectionError, Timeout

    kinds = (exceptions.TooManyRequests, exceptions.ServerError, ConnectionError, Timeout)
    return isinstance(error, kinds)


def _schedule_of(project: Project, name: str) -> api.Schedule | None:
    """The oldest of that name: two who made it at once are settled on one."""
    found = [one for one in _ours(project) if one.display_name == name]
    return min(found, key=lambda one: one.create_time, default=None)


def _shown(found: api.Schedule) -> Schedule:
    zone, _, cron = str(found.cron).removeprefix("TZ=").partition(" ")
    return Schedule(found.display_name, cron, zone, found.state.name == "ACTIVE")


def _explained(error: Exception, place: VertexSpec) -> PlatformError:
    """What Google says, and what to do about it."""
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError, TransportError

    error = getattr(error, "cause", None) or error  # of a RetryError
    kind, unasked = PlatformError, isinstance(error, TransportError)
    if isinstance(error, GoogleAuthError | exceptions.Unauthorized) and not unasked:
        fix = "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"
    elif isinstance(error, exceptions.Forbidden):
        fix = "rekindle doctor CONFIG --platform vertex prints the roles that are needed"
    elif isinstance(error, exceptions.NotFound):
        fix = f"see whether {_SECTION} names the right project and region, and what is there"
    elif isinstance(error, exceptions.ClientError) and error.code != 429:
        fix = "this may be a mistake of rekindle's: the service refuses what was sent"
    else:
        kind, fix = UnreachableError, "say it again; what was done already is found"
    text = str(getattr(error, "message", "") or error).strip()
    said = text.splitlines()[0] if text else type(error).__name__
    return kind(said, where=where(place), fix=fix)
