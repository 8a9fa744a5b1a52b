"""A workspace of Azure ML: jobs are submitted, looked at and cancelled.

A job's name follows from its definition and the submission's token. Whether it is there is asked
before it is made, and again after an error that leaves that open. Authority: azure-ai-ml 1.35, as
tests/servers/azure/rest.py has seen it ask. No workspace has."""

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
from rekindle.platforms import submission
from rekindle.platforms.cache_diff import CacheKey, of_bundle
from rekindle.platforms.submission import BUG, Definition, RunTag, SubmittedRun, not_installed
from rekindle.spec.platforms import AzureMLSpec

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.core.credentials import TokenCredential

_problem = submission.problems_in(__file__)
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
_READ = re.compile(r"parent\.jobs\.(\w+)\.outputs")
_VALUE = re.compile(r"\$\{\{parent\.inputs\.(\w+)\}\}")


def submit(definition: Definition, place: AzureMLSpec, mark: RunTag) -> SubmittedRun:
    name = run_name(definition, mark.token)
    with connected(place) as client:
        if found := find(client.jobs, name):
            return SubmittedRun(name, found.studio_url or "", anew=False)
        made = _created(client, name, definition, mark.tags())
        return SubmittedRun(name, made.studio_url or "")


def run_name(definition: Definition, token: str) -> str:
    job = definition.entry.removesuffix(SUFFIX)
    return f"{job[:80]}-{submission.digest_of(definition.files, token)}"


def where(place: AzureMLSpec) -> str:
    return f"workspace {place.workspace} of {place.resource_group} ({place.subscription})"


def workspace_path(place: AzureMLSpec) -> str:
    """The workspace's name in Azure Resource Manager."""
    group = f"/subscriptions/{place.subscription}/resourceGroups/{place.resource_group}"
    return f"{group}/providers/Microsoft.MachineLearningServices/workspaces/{place.workspace}"


@contextlib.contextmanager
def connected(place: AzureMLSpec) -> Iterator["MLClient"]:
    """The SDK's client; what it raises becomes a PlatformError, what it prints is dropped."""
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
    """Who asks, without the SDK, which takes a second to import; PlatformError for Azure's."""
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
    """A client of Azure's REST APIs, with a token for `resource`, that repeats requests."""
    from azure.core import PipelineClient
    from azure.core.pipeline.policies import BearerTokenCredentialPolicy, RetryPolicy

    who = BearerTokenCredentialPolicy(credential, f"{resource}/.default")
    return PipelineClient(ARM, policies=[RetryPolicy(**PATIENCE), who])


def find(kind: Any, name: str) -> Any:
    """A job or a schedule, whose client is `kind`; None where the workspace has none."""
    from azure.core.exceptions import ResourceNotFoundError

    try:
        return kind.get(name)
    except ResourceNotFoundError as error:
        if _of_the_workspace(error):
            raise
        return None


def _created(client: "MLClient", name: str, definition: Definition, tags: dict[str, str]) -> Any:
    from azure.ai.ml import load_job
    from azure.core.exceptions import AzureError

    with definition.written() as file:
        for pause in (*_PAUSES_SECONDS, None):
            try:
                job = load_job(str(file))
                job.name, job.tags = name, {**(job.tags or {}), **tags}
                return client.jobs.create_or_update(job)
            except AzureError as error:
                if _status(error) in (401, 403):
                    raise
                if found := find(client.jobs, name):  # a repeated call may be told that it is there
                    return found
                if pause is None or not _open(error):
                    raise
                time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _open(error: Exception) -> bool:
    """Whether the same call may yet succeed."""
    from azure.core.exceptions import ServiceRequestError, ServiceResponseError

    if isinstance(error, ServiceRequestError | ServiceResponseError):
        return True
    status = _status(error)
    return status in (408, 409, 429) or status >= 500


def _status(error: Exception) -> int:
    """HTTP's, 0 without an answer."""
    return int(getattr(error, "status_code", None) or 0)


def _of_the_workspace(error: Exception) -> bool:
    """Whether it is not the job that lacks, but where it would be."""
    code = getattr(getattr(error, "error", None), "code", "") or ""
    return code in ("ResourceNotFound", "ResourceGroupNotFound", "SubscriptionNotFound")


def explained(error: Exception, place: AzureMLSpec) -> PlatformError:
    """What Azure says, and what to do about it."""
    from azure.ai.ml.exceptions import MlException
    from azure.core.exceptions import ClientAuthenticationError

    kind, status = PlatformError, _status(error)
    request = getattr(getattr(error, "response", None), "request", None)
    refusing = str(getattr(request, "url", "")).partition("?")[0]
    name = {
        401: "login",
        403: "storage" if ".blob." in refusing else "role",
        404: "no_workspace" if _of_the_workspace(error) else "missing",
    }.get(status, "misfit" if isinstance(error, MlException) else "rejected")
    if isinstance(error, ClientAuthenticationError):
        name = "login"
    elif name == "rejected" and _open(error):
        kind, name = UnreachableError, "unreachable"
    return kind([_problem(name, what=_said(error), where=where(place), bug=BUG)])


def _said(error: Exception) -> str:
    """The first of what may be many lines, or what the SDK found wrong before it sent anything."""
    text = str(getattr(error, "message", "") or error)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        found = json.loads(text)["errors"]
        return "; ".join(f"{one['path']}: {one['message'].splitlines()[0]}" for one in found)
    return first_line(error, text)


def steps(definition: Definition) -> tuple[PlannedStep, ...]:
    """The steps by name, as they may begin: on which cluster, or on machines of which size."""
    jobs, found = _job_of(definition)["jobs"], []
    needs = {name: _READ.findall(str(command["inputs"])) for name, command in jobs.items()}
    for name in graphlib.TopologicalSorter(needs).static_order():
        resources = jobs[name]["resources"]
        cluster = jobs[name].get("compute", "").removeprefix("azureml:")
        machine = f"cluster {cluster}" if cluster else resources["instance_type"]
        spot = jobs[name].get("queue_settings", {}).get("job_tier") == "spot"
        found.append(PlannedStep(name, machine, resources["instance_count"], spot))
    return tuple(found)


def images(definition: Definition) -> frozenset[str]:
    jobs = _job_of(definition)["jobs"].values()
    return frozenset(one["component"]["environment"]["image"] for one in jobs)


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """The steps as the cache sees them: a deterministic component is reused where itself, its
    values and the places of its inputs are the same."""
    job = _job_of(Definition(files))
    found = {name: _unit(name, command, job, files) for name, command in job["jobs"].items()}
    order = graphlib.TopologicalSorter({name: unit.places for name, unit in found.items()})
    return tuple(found[name] for name in order.static_order())


def _unit(
    name: str, command: dict[str, Any], job: Mapping[str, Any], files: Mapping[str, bytes]
) -> CacheKey:
    component, inputs = command["component"], command["inputs"]
    matches = {where: _VALUE.fullmatch(str(text)) for where, text in inputs.items()}
    values = {where: job["inputs"][match[1]] for where, match in matches.items() if match}
    others = {w: text for w, text in inputs.items() if w not in values}
    rest = {k: v for k, v in component.items() if k not in ("code", "environment")}
    parts = {
        "image": json.dumps(component["environment"]),
        "interface": json.dumps([rest, others], sort_keys=True),
        **{f"parameter `{where}`": json.dumps(value) for where, value in values.items()},
        **of_bundle(component["code"].removeprefix("./"), files),
    }
    reads = tuple(dict.fromkeys(_READ.findall(json.dumps(others))))
    return CacheKey(name, bool(component["is_deterministic"]), parts, reads)


def _job_of(definition: Definition) -> dict[str, Any]:
    return dict(yaml.load(definition.text, LOADER))  # noqa: S506 - the safe one
