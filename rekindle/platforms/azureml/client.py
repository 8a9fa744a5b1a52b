"""A workspace of Azure ML: jobs are submitted, looked at and cancelled.

A job's name follows from its definition and the submission's token. Whether it is there
is asked before it is made, and again after an error that leaves that open. Authority:
azure-ai-ml 1.35, as tests/servers/azure/rest.py has seen it ask. No workspace has."""

import contextlib
import graphlib
import io
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from rekindle.errors import PlatformError, UnreachableError, first_line
from rekindle.ir.read.raw import LOADER
from rekindle.outputs import PlannedStep
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.cache_diff import CacheKey, of_bundle
from rekindle.platforms.submission import (
    BUG,
    Definition,
    RunTag,
    SubmittedRun,
    not_installed,
    submission_name,
)
from rekindle.protojson import Json

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.core.credentials import TokenCredential

_INSTALL = ("azureml", "pip install 'rekindle[azure]'")
ARM = "https://management.azure.com"
PATIENCE: dict[str, Any] = {
    "retry_total": 4,
    "retry_backoff_factor": 0.5,
    "retry_backoff_max": 30,
    "read_timeout": 60.0,
}
_PAUSES_SECONDS = (1.0, 4.0)
SUFFIX = ".azureml.yaml"
LOG_IN = "az login, or set AZURE_TENANT_ID, AZURE_CLIENT_ID and a secret or certificate"
_STEP_REFERENCE = re.compile(r"parent\.jobs\.(\w+)\.outputs")
_PARAMETER_REFERENCE = re.compile(r"\$\{\{parent\.inputs\.(\w+)\}\}")


def submit(definition: Definition, place: AzureMLSpec, mark: RunTag) -> SubmittedRun:
    name = run_name(definition, mark.token)
    with connected(place) as client:
        existing = find(client.jobs, name)
        if existing:
            return SubmittedRun(name, existing.studio_url or "", anew=False)
        job = _create_job(client, name, definition, mark.tags())
        return SubmittedRun(name, job.studio_url or "")


def run_name(definition: Definition, token: str) -> str:
    """The name of the job of this definition that is submitted with this token."""
    job = definition.entry.removesuffix(SUFFIX)
    return submission_name(job, definition, token, longest=80)


def where(place: AzureMLSpec) -> str:
    """The workspace, for people."""
    return f"workspace {place.workspace} of {place.resource_group} ({place.subscription})"


def workspace_path(place: AzureMLSpec) -> str:
    """The workspace's name in Azure Resource Manager."""
    group = f"/subscriptions/{place.subscription}/resourceGroups/{place.resource_group}"
    return f"{group}/providers/Microsoft.MachineLearningServices/workspaces/{place.workspace}"


@contextlib.contextmanager
def connected(place: AzureMLSpec) -> Iterator["MLClient"]:
    """The SDK's client; what it raises becomes a PlatformError, what it prints is
    dropped."""
    with contextlib.redirect_stderr(io.StringIO()), logged_in(place) as credential:
        try:
            from azure.ai.ml import MLClient
        except ImportError as error:
            raise not_installed(error, *_INSTALL) from None
        # without its bars the SDK does not notice that an upload failed, and waits for ever
        yield MLClient(
            credential,
            place.subscription,
            place.resource_group,
            place.workspace,
            show_progress=True,
            enable_telemetry=False,
            **PATIENCE,
        )


@contextlib.contextmanager
def logged_in(place: AzureMLSpec) -> Iterator["TokenCredential"]:
    """The credential of who is logged in, without the SDK, which takes a second to
    import; PlatformError for what Azure raises in the block."""
    place.refuse_if_incomplete()
    try:
        from azure.core.exceptions import AzureError
        from azure.identity import DefaultAzureCredential
    except ImportError as error:
        raise not_installed(error, *_INSTALL) from None
    try:
        yield DefaultAzureCredential()
    except AzureError as error:
        raise explained(error, place) from error


def sender(credential: "TokenCredential", resource: str = ARM) -> Any:
    """A client of Azure's REST APIs, with a token for `resource`, that repeats
    requests."""
    from azure.core import PipelineClient
    from azure.core.pipeline.policies import BearerTokenCredentialPolicy, RetryPolicy

    token = BearerTokenCredentialPolicy(credential, f"{resource}/.default")
    return PipelineClient(ARM, policies=[RetryPolicy(**PATIENCE), token])


def find(operations: Any, name: str) -> Any:
    """A job or a schedule, by the SDK's `operations` of its kind; None where the
    workspace has none."""
    from azure.core.exceptions import ResourceNotFoundError

    try:
        return operations.get(name)
    except ResourceNotFoundError as error:
        if _is_workspace_missing(error):
            raise
        return None


def _create_job(client: "MLClient", name: str, definition: Definition, tags: dict[str, str]) -> Any:
    """The job, created or found where an earlier call created it."""
    from azure.ai.ml import load_job
    from azure.core.exceptions import AzureError

    with definition.written() as file:
        for pause in (*_PAUSES_SECONDS, None):
            try:
                job = load_job(str(file))
                job.name = name
                job.tags = {**(job.tags or {}), **tags}
                return client.jobs.create_or_update(job)
            except AzureError as error:
                if _status(error) in (401, 403):
                    raise
                # a call whose answer was lost, repeated, is refused since the job is there
                existing = find(client.jobs, name)
                if existing:
                    return existing
                if pause is None or not _may_succeed_later(error):
                    raise
                time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _may_succeed_later(error: Exception) -> bool:
    """Whether the same call may yet succeed."""
    from azure.core.exceptions import ServiceRequestError, ServiceResponseError

    if isinstance(error, ServiceRequestError | ServiceResponseError):
        return True
    status = _status(error)
    return status in (408, 409, 429) or status >= 500


def _status(error: Exception) -> int:
    """HTTP's status, 0 without a response."""
    return int(getattr(error, "status_code", None) or 0)


def _is_workspace_missing(error: Exception) -> bool:
    """Whether not the job is missing, but what it would be in."""
    code = getattr(getattr(error, "error", None), "code", "") or ""
    return code in ("ResourceNotFound", "ResourceGroupNotFound", "SubscriptionNotFound")


def explained(error: Exception, place: AzureMLSpec) -> PlatformError:
    """The error of Azure as ours, with what to do about it."""
    message = _message_of(error)
    fix = _fix_of(error)
    if fix:
        return PlatformError(message, where=where(place), fix=fix)
    if _may_succeed_later(error):
        fix = "retry the command; submitting is idempotent"
        return UnreachableError(message, where=where(place), fix=fix)
    fix = f"the workspace rejected the request; {BUG}"
    return PlatformError(message, where=where(place), fix=fix)


def _fix_of(error: Exception) -> str:
    """What to do about an error, where its status or its type says that;
    "" for others."""
    from azure.ai.ml.exceptions import MlException
    from azure.core.exceptions import ClientAuthenticationError

    status = _status(error)
    if status == 401 or isinstance(error, ClientAuthenticationError):
        return LOG_IN
    if status == 403:
        request = getattr(getattr(error, "response", None), "request", None)
        address = str(getattr(request, "url", "")).partition("?")[0]
        if ".blob." in address:
            return (
                "ask for `Storage Blob Data Contributor`, "
                "and see the firewall of the storage account"
            )
        return "ask for the role `AzureML Data Scientist` on the workspace"
    if status == 404 and _is_workspace_missing(error):
        return (
            "see whether platforms.azureml names the right subscription, resource_group "
            "and workspace"
        )
    if status == 404:
        return "see what the workspace has: az ml job list"
    if isinstance(error, MlException):  # the SDK's, before it sent anything
        return "what platforms.azureml names has to be in the workspace"
    return ""


def _message_of(error: Exception) -> str:
    """The first of what may be many lines, or what the SDK found wrong before it sent
    anything."""
    text = str(getattr(error, "message", "") or error)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        problems = json.loads(text)["errors"]
        return "; ".join(f"{p['path']}: {p['message'].splitlines()[0]}" for p in problems)
    return first_line(error, text)


def steps(definition: Definition) -> tuple[PlannedStep, ...]:
    """The steps by name, as they may begin:
    on which cluster, or on machines of which size."""
    jobs = _job_of(definition)["jobs"]
    producers = {name: _STEP_REFERENCE.findall(str(job["inputs"])) for name, job in jobs.items()}
    planned_steps = []
    for name in graphlib.TopologicalSorter(producers).static_order():
        resources = jobs[name]["resources"]
        cluster = jobs[name].get("compute", "").removeprefix("azureml:")
        machine = f"cluster {cluster}" if cluster else resources["instance_type"]
        is_spot = jobs[name].get("queue_settings", {}).get("job_tier") == "spot"
        planned = PlannedStep(name, machine, resources["instance_count"], is_spot)
        planned_steps.append(planned)
    return tuple(planned_steps)


def images(definition: Definition) -> frozenset[str]:
    """The images that the steps run in."""
    jobs = _job_of(definition)["jobs"].values()
    return frozenset(job["component"]["environment"]["image"] for job in jobs)


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """The steps as the cache sees them: a deterministic component is reused where itself,
    its values and the places of its inputs are the same."""
    job = _job_of(Definition(files))
    keys = {name: _cache_key(name, step, job, files) for name, step in job["jobs"].items()}
    order = graphlib.TopologicalSorter({name: key.places for name, key in keys.items()})
    return tuple(keys[name] for name in order.static_order())


def _cache_key(name: str, step: Json, job: Json, files: Mapping[str, bytes]) -> CacheKey:
    component = step["component"]
    parameters = {}  # the values of inputs that are parameters of the job
    references = {}  # the text of all others
    for input_name, text in step["inputs"].items():
        match = _PARAMETER_REFERENCE.fullmatch(str(text))
        if match:
            parameters[input_name] = job["inputs"][match[1]]
        else:
            references[input_name] = text
    interface = {k: v for k, v in component.items() if k not in ("code", "environment")}
    parts = {
        "image": json.dumps(component["environment"]),
        "interface": json.dumps([interface, references], sort_keys=True),
    }
    for input_name, value in parameters.items():
        parts[f"parameter `{input_name}`"] = json.dumps(value)
    parts |= of_bundle(component["code"].removeprefix("./"), files)
    steps_read = tuple(dict.fromkeys(_STEP_REFERENCE.findall(json.dumps(references))))
    return CacheKey(name, bool(component["is_deterministic"]), parts, steps_read)


def _job_of(definition: Definition) -> Json:
    return dict(yaml.load(definition.text, LOADER))  # noqa: S506 - the safe one
