"""A PipelineJob of Vertex AI: its steps, what they print and leave, stopping it, and
trying again what failed.

Steps are the tasks that run containers, by the names that the outline has for them; turns
of a loop are `LOOP/TURN/STEP`. A step is a CustomJob, whose log is asked of Cloud
Logging. That of a step on several machines is the launcher's, who says which job it made:
that job's is shown with it, by node. Vertex AI tries nothing again in place, so to resume
is a new job of the same definition: what succeeded comes from the cache, training goes on
from its checkpoints.

Authority: PipelineTaskDetail of aiplatform_v1;
cloud.google.com/logging/docs/reference/v2/rest/v2/ entries/list;
cloud.google.com/storage/docs/json_api/v1/objects/get. No project has been asked: what the
service calls the turns of a loop is a guess."""

import collections
import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from rekindle.ir.edit.rewrite import launched
from rekindle.platforms.logs import LogPiece
from rekindle.platforms.snapshot import RunSnapshot, moment, step_times
from rekindle.platforms.submission import (
    Definition,
    RunTag,
    SubmittedRun,
    check_resumable,
)
from rekindle.platforms.vertex import client
from rekindle.platforms.vertex.client import Project, connected
from rekindle.platforms.vertex.compile import LAUNCHER
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.protojson import Json
from rekindle.records import ArtifactRecord, RunStatus, StepRecord, StepStatus

if TYPE_CHECKING:
    from requests import Response

# without their `PIPELINE_STATE_`
_RUN_STATES: Mapping[str, RunStatus] = {
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
}
_STEP_STATES: Mapping[str, StepStatus] = {
    "STATE_UNSPECIFIED": "pending",
    "PENDING": "pending",
    "SUCCEEDED": "succeeded",
    "SKIPPED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "NOT_TRIGGERED": "skipped",
}
_REASONS = {
    "SKIPPED": "taken from the cache",
    "NOT_TRIGGERED": "its condition does not hold",
}
_LATE = datetime.timedelta(seconds=30)  # lines of several machines arrive in no order
_CREATED_JOB = re.compile(r"attempt \d+ is (\d+)")  # launcher.py says so of a job


def describe(place: VertexSpec, id: str) -> RunSnapshot:
    with connected(place) as project:
        job = _job(project, id)
        now = datetime.datetime.now(datetime.UTC)
        status = _RUN_STATES.get(_state(job), "running")
        payloads = launched(job["pipelineSpec"], LAUNCHER)  # of distributed steps
        job_names = [payload["job"]["displayName"] for payload in payloads.values()]
        attempts = _attempts(project, job, job_names, now)
        steps = []
        for name, task in _tasks(job).items():
            step = _step_record(name, task, now)
            steps.append(_with_attempts(step, payloads.get(name), attempts))
        # that some tasks failed is not news where one says why
        error = _error_of(job)
        if any(step.status == "failed" for step in steps):
            error = ""
        ended = moment(job, "endTime") if status != "running" else None
        return RunSnapshot(status, tuple(steps), error, ended)


def read_log(place: VertexSpec, id: str, step: StepRecord, cursor: str) -> LogPiece:
    """The lines since, those of a distributed step's nodes beginning with their rank."""
    if not step.log:
        return LogPiece("", cursor)
    position = json.loads(cursor or "{}")
    since = position.get("since", step.started_at)
    shown = set(position.get("told", ()))  # entries that may come again
    step_job = step.log.rpartition("/")[2]
    node_jobs = list(position.get("made", ()))
    with connected(place) as project:
        entries = list(_entries(project, place, [step_job, *node_jobs], since))
        new_entries = [entry for entry in entries if _key(entry) not in shown]
        step_entries = [entry for entry in new_entries if _job_of(entry) == step_job]
        text = "\n".join(text_of(entry) for entry in step_entries)
        # the launcher says in its own log which jobs it made
        new_jobs = sorted(set(_CREATED_JOB.findall(text)) - {step_job, *node_jobs})
        if new_jobs:
            of_new_jobs = list(_entries(project, place, new_jobs, step.started_at))
            entries += of_new_jobs
            new_entries += of_new_jobs
            node_jobs += new_jobs
    if not new_entries:
        return LogPiece("", cursor)
    # the next call asks for the last seconds again, and leaves out what is shown
    next_since = max(map(_time_of, entries)) - _LATE
    may_come_again = [_key(entry) for entry in entries if _time_of(entry) >= next_since]
    next_position = {
        "since": next_since.isoformat(),
        "told": may_come_again,
        "made": node_jobs,
    }
    lines: list[str] = []
    for entry in sorted(new_entries, key=_time_of):
        lines += _lines(entry, step_job)
    return LogPiece("".join(f"{line}\n" for line in lines), json.dumps(next_position))


def cancel(place: VertexSpec, id: str) -> None:
    with connected(place) as project:
        if _is_ending(project, id):
            return
        from google.api_core.exceptions import ClientError

        try:
            project.pipelines.cancel_pipeline_job(name=id, **project.patience)
        except ClientError:  # it may have ended meanwhile
            if not _is_ending(project, id):
                raise


def resume(definition: Definition, place: VertexSpec, id: str, mark: RunTag) -> SubmittedRun:
    """A new job of the same definition, made once for one mark."""
    with connected(place) as project:
        state = _state(_job(project, id))
    status = _RUN_STATES.get(state)
    check_resumable(status, f"the job is {state.lower()}", client.where(place))
    return client.submit(definition, place, mark)


def artifacts(place: VertexSpec, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
    """What the step's task made, with its metadata, at `gs://`."""
    with connected(place) as project:
        task = _tasks(_job(project, id)).get(step.name) or {}
    records = {}
    for name, output in task.get("outputs", {}).items():
        if not output.get("artifacts"):
            continue
        artifact = output["artifacts"][0]
        schema = {}
        if artifact.get("schemaTitle"):
            schema["schema_title"] = artifact["schemaTitle"]
        records[name] = ArtifactRecord(
            uri=artifact.get("uri", ""), metadata=artifact.get("metadata", {}), **schema
        )
    return records


def read(place: VertexSpec, uri: str) -> bytes:
    """What an object of Cloud Storage holds; FileNotFoundError where there is none."""
    bucket, _, name = uri.removeprefix("gs://").partition("/")
    if not uri.startswith("gs://") or not name:
        raise FileNotFoundError(uri)
    with connected(place) as project:
        from google.api_core.exceptions import NotFound

        url = f"https://storage.googleapis.com/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        try:
            return bytes(send(project, "GET", url, params={"alt": "media"}).content)
        except NotFound:
            raise FileNotFoundError(uri) from None


def _job(project: Project, id: str) -> Json:
    """The PipelineJob, as JSON: the generated client takes a second to be imported."""
    return dict(send(project, "GET", f"{project.url}/{id}").json())


def _state(job: Json) -> str:
    return str(job.get("state", "")).removeprefix("PIPELINE_STATE_")


def _is_ending(project: Project, id: str) -> bool:
    """Whether the job has ended or is being cancelled."""
    return _state(_job(project, id)) in (*_RUN_STATES, "CANCELLING")


class _Attempts(NamedTuple):
    """How many jobs the launcher of a step made, and how many seconds all of them ran."""

    jobs: int
    seconds: float


def _attempts(
    project: Project, job: Json, names: Sequence[str], now: datetime.datetime
) -> Mapping[str, _Attempts]:
    """The attempts of the run's launchers, by the names of their jobs; without names it
    asks nothing."""
    mark = RunTag.of(job.get("labels", {}))
    if not names or not mark:
        return {}
    labels = client.labels_of(mark).items()
    query = {"filter": " AND ".join(f"labels.{key}={value}" for key, value in labels)}
    url = f"{project.url}/{project.parent}/customJobs"
    counts: collections.Counter[str] = collections.Counter()
    seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
    for custom_job in on_pages(project, "customJobs", "GET", url, query):
        name = custom_job["displayName"]
        if custom_job["state"] != "JOB_STATE_CANCELLED":
            counts[name] += 1
        # a job that was cancelled has run, too
        began = moment(custom_job, "startTime")
        if began:
            ended = moment(custom_job, "endTime") or now
            seconds[name] += (ended - began).total_seconds()
    attempts = {}
    for name, count in counts.items():
        # two steps with jobs of one name cannot be told apart
        if names.count(name) == 1:
            attempts[name] = _Attempts(count, seconds[name])
    return attempts


def on_pages(project: Project, kind: str, method: str, url: str, query: Json) -> Iterator[Json]:
    """What all pages hold under `kind`; `query` is the body of a POST."""
    part = "json" if method == "POST" else "params"
    while True:
        page = send(project, method, url, **{part: query}).json()
        yield from page.get(kind, ())
        token = page.get("nextPageToken")
        if not token:
            return
        query["pageToken"] = token


def _with_attempts(
    step: StepRecord, payload: Json | None, attempts: Mapping[str, _Attempts]
) -> StepRecord:
    """A distributed step (one with a launcher's `payload`) with the attempts of its
    launcher; any other step as it is."""
    if payload is None:
        return step
    of_step = attempts.get(payload["job"]["displayName"])
    if of_step is None:
        return step
    reason = step.reason
    if of_step.jobs > 1:
        end = "lost its spot machines or failed" if payload["spot"] else "failed"
        reason = f"{end} {of_step.jobs - 1} x before"
    update = {
        "attempts": of_step.jobs,
        "reason": reason,
        "machine_seconds": of_step.seconds or None,
    }
    return step.model_copy(update=update)


def _tasks(job: Json) -> dict[str, Json]:
    """Tasks that run containers, by the names of steps."""
    spec = job["pipelineSpec"]
    details = job.get("jobDetail", {}).get("taskDetails", ())
    tasks_by_id = {task["taskId"]: task for task in details}
    tasks_by_name: collections.defaultdict[str, list[Json]] = collections.defaultdict(list)
    for task in tasks_by_id.values():
        step_name = _step_name(task, tasks_by_id, spec)
        if step_name:
            tasks_by_name[step_name].append(task)
    tasks = {}
    for name, turns in tasks_by_name.items():
        if len(turns) == 1:
            tasks[name] = turns[0]
            continue
        loop, _, step_name = name.rpartition("/")
        for turn, task in enumerate(turns):  # the service does not tell turns apart
            tasks[f"{loop}/{turn}/{step_name}"] = task
    return tasks


def _step_name(task: Json, tasks_by_id: Mapping[str, Json], spec: Json) -> str | None:
    """The step's name: the tasks around it, without the run's own;
    None of what is not a step."""
    names = [task["taskName"]]
    parent = tasks_by_id.get(task.get("parentTaskId", ""))
    while parent and len(names) <= len(tasks_by_id):  # a circle of parents ends, too
        names.insert(0, parent["taskName"])
        parent = tasks_by_id.get(parent.get("parentTaskId", ""))
    component = spec["root"]
    path: list[str] = []
    for name in names:
        inner = component.get("dag", {}).get("tasks", {}).get(name)
        if inner:
            component = spec["components"][inner["componentRef"]["name"]]
            path.append(name)
        elif path:  # a turn of the loop that this is inside of
            path.append(name.rpartition("-")[2])
    executor = spec["deploymentSpec"].get("executors", {}).get(component.get("executorLabel"), {})
    return "/".join(path) if "container" in executor else None


def _step_record(name: str, task: Json, now: datetime.datetime) -> StepRecord:
    state = task.get("state", "PENDING")
    container = task.get("executorDetail", {}).get("containerDetail", {})
    attempts = [*container.get("failedMainJobs", ()), container.get("mainJob")]
    jobs = list(dict.fromkeys(filter(None, attempts)))
    status = _STEP_STATES.get(state, "running")
    began = moment(task, "startTime") if status != "pending" else None
    return StepRecord(
        name=name,
        status=status,
        cached=state == "SKIPPED",
        reason=_REASONS.get(state, ""),
        attempts=len(jobs),
        log=jobs[-1] if jobs else "",
        error=_error_of(task),
        **step_times(began, moment(task, "endTime"), now),
    )


def _error_of(resource: Json) -> str:
    """The error's message of a job or a task; "" where it has none."""
    return str(resource.get("error", {}).get("message", ""))


def _entries(
    project: Project, place: VertexSpec, jobs: Iterable[str], since: str
) -> Iterator[Json]:
    """What the machines of these jobs printed, as entries of Cloud Logging."""
    ids = " OR ".join(f'"{job}"' for job in jobs)
    conditions = [
        'resource.type="ml_job"',
        f"resource.labels.job_id=({ids})",
        'resource.labels.task_name:"workerpool"',
    ]
    if since:
        conditions.append(f'timestamp>="{since}"')
    query = {
        "resourceNames": [f"projects/{place.project}"],
        "orderBy": "timestamp asc",
        "pageSize": 1_000,
        "filter": " AND ".join(conditions),
    }
    url = "https://logging.googleapis.com/v2/entries:list"
    return on_pages(project, "entries", "POST", url, query)


def text_of(entry: Json) -> str:
    """What an entry of the log says."""
    return str(entry.get("textPayload") or entry.get("jsonPayload", {}).get("message", ""))


def send(project: Project, method: str, url: str, **arguments: Any) -> "Response":
    """The response of a service that the generated client does not know, repeated as that
    would be; `arguments` are those of requests' `Session.request`."""
    from google.api_core import exceptions

    def send_once() -> "Response":
        response = project.session.request(method, url, timeout=client.ANSWER_SECONDS, **arguments)
        if response.status_code >= 400:
            raise exceptions.from_http_response(response)  # type: ignore[no-untyped-call]
        return response

    response: Response = project.retry(send_once)()
    return response


def _lines(entry: Json, step_job: str) -> list[str]:
    """The lines of an entry, for people: what nodes print begins with their rank."""
    lines = text_of(entry).splitlines()
    if _job_of(entry) == step_job:
        return lines
    pool, _, index = entry["resource"]["labels"]["task_name"].rpartition("-")
    rank = int(index)
    if pool != "workerpool0":  # which has node rank 0 alone
        rank += 1
    return [f"[node {rank}] {line}" for line in lines]


def _job_of(entry: Json) -> str:
    return str(entry["resource"]["labels"]["job_id"])


def _key(entry: Json) -> str:
    return f"{entry['timestamp']} {entry['insertId']}"


def _time_of(entry: Json) -> datetime.datetime:
    return datetime.datetime.fromisoformat(entry["timestamp"])
