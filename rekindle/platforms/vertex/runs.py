"""A PipelineJob of Vertex AI: its steps, what they print and leave, stopping it, and trying again
what failed.

Steps are the tasks that run containers, by the names that the outline has for them; turns of a loop
are `LOOP/TURN/STEP`. A step is a CustomJob, whose log is asked of Cloud Logging. That of a step on
several machines is the launcher's, who says which job it made: that job's is shown with it, by
node. Vertex AI tries nothing again in place, so to resume is a new job of the same definition: what
succeeded comes from the cache, training goes on from its checkpoints.

Authority: PipelineTaskDetail of aiplatform_v1; cloud.google.com/logging/docs/reference/v2/rest/v2/
entries/list; cloud.google.com/storage/docs/json_api/v1/objects/get. No project has been asked: what
the service calls the turns of a loop is a guess."""

import collections
import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rekindle.ir.edit.rewrite import launched
from rekindle.platforms.snapshot import Log, RunSnapshot, moment, states_of, step_times
from rekindle.platforms.submission import Definition, RunTag, SubmittedRun, check_resumable
from rekindle.platforms.vertex import client
from rekindle.platforms.vertex.client import Project, connected
from rekindle.platforms.vertex.compile import LAUNCHER
from rekindle.records import ArtifactRecord, StepRecord
from rekindle.spec.platforms import VertexSpec

if TYPE_CHECKING:
    from requests import Response

_RUNS, _STEPS, _REASONS = states_of(__file__)
Message = dict[str, Any]
_LATE = datetime.timedelta(seconds=30)  # lines of several machines arrive in no order
_MADE = re.compile(r"attempt \d+ is (\d+)")  # launcher.py says so of a job


def describe(place: VertexSpec, id: str) -> RunSnapshot:
    with connected(place) as project:
        job = _job(project, id)
        status, now = _RUNS.get(_state(job), "running"), datetime.datetime.now(datetime.UTC)
        told = launched(job["pipelineSpec"], LAUNCHER)
        tried = _tried(project, job, [one["job"]["displayName"] for one in told.values()], now)
        found = [_step(name, task, now) for name, task in _tasks(job).items()]
        steps = tuple(_with_jobs(step, told.get(step.name), tried) for step in found)
        # that some tasks failed is not news where one says why
        error = "" if any(step.status == "failed" for step in steps) else _message(job)
        ended = moment(job, "endTime") if status != "running" else None
        return RunSnapshot(status, steps, error, ended)


def read_log(place: VertexSpec, id: str, step: StepRecord, cursor: str) -> Log:
    """The lines since, those of a distributed step's nodes beginning with their rank."""
    if not step.log:
        return Log("", cursor)
    seen = json.loads(cursor or "{}")
    since, told = seen.get("since", step.started_at), set(seen.get("told", ()))
    own, made = step.log.rpartition("/")[2], list(seen.get("made", ()))
    with connected(place) as project:
        entries = [*_entries(project, place, [own, *made], since)]
        fresh = [entry for entry in entries if _key(entry) not in told]
        said = "\n".join(text_of(entry) for entry in fresh if _job_of(entry) == own)
        news = {*_MADE.findall(said)}
        if news := news - {own, *made}:
            more = [*_entries(project, place, sorted(news), step.started_at)]
            entries, fresh, made = entries + more, fresh + more, [*made, *sorted(news)]
    if not fresh:
        return Log("", cursor)
    newest = max(map(_when, entries))
    kept = [_key(entry) for entry in entries if _when(entry) >= newest - _LATE]
    state = {"since": (newest - _LATE).isoformat(), "told": kept, "made": made}
    lines = [line for entry in sorted(fresh, key=_when) for line in _lines(entry, own)]
    return Log("".join(f"{line}\n" for line in lines), json.dumps(state))


def cancel(place: VertexSpec, id: str) -> None:
    with connected(place) as project:
        if _state(_job(project, id)) in (*_RUNS, "CANCELLING"):
            return
        from google.api_core.exceptions import ClientError

        try:
            project.pipelines.cancel_pipeline_job(name=id, **project.patience)
        except ClientError:  # it may have ended meanwhile
            if _state(_job(project, id)) not in (*_RUNS, "CANCELLING"):
                raise


def resume(definition: Definition, place: VertexSpec, id: str, mark: RunTag) -> SubmittedRun:
    """A new job of the same definition, made once for one mark."""
    with connected(place) as project:
        state = _state(_job(project, id))
    check_resumable(_RUNS.get(state), f"the job is {state.lower()}", client.where(place))
    return client.submit(definition, place, mark)


def artifacts(place: VertexSpec, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
    """What the step's task made, with its metadata, at `gs://`."""
    with connected(place) as project:
        task = _tasks(_job(project, id)).get(step.name)
    outputs, found = (task or {}).get("outputs", {}), dict[str, ArtifactRecord]()
    for name, first in ((n, o["artifacts"][0]) for n, o in outputs.items() if o.get("artifacts")):
        kind = {"schema_title": first["schemaTitle"]} if first.get("schemaTitle") else {}
        uri, metadata = first.get("uri", ""), first.get("metadata", {})
        found[name] = ArtifactRecord(uri=uri, metadata=metadata, **kind)
    return found


def read(place: VertexSpec, uri: str) -> bytes:
    bucket, _, name = uri.removeprefix("gs://").partition("/")
    if not uri.startswith("gs://") or not name:
        raise FileNotFoundError(uri)
    with connected(place) as project:
        from google.api_core.exceptions import NotFound

        at = f"https://storage.googleapis.com/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        try:
            return bytes(asked(project, "GET", at, params={"alt": "media"}).content)
        except NotFound:
            raise FileNotFoundError(uri) from None


def _job(project: Project, id: str) -> Message:
    """The PipelineJob, as JSON: the generated client takes a second to be imported."""
    return dict(asked(project, "GET", f"{project.url}/{id}").json())


def _state(job: Message) -> str:
    return str(job.get("state", "")).removeprefix("PIPELINE_STATE_")


def _tried(
    project: Project, job: Message, names: Sequence[str], now: datetime.datetime
) -> Mapping[str, tuple[int, float]]:
    """How many jobs of these names the launchers of the run made, and how many seconds all of them
    ran; without names asks nothing."""
    if not names or not (mark := RunTag.of(job.get("labels", {}))):
        return {}
    wanted = " AND ".join(f"labels.{key}={value}" for key, value in client.labels_of(mark).items())
    url = f"{project.url}/{project.parent}/customJobs"
    jobs = on_pages(project, "customJobs", "GET", url, {"filter": wanted})
    made, ran = collections.Counter[str](), collections.defaultdict[str, float](float)
    for job in jobs:
        made[job["displayName"]] += job["state"] != "JOB_STATE_CANCELLED"
        if began := moment(job, "startTime"):
            ended = moment(job, "endTime") or now
            ran[job["displayName"]] += (ended - began).total_seconds()
    return {name: (n, ran[name]) for name, n in made.items() if n and names.count(name) == 1}


def on_pages(
    project: Project, kind: str, method: str, url: str, query: dict[str, Any]
) -> Iterator[Message]:
    """What all pages hold under `kind`."""
    part = "json" if method == "POST" else "params"
    while True:
        told = asked(project, method, url, **{part: query}).json()
        yield from told.get(kind, ())
        if not (token := told.get("nextPageToken")):
            return
        query["pageToken"] = token


def _with_jobs(
    step: StepRecord, told: Message | None, tried: Mapping[str, tuple[int, float]]
) -> StepRecord:
    """A distributed step with the attempts that its launcher made."""
    if told is None or not (found := tried.get(told["job"]["displayName"])):
        return step
    count, seconds = found
    lost = "lost its spot machines or failed" if told["spot"] else "failed"
    reason = f"{lost} {count - 1} x before" if count > 1 else step.reason
    known = {"attempts": count, "reason": reason, "machine_seconds": seconds or None}
    return step.model_copy(update=known)


def _tasks(job: Message) -> dict[str, Message]:
    """Tasks that run containers, by the names of steps."""
    spec = job["pipelineSpec"]
    known = {task["taskId"]: task for task in job.get("jobDetail", {}).get("taskDetails", ())}
    named = collections.defaultdict[str, list[Any]](list)
    for task in known.values():
        if name := _name(task, known, spec):
            named[name].append(task)
    found = dict[str, Message]()
    for name, tasks in named.items():
        around, _, last = name.rpartition("/")
        for turn, task in enumerate(tasks):  # the service does not tell turns apart
            found[name if len(tasks) == 1 else f"{around}/{turn}/{last}"] = task
    return found


def _name(task: Message, known: Mapping[str, Message], spec: Mapping[str, Any]) -> str | None:
    """The step's name: the tasks around it, without the run's own; None of what is not a step."""
    chain = [task["taskName"]]
    while (above := known.get(task.get("parentTaskId", ""))) and len(chain) <= len(known):
        task = above
        chain.insert(0, task["taskName"])
    component, path = spec["root"], list[str]()
    for name in chain:
        if inner := component.get("dag", {}).get("tasks", {}).get(name):
            component = spec["components"][inner["componentRef"]["name"]]
            path.append(name)
        elif path:  # a turn of the loop that this is inside of
            path.append(name.rpartition("-")[2])
    executor = spec["deploymentSpec"].get("executors", {}).get(component.get("executorLabel"), {})
    return "/".join(path) if "container" in executor else None


def _step(name: str, task: Message, now: datetime.datetime) -> StepRecord:
    state = task.get("state", "PENDING")
    container = task.get("executorDetail", {}).get("containerDetail", {})
    tried = [*container.get("failedMainJobs", ()), container.get("mainJob")]
    jobs = list(dict.fromkeys(filter(None, tried)))
    status = _STEPS.get(state, "running")
    began = moment(task, "startTime") if status != "pending" else None
    return StepRecord(
        name=name,
        status=status,
        cached=state == "SKIPPED",
        reason=_REASONS.get(state, ""),
        attempts=len(jobs),
        log=jobs[-1] if jobs else "",
        error=_message(task),
        **step_times(began, moment(task, "endTime"), now),
    )


def _message(failed: Message) -> str:
    return str(failed.get("error", {}).get("message", ""))


def _entries(
    project: Project, place: VertexSpec, jobs: Iterable[str], since: str
) -> Iterator[dict[str, Any]]:
    """What the machines of these jobs printed."""
    ids = " OR ".join(f'"{job}"' for job in jobs)
    wanted = [f"resource.labels.job_id=({ids})", 'resource.labels.task_name:"workerpool"']
    times = [f'timestamp>="{since}"'] if since else []
    query = {
        "resourceNames": [f"projects/{place.project}"],
        "orderBy": "timestamp asc",
        "pageSize": 1_000,
        "filter": " AND ".join(['resource.type="ml_job"', *wanted, *times]),
    }
    url = "https://logging.googleapis.com/v2/entries:list"
    return on_pages(project, "entries", "POST", url, query)


def text_of(entry: Mapping[str, Any]) -> str:
    """What an entry of the log says."""
    return str(entry.get("textPayload") or entry.get("jsonPayload", {}).get("message", ""))


def asked(project: Project, method: str, url: str, **more: Any) -> "Response":
    """The answer of a service that the generated client does not know, asked again as it would."""
    from google.api_core import exceptions

    def once() -> "Response":
        response = project.session.request(method, url, timeout=client.ANSWER_SECONDS, **more)
        if response.status_code >= 400:
            raise exceptions.from_http_response(response)  # type: ignore[no-untyped-call]
        return response

    answer: Response = project.retry(once)()
    return answer


def _lines(entry: Mapping[str, Any], own: str) -> list[str]:
    """For people: what nodes print begins with their rank."""
    lines = text_of(entry).splitlines()
    if _job_of(entry) == own:
        return lines
    pool, _, index = entry["resource"]["labels"]["task_name"].rpartition("-")
    return [f"[node {int(index) + (pool != 'workerpool0')}] {line}" for line in lines]


def _job_of(entry: Mapping[str, Any]) -> str:
    return str(entry["resource"]["labels"]["job_id"])


def _key(entry: Mapping[str, Any]) -> str:
    return f"{entry['timestamp']} {entry['insertId']}"


def _when(entry: Mapping[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(entry["timestamp"])
