"""Vertex AI Pipelines in a project: PipelineJobs are submitted, looked at and cancelled, through
the generated client of google-cloud-aiplatform, over REST.

A job's id is ours and follows from its definition and the submission's token: creating it twice is
refused by the service, and that is how it is found. Reads, and what may be said twice, are repeated
after 429, 5xx and broken connections for two minutes. Authority: aiplatform_v1 of
google-cloud-aiplatform 2.7. Untested against a real project."""

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
from rekindle.platforms.submission import BUG, Definition, RunTag, SubmittedRun, not_installed
from rekindle.platforms.vertex.compile import LAUNCHER
from rekindle.spec.platforms import VertexSpec

if TYPE_CHECKING:
    import requests
    from google.cloud import aiplatform_v1 as api

_problem = submission.problems_in(__file__)
_FITS = re.compile(r"[a-z0-9_-]{1,63}")
_QUOTA = re.compile(r"exceed quota limits|quotas are exceeded")  # of machines, not of calls
_PATIENCE_SECONDS, FIRST_PAUSE_SECONDS, ANSWER_SECONDS = 120.0, 1.0, 60.0
SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
_DEFAULT = "the service's default machine"


@dataclasses.dataclass(frozen=True)
class Project:
    """One project and region, how calls are repeated, and clients, imported when they are used."""

    parent: str
    host: str
    retry: Any

    @property
    def patience(self) -> dict[str, Any]:
        """How a generated client repeats a call, and how long it waits for each answer."""
        return {"retry": self.retry, "timeout": ANSWER_SECONDS}

    @property
    def url(self) -> str:
        """What the names of resources follow."""
        return f"https://{self.host}/v1"

    @functools.cached_property
    def session(self) -> "requests.Session":
        """For services and resources that are asked without a generated client."""
        import google.auth
        from google.auth.transport.requests import AuthorizedSession

        return AuthorizedSession(google.auth.default(scopes=SCOPES)[0])  # type: ignore[no-untyped-call]

    @functools.cached_property
    def pipelines(self) -> "api.PipelineServiceClient":
        """Of PipelineJobs."""
        from google.cloud import aiplatform_v1 as api

        where = {"api_endpoint": self.host}
        return api.PipelineServiceClient(transport="rest", client_options=where)

    @functools.cached_property
    def schedules(self) -> "api.ScheduleServiceClient":
        """Of schedules."""
        from google.cloud import aiplatform_v1 as api

        where = {"api_endpoint": self.host}
        return api.ScheduleServiceClient(transport="rest", client_options=where)


def submit(definition: Definition, place: VertexSpec, mark: RunTag) -> SubmittedRun:
    id = run_name(definition, mark.token)
    with connected(place) as project:
        from google.api_core.exceptions import Conflict
        from google.cloud import aiplatform_v1 as api

        name = f"{project.parent}/pipelineJobs/{id}"
        anew, marked = True, job(api, definition)
        marked.labels.update(labels_of(mark))
        try:
            project.pipelines.create_pipeline_job(
                parent=project.parent,
                pipeline_job=marked,
                pipeline_job_id=id,
                **project.patience,
            )
        except Conflict:  # by the same submission, or by a call whose answer was lost
            anew = False
        return SubmittedRun(name, page(place, id), anew)


def run_name(definition: Definition, token: str) -> str:
    plain = re.sub(r"[^a-z0-9-]", "-", str(job_of(definition)["displayName"]).lower()).strip("-")
    return f"{plain[:100] or 'run'}-{submission.digest_of(definition.files, token)}"


def labels_of(mark: RunTag) -> dict[str, str]:
    """The labels of a job with this mark, by which it is found again: up to 63 of a-z, 0-9, - and _
    (else a digest). The service hands them to the jobs of its steps, so catalog/vertex.yaml counts
    them. Authority: cloud.google.com/vertex-ai/docs/general/labels."""
    tags = mark.tags().items()
    return {key: v if _FITS.fullmatch(v) else submission.digest_of({v: b""}) for key, v in tags}


def where(place: VertexSpec) -> str:
    return f"project {place.project} in {place.region}"


def page(place: VertexSpec, id: str) -> str:
    runs = "https://console.cloud.google.com/vertex-ai/pipelines"
    return f"{runs}/locations/{place.region}/runs/{id}?project={place.project}"


@contextlib.contextmanager
def connected(place: VertexSpec) -> Iterator[Project]:
    """The project's clients; what they raise becomes a PlatformError."""
    place.refuse_if_incomplete()
    try:
        from google.api_core import exceptions, retry
        from google.auth.exceptions import GoogleAuthError

        if importlib.util.find_spec("google.cloud.aiplatform_v1") is None:
            raise ModuleNotFoundError(name="google.cloud.aiplatform_v1")
    except ImportError as error:
        raise not_installed(error, "vertex", "pip install google-cloud-aiplatform") from None
    from requests import RequestException

    try:
        again = retry.Retry(may_succeed, initial=FIRST_PAUSE_SECONDS, timeout=_PATIENCE_SECONDS)
        parent = f"projects/{place.project}/locations/{place.region}"
        yield Project(parent, f"{place.region}-aiplatform.googleapis.com", again)
    except (exceptions.GoogleAPIError, GoogleAuthError, RequestException) as error:
        raise _explained(error, place) from error


def job(api: Any, definition: Definition) -> Any:
    return api.PipelineJob.from_json(json.dumps(job_of(definition)))


def may_succeed(error: Exception) -> bool:
    """Whether the same call may yet succeed, or did."""
    from google.api_core import exceptions
    from requests import ConnectionError, Timeout

    kinds = (exceptions.TooManyRequests, exceptions.ServerError, ConnectionError, Timeout)
    return isinstance(error, kinds) and not _QUOTA.search(str(error))


def _explained(error: Exception, place: VertexSpec) -> PlatformError:
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError, TransportError

    error = getattr(error, "cause", None) or error  # of a RetryError
    kind, code = PlatformError, getattr(error, "code", 0)
    other = "quota" if _QUOTA.search(str(error)) else "rejected"
    name = {401: "login", 403: "forbidden", 404: "missing"}.get(code, other)
    if isinstance(error, GoogleAuthError) and not isinstance(error, TransportError):
        name = "login"
    elif name == "rejected" and (code == 429 or not isinstance(error, exceptions.ClientError)):
        kind, name = UnreachableError, "unreachable"
    said = first_line(error, getattr(error, "message", ""))
    return kind([_problem(name, what=said, where=where(place), bug=BUG)])


def job_of(definition: Definition) -> dict[str, Any]:
    """The body of the PipelineJob."""
    return dict(json.loads(definition.text))


def steps(definition: Definition) -> tuple[PlannedStep, ...]:
    """The steps by name, those of nested pipelines too: on machines of which type."""
    spec, found = job_of(definition)["pipelineSpec"], []
    told = launched(spec, LAUNCHER)
    for path, container in executors(spec):
        if path not in told:
            found.append(PlannedStep(path, asked_of(container) or _DEFAULT))
            continue
        pools = told[path]["job"]["jobSpec"]["workerPoolSpecs"]
        count = sum(pool["replicaCount"] for pool in pools)
        machine = pools[0]["machineSpec"]["machineType"]
        found.append(PlannedStep(path, machine, count, told[path]["spot"]))
    return tuple(found)


def images(definition: Definition) -> frozenset[str]:
    """Images of the steps, and of the nodes of distributed ones."""
    spec = job_of(definition)["pipelineSpec"]
    jobs = [told["job"]["jobSpec"] for told in launched(spec, LAUNCHER).values()]
    nodes = {pool["containerSpec"]["imageUri"] for job in jobs for pool in job["workerPoolSpecs"]}
    return frozenset(nodes | {container["image"] for _, container in executors(spec)})


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    job = job_of(Definition(files))
    graph = read(json.dumps(job["pipelineSpec"]))
    return of_graph(graph, job["runtimeConfig"]["parameterValues"])
