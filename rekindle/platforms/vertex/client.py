"""Vertex AI Pipelines in a project: PipelineJobs are submitted, looked at and cancelled,
through the generated client of google-cloud-aiplatform, over REST.

A job's id is ours and follows from its definition and the submission's token: creating it
twice is refused by the service, and that is how it is found. Reads, and what may be said
twice, are repeated after 429, 5xx and broken connections for two minutes. Authority:
aiplatform_v1 of google-cloud-aiplatform 2.7. Untested against a real project."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rekindle.errors import PlatformError, UnreachableError, first_line
from rekindle.ir.edit.rewrite import asked_of, executors, launched
from rekindle.ir.read.pipeline import read
from rekindle.outputs import PlannedStep
from rekindle.platforms import submission
from rekindle.platforms.cache_diff import CacheKey, of_graph
from rekindle.platforms.submission import (
    BUG,
    Definition,
    RunTag,
    SubmittedRun,
    not_installed,
)
from rekindle.platforms.vertex.compile import LAUNCHER
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.protojson import Json

if TYPE_CHECKING:
    import requests
    from google.cloud import aiplatform_v1 as api

_LABEL_VALUE = re.compile(r"[a-z0-9_-]{1,63}")
_QUOTA = re.compile(r"exceed quota limits|quotas are exceeded")  # of machines, not of calls
_PATIENCE_SECONDS = 120.0
FIRST_PAUSE_SECONDS = 1.0
ANSWER_SECONDS = 60.0
SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
_DEFAULT_MACHINE = "the service's default machine"
LOG_IN = "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"


@dataclasses.dataclass(frozen=True)
class Project:
    """One project and region, how calls are repeated, and clients, imported when they are
    used."""

    parent: str
    host: str
    retry: Any

    @property
    def patience(self) -> Json:
        """How a generated client repeats a call, and how long it waits for each
        answer."""
        return {"retry": self.retry, "timeout": ANSWER_SECONDS}

    @property
    def url(self) -> str:
        """What the names of resources follow."""
        return f"https://{self.host}/v1"

    @functools.cached_property
    def session(self) -> "requests.Session":
        """An HTTP session with a token, for what is asked without a generated client."""
        import google.auth
        from google.auth.transport.requests import AuthorizedSession

        return AuthorizedSession(google.auth.default(scopes=SCOPES)[0])  # type: ignore[no-untyped-call]

    @functools.cached_property
    def pipelines(self) -> "api.PipelineServiceClient":
        """The client of PipelineJobs."""
        from google.cloud import aiplatform_v1 as api

        options = {"api_endpoint": self.host}
        return api.PipelineServiceClient(transport="rest", client_options=options)

    @functools.cached_property
    def schedules(self) -> "api.ScheduleServiceClient":
        """The client of schedules."""
        from google.cloud import aiplatform_v1 as api

        options = {"api_endpoint": self.host}
        return api.ScheduleServiceClient(transport="rest", client_options=options)


def submit(definition: Definition, place: VertexSpec, mark: RunTag) -> SubmittedRun:
    id = run_name(definition, mark.token)
    with connected(place) as project:
        from google.api_core.exceptions import Conflict
        from google.cloud import aiplatform_v1 as api

        name = f"{project.parent}/pipelineJobs/{id}"
        pipeline_job = job(api, definition)
        pipeline_job.labels.update(labels_of(mark))
        is_new = True
        try:
            project.pipelines.create_pipeline_job(
                parent=project.parent,
                pipeline_job=pipeline_job,
                pipeline_job_id=id,
                **project.patience,
            )
        except Conflict:  # by the same submission, or by a call whose answer was lost
            is_new = False
        return SubmittedRun(name, page(place, id), is_new)


def run_name(definition: Definition, token: str) -> str:
    """The id of the job of this definition that is submitted with this token."""
    name = str(job_of(definition)["displayName"]).lower()
    plain = re.sub(r"[^a-z0-9-]", "-", name).strip("-")
    return submission.submission_name(plain or "run", definition, token, longest=100)


def labels_of(mark: RunTag) -> dict[str, str]:
    """The labels of a job with this mark, by which it is found again: up to 63 of a-z,
    0-9, - and _ (else a digest). The service hands them to the jobs of its steps, so
    limits.yaml counts them. Authority:
    cloud.google.com/vertex-ai/docs/general/labels."""
    labels = {}
    for key, value in mark.tags().items():
        is_label = _LABEL_VALUE.fullmatch(value)
        labels[key] = value if is_label else submission.digest_of({value: b""})
    return labels


def where(place: VertexSpec) -> str:
    """The project and region, for people."""
    return f"project {place.project} in {place.region}"


def page(place: VertexSpec, id: str) -> str:
    """The URL of a job in the console."""
    runs = "https://console.cloud.google.com/vertex-ai/pipelines"
    return f"{runs}/locations/{place.region}/runs/{id}?project={place.project}"


@contextlib.contextmanager
def connected(place: VertexSpec) -> Iterator[Project]:
    """The project's clients; what they raise becomes a PlatformError."""
    place.refuse_if_incomplete()
    try:
        from google.api_core import exceptions, retry
        from google.auth.exceptions import GoogleAuthError

        # only looked for: to import it takes a second
        if importlib.util.find_spec("google.cloud.aiplatform_v1") is None:
            raise ModuleNotFoundError(name="google.cloud.aiplatform_v1")
    except ImportError as error:
        raise not_installed(error, "vertex", "pip install google-cloud-aiplatform") from None
    from requests import RequestException

    try:
        repeating = retry.Retry(may_succeed, initial=FIRST_PAUSE_SECONDS, timeout=_PATIENCE_SECONDS)
        parent = f"projects/{place.project}/locations/{place.region}"
        yield Project(parent, f"{place.region}-aiplatform.googleapis.com", repeating)
    except (exceptions.GoogleAPIError, GoogleAuthError, RequestException) as error:
        raise _explained(error, place) from error


def job(api: Any, definition: Definition) -> Any:
    """The PipelineJob as the generated client (`api`) has it."""
    return api.PipelineJob.from_json(json.dumps(job_of(definition)))


def may_succeed(error: Exception) -> bool:
    """Whether the same call may yet succeed, or did."""
    from google.api_core import exceptions
    from requests import ConnectionError, Timeout

    kinds = (exceptions.TooManyRequests, exceptions.ServerError, ConnectionError, Timeout)
    return isinstance(error, kinds) and not _QUOTA.search(str(error))


def _explained(error: Exception, place: VertexSpec) -> PlatformError:
    """The error of Google's clients as ours, with what to do about it."""
    from google.api_core import exceptions

    error = getattr(error, "cause", None) or error  # of a RetryError
    message = first_line(error, getattr(error, "message", ""))
    fix = _fix_of(error)
    if fix:
        return PlatformError(message, where=where(place), fix=fix)
    is_refusal = isinstance(error, exceptions.ClientError)
    if getattr(error, "code", 0) == 429 or not is_refusal:
        fix = "retry the command; submitting is idempotent"
        return UnreachableError(message, where=where(place), fix=fix)
    fix = f"the service rejected the request; {BUG}"
    return PlatformError(message, where=where(place), fix=fix)


def _fix_of(error: Exception) -> str:
    """What to do about an error whose code or type says it; "" for others."""
    from google.auth.exceptions import GoogleAuthError, TransportError

    if isinstance(error, GoogleAuthError) and not isinstance(error, TransportError):
        return LOG_IN
    match getattr(error, "code", 0):
        case 401:
            return LOG_IN
        case 403:
            return "rekindle doctor CONFIG --platform vertex prints the roles that are needed"
        case 404:
            return (
                "see whether platforms.vertex names the right project and region, and what is there"
            )
    if _QUOTA.search(str(error)):
        return "ask for more of this quota in the console, or take other machines"
    return ""


def job_of(definition: Definition) -> Json:
    """The body of the PipelineJob."""
    return dict(json.loads(definition.text))


def steps(definition: Definition) -> tuple[PlannedStep, ...]:
    """The steps by name, those of nested pipelines too, and the type of their
    machines."""
    spec = job_of(definition)["pipelineSpec"]
    payloads = launched(spec, LAUNCHER)  # of distributed steps
    planned_steps = []
    for path, container in executors(spec):
        if path in payloads:
            pools = payloads[path]["job"]["jobSpec"]["workerPoolSpecs"]
            count = sum(pool["replicaCount"] for pool in pools)
            machine = pools[0]["machineSpec"]["machineType"]
            planned = PlannedStep(path, machine, count, payloads[path]["spot"])
        else:
            planned = PlannedStep(path, asked_of(container) or _DEFAULT_MACHINE)
        planned_steps.append(planned)
    return tuple(planned_steps)


def images(definition: Definition) -> frozenset[str]:
    """Images of the steps, and of the nodes of distributed ones."""
    spec = job_of(definition)["pipelineSpec"]
    images = {container["image"] for _, container in executors(spec)}
    for payload in launched(spec, LAUNCHER).values():
        for pool in payload["job"]["jobSpec"]["workerPoolSpecs"]:
            images.add(pool["containerSpec"]["imageUri"])
    return frozenset(images)


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """The steps as the cache sees them."""
    job = job_of(Definition(files))
    graph = read(json.dumps(job["pipelineSpec"]))
    return of_graph(graph, job["runtimeConfig"]["parameterValues"])
