"""A pipeline job of Azure ML: its steps, what they print and leave, stopping it, and
trying again what failed.

Steps are the job's children, by the names that the definition has for them; one is there
from when it is queued. What a step left is read from its own result (mounted.py says what
lies there), which also says that its condition did not hold: the service sees a step that
succeeded. Azure ML tries nothing again in place, so to resume is a new job of the same
definition: what succeeded is reused, training goes on from its checkpoints.

What azure-ai-ml asks for itself and shows no further is asked of it here, in the last
functions: its public `jobs.list(parent_job_name=...)` leaves out when a step began and
why it failed, `jobs.stream` prints, `jobs.download` fetches whole outputs.

Authority: azure-ai-ml 1.35.2, its constants of run history and reuse, RunOperations,
get_job_output_uris_from_dataplane and get_datastore_info; learn.microsoft.com/azure/
machine-learning/how-to-log-view-metrics (user_logs). No workspace has been asked."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rekindle.platforms import snapshot
from rekindle.platforms.azureml import client as service
from rekindle.platforms.azureml.client import connected, submit, where
from rekindle.platforms.azureml.compile import identifiers
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.logs import LogPiece, read_streams
from rekindle.platforms.mounted import RESULT, place_of
from rekindle.platforms.snapshot import RunSnapshot, moment, step_times
from rekindle.platforms.submission import (
    Definition,
    RunTag,
    SubmittedRun,
    check_resumable,
)
from rekindle.protojson import Json
from rekindle.records import ArtifactRecord, RunStatus, StepRecord, StepStatus

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.storage.blob import BlobClient, LinearRetry

_RUN_STATES: Mapping[str, RunStatus] = {
    "Completed": "succeeded",
    "Failed": "failed",
    "Canceled": "cancelled",
}
_STEP_STATES: Mapping[str, StepStatus] = {
    "NotStarted": "pending",
    "Queued": "pending",
    "Completed": "succeeded",
    "Failed": "failed",
    "Canceled": "cancelled",
}
_REASONS = {
    "Queued": "waits for a machine",
    "Provisioning": "its machine is being made",
    "Preparing": "its image is being fetched",
    "NotResponding": "its machine says nothing",
}
# properties of a child that an earlier job's stands for
_IS_REUSED = "azureml.isreused"
_REUSED_FROM = "azureml.reusedrunid"
_LOG_FILE = re.compile(r"user_logs/std_log(?:_process_(\d+))?\.txt")  # with the node's rank
_RESULT = RESULT.replace("-", "_")
_API_VERSION = "2024-04-01"
_DATASTORE_URI = re.compile(r"azureml:/.*/datastores/([^/]+)/paths/(.+)")
_TRIES = 4
PAUSE_SECONDS = 2


def describe(place: AzureMLSpec, id: str) -> RunSnapshot:
    job, children = _history(place, id)
    now = datetime.datetime.now(datetime.UTC)
    status = _RUN_STATES.get(job["status"], "running")
    has_ended = status in snapshot.ENDED_RUN
    steps = [_step_record(child, now) for child in children]
    # results are read once, when the run is over: each is a download
    if has_ended:
        with connected(place) as client:
            steps = [_skipped_or_same(client, step) for step in steps]
    # that some steps failed is not news where one says why
    error = _error_of(job)
    if any(step.status == "failed" for step in steps):
        error = ""
    ended = moment(job, "endTimeUtc") if has_ended else None
    return RunSnapshot(status, tuple(steps), error, ended)


def read_log(place: AzureMLSpec, id: str, step: StepRecord, cursor: str) -> LogPiece:
    """The lines since; of several machines with their rank, an unfinished one when it
    ends."""
    if not step.log:
        return LogPiece("", cursor)
    with connected(place) as client:
        urls = dict(_run_operations(client).get_run_details(step.log).log_files or {})
        machines = {}
        for name in sorted(urls):
            match = _LOG_FILE.fullmatch(name)
            if match:
                machines[name] = f"node {int(match[1] or 0)}"

        def read_since(name: str, offset_bytes: int) -> tuple[list[str], int]:
            content = _content_since(urls[name], offset_bytes)
            if step.status not in snapshot.ENDED_STEP:
                content = content[: content.rfind(b"\n") + 1]  # whole lines
            lines = content.decode(errors="replace").splitlines()
            return lines, offset_bytes + len(content)

        return read_streams(machines, cursor, 0, read_since)


def cancel(place: AzureMLSpec, id: str) -> None:
    with connected(place) as client:
        if _is_ending(client, id):
            return
        try:
            client.jobs.begin_cancel(id, polling=False)
        except Exception:  # it may have ended meanwhile
            if not _is_ending(client, id):
                raise


def resume(definition: Definition, place: AzureMLSpec, id: str, mark: RunTag) -> SubmittedRun:
    """A new job of the same definition, made once for one mark."""
    with connected(place) as client:
        state = _state(client, id)
    check_resumable(_RUN_STATES.get(state), f"the job is {state}", where(place))
    return submit(definition, place, mark)


def artifacts(place: AzureMLSpec, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
    """What the step left, with its metadata, at `azureml://`."""
    with connected(place) as client:
        uris = _output_uris(client, step.log) if step.log else {}
        result = _result(client, uris)
    artifacts = result.get("artifacts", {})
    output_names = identifiers(artifacts)
    records = {}
    for name, artifact in artifacts.items():
        output_uri = uris.get(output_names[name])
        if output_uri is not None:
            uri = place_of(artifact, output_uri.rstrip("/"))
            records[name] = ArtifactRecord(uri=uri, metadata=artifact.get("metadata", {}))
    return records


def read(place: AzureMLSpec, uri: str) -> bytes:
    """What a file of a datastore holds; FileNotFoundError where there is none."""
    with connected(place) as client:
        return _content(client, uri)


def _state(client: MLClient, id: str) -> str:
    status = client.jobs.get(id).status
    return str(getattr(status, "value", status))  # an enum, or plain text


def _is_ending(client: MLClient, id: str) -> bool:
    """Whether the job has ended or is being cancelled."""
    return _state(client, id) in (*_RUN_STATES, "CancelRequested")


def _step_record(child: Json, now: datetime.datetime) -> StepRecord:
    state = child.get("status", "")
    properties = child.get("properties") or {}
    is_reused = properties.get(_IS_REUSED) == "true"
    began = moment(child, "startTimeUtc")
    reason = _REASONS.get(state, "")
    attempts = 0 if began is None else 1
    earlier = None
    if is_reused:
        reason = "taken from an earlier job"
        attempts = 0
        earlier = properties.get(_REUSED_FROM)
    return StepRecord(
        name=child.get("displayName", ""),
        status=_STEP_STATES.get(state, "running"),
        cached=is_reused,
        reason=reason,
        attempts=attempts,
        error=_error_of(child),
        log=earlier or child["runId"],  # what it printed and left is the earlier one's
        **step_times(began, moment(child, "endTimeUtc"), now),
    )


def _skipped_or_same(client: MLClient, step: StepRecord) -> StepRecord:
    """The step with what its own result says:
    where its condition did not hold it was skipped."""
    if step.status != "succeeded":
        return step
    try:
        result = _result(client, _output_uris(client, step.log))
    except Exception as error:
        if getattr(error, "status_code", None) == 403:
            return step  # the caller may not read: it succeeded, as far as the service knows
        raise
    if "skipped" not in result:
        return step
    return step.model_copy(update={"status": "skipped", "reason": "its condition does not hold"})


def _result(client: MLClient, output_uris: Mapping[str, str]) -> Json:
    """The result that mounted.py left; empty where there is none."""
    folder = output_uris.get(_RESULT)
    if not folder:
        return {}
    with contextlib.suppress(FileNotFoundError):
        return dict(json.loads(_content(client, f"{folder.rstrip('/')}/result.json")))
    return {}


def _error_of(record: Json) -> str:
    """The error's message of a job or a child; "" where it has none."""
    error = (record.get("error") or {}).get("error") or {}
    return str(error.get("message") or "").strip()


def _history(place: AzureMLSpec, id: str) -> tuple[Json, list[Json]]:
    """A job and its steps in the run history, those that are there by now, as JSON."""
    with service.logged_in(place) as credential, service.sender(credential) as client:
        from azure.core.rest import HttpRequest

        def get(url: str, **query: str) -> Json:
            request = HttpRequest("GET", url, params=query)
            response = client.send_request(request, read_timeout=service.PATIENCE["read_timeout"])
            response.raise_for_status()
            return dict(response.json())

        root = service.workspace_path(place)
        workspace = get(f"{service.ARM}{root}", **{"api-version": _API_VERSION})
        addresses = get(workspace["properties"]["discoveryUrl"])
        url = f"{addresses['history']}/history/v1.0{root}/runs/{id}"
        job = get(url)
        children: list[Json] = []
        query = {"$top": "100"}
        while query:
            page = get(f"{url}/children", **query)
            children += page.get("value", ())
            token = page.get("continuationToken")
            query = {"$continuationtoken": token} if token else {}
        return job, children


def _output_uris(client: MLClient, id: str) -> dict[str, str]:
    """Where a step's outputs lie, by the names that they have there: `azureml://...`."""
    from azure.ai.ml.operations._job_ops_helper import get_job_output_uris_from_dataplane

    uris = get_job_output_uris_from_dataplane(
        id,
        _run_operations(client),
        client.jobs._dataset_dataplane_operations,
        client.jobs._model_dataplane_operations,
    )
    return dict(uris)


def _content(client: MLClient, uri: str) -> bytes:
    """A file in a datastore; FileNotFoundError."""
    from azure.ai.ml._artifacts._artifact_utilities import get_datastore_info
    from azure.core.exceptions import ResourceNotFoundError
    from azure.storage.blob import BlobClient

    match = _DATASTORE_URI.fullmatch(uri)
    if match is None:
        raise FileNotFoundError(uri)
    datastore, path = match.groups()
    store = get_datastore_info(client.datastores, datastore)
    account = store["account_url"].replace(".dfs.", ".blob.")  # the same files, by another protocol
    with BlobClient(
        account,
        store["container_name"],
        path,
        credential=store["credential"],
        retry_policy=_retry_policy(),
    ) as blob:
        try:
            return bytes(blob.download_blob().readall())
        except ResourceNotFoundError:
            raise FileNotFoundError(uri) from None


def _content_since(url: str, offset: int) -> bytes:
    """What a file that grows holds after its first `offset` bytes."""
    from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
    from azure.storage.blob import BlobClient

    blob: BlobClient
    with BlobClient.from_blob_url(url, retry_policy=_retry_policy()) as blob:
        try:
            return bytes(blob.download_blob(offset=offset).readall())
        except ResourceNotFoundError:
            return b""
        except HttpResponseError as error:
            if error.status_code == 416:  # nothing yet
                return b""
            raise


def _run_operations(client: MLClient) -> Any:
    """The SDK's own client of run history, whose address it asks for first."""
    from azure.core.exceptions import ServiceResponseError

    try:
        return client.jobs._runs_operations
    except (KeyError, ValueError) as error:  # it takes any answer for the addresses
        raise ServiceResponseError("the workspace does not say where its history is") from error


def _retry_policy() -> LinearRetry:
    from azure.storage.blob import LinearRetry

    return LinearRetry(backoff=PAUSE_SECONDS, retry_total=_TRIES, random_jitter_range=0)
