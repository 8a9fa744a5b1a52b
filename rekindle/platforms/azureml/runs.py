"""A pipeline job of Azure ML: its steps, what they print and leave, stopping it, and trying again
what failed.

Steps are the job's children, by the names that the definition has for them; one is there from when
it is queued. What a step left is read from its own result (mounted.py says what lies there), which
also says that its condition did not hold: the service sees a step that succeeded. Azure ML tries
nothing again in place, so to resume is a new job of the same definition: what succeeded is reused,
training goes on from its checkpoints.

What azure-ai-ml asks for itself and shows no further is asked of it here, in the last functions:
its public `jobs.list(parent_job_name=...)` leaves out when a step began and why it failed,
`jobs.stream` prints, `jobs.download` fetches whole outputs.

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
from rekindle.platforms.mounted import RESULT, place_of
from rekindle.platforms.snapshot import Log, RunSnapshot, moment, states_of, step_times
from rekindle.platforms.submission import Definition, RunTag, SubmittedRun, check_resumable
from rekindle.records import ArtifactRecord, StepRecord
from rekindle.spec.platforms import AzureMLSpec

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.storage.blob import BlobClient

_RUNS, _STEPS, _REASONS = states_of(__file__)
_REUSED, _FROM = "azureml.isreused", "azureml.reusedrunid"
_PRINTED = re.compile(r"user_logs/std_log(?:_process_(\d+))?\.txt")
_RESULT = RESULT.replace("-", "_")
Record = dict[str, Any]
_VERSION = "2024-04-01"
_PATH = re.compile(r"azureml:/.*/datastores/([^/]+)/paths/(.+)")
_TRIES, PAUSE_SECONDS = 4, 2


def describe(place: AzureMLSpec, id: str) -> RunSnapshot:
    (job, children), now = _records(place, id), datetime.datetime.now(datetime.UTC)
    status = _RUNS.get(job["status"], "running")
    steps = [_step(child, now) for child in children]
    if status in snapshot.ENDED_RUN:
        with connected(place) as client:
            steps = [_if_it_ran(client, step) for step in steps]
    # that some steps failed is not news where one says why
    error = "" if any(step.status == "failed" for step in steps) else _why(job)
    ended = moment(job, "endTimeUtc") if status in snapshot.ENDED_RUN else None
    return RunSnapshot(status, tuple(steps), error, ended)


def read_log(place: AzureMLSpec, id: str, step: StepRecord, cursor: str) -> Log:
    """The lines since; of several machines with their rank, an unfinished one when it ends."""
    if not step.log:
        return Log("", cursor)
    seen: dict[str, int] = json.loads(cursor or "{}")
    text = list[str]()
    with connected(place) as client:
        listed = sorted((_runs(client).get_run_details(step.log).log_files or {}).items())
        files = {match: url for name, url in listed if (match := _PRINTED.fullmatch(name))}
        for match, url in files.items():
            more = _since(url, seen.get(match[0], 0))
            if step.status not in snapshot.ENDED_STEP:
                more = more[: more.rfind(b"\n") + 1]
            seen[match[0]] = seen.get(match[0], 0) + len(more)
            before = f"[node {int(match[1] or 0)}] " if len(files) > 1 else ""
            text += [f"{before}{line}\n" for line in more.decode(errors="replace").splitlines()]
    return Log("".join(text), json.dumps(seen))


def cancel(place: AzureMLSpec, id: str) -> None:
    with connected(place) as client:
        if _status_of(client, id) in (*_RUNS, "CancelRequested"):
            return
        try:
            client.jobs.begin_cancel(id, polling=False)
        except Exception:  # it may have ended meanwhile
            if _status_of(client, id) not in (*_RUNS, "CancelRequested"):
                raise


def resume(definition: Definition, place: AzureMLSpec, id: str, mark: RunTag) -> SubmittedRun:
    """A new job of the same definition, made once for one mark."""
    with connected(place) as client:
        status = _status_of(client, id)
    check_resumable(_RUNS.get(status), f"the job is {status}", where(place))
    return submit(definition, place, mark)


def artifacts(place: AzureMLSpec, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
    """What the step left, with its metadata, at `azureml://`."""
    with connected(place) as client:
        made = _outputs(client, step.log) if step.log else {}
        told = _result(client, made)
    names = identifiers(told.get("artifacts", {}))
    found = dict[str, ArtifactRecord]()
    for name, artifact in told.get("artifacts", {}).items():
        if names[name] in made:
            uri = place_of(artifact, made[names[name]].rstrip("/"))
            found[name] = ArtifactRecord(uri=uri, metadata=artifact.get("metadata", {}))
    return found


def read(place: AzureMLSpec, uri: str) -> bytes:
    with connected(place) as client:
        return _content(client, uri)


def _status_of(client: MLClient, id: str) -> str:
    found: Any = client.jobs.get(id).status
    return str(getattr(found, "value", found))


def _step(child: Record, now: datetime.datetime) -> StepRecord:
    said, more = child.get("status", ""), child.get("properties") or {}
    reused = more.get(_REUSED) == "true"
    source = more.get(_FROM) if reused else None
    began = moment(child, "startTimeUtc")
    return StepRecord(
        name=child.get("displayName", ""),
        status=_STEPS.get(said, "running"),
        cached=reused,
        reason="taken from an earlier job" if reused else _REASONS.get(said, ""),
        attempts=int(not reused and began is not None),
        error=_why(child),
        log=source or child["runId"],
        **step_times(began, moment(child, "endTimeUtc"), now),
    )


def _if_it_ran(client: MLClient, step: StepRecord) -> StepRecord:
    """With what its own result says: a step whose condition did not hold was skipped."""
    if step.status != "succeeded":
        return step
    try:
        told = _result(client, _outputs(client, step.log))
    except Exception as error:
        if getattr(error, "status_code", None) == 403:
            return step  # the caller may not read: it succeeded, as far as the service knows
        raise
    if "skipped" not in told:
        return step
    return step.model_copy(update={"status": "skipped", "reason": "its condition does not hold"})


def _result(client: MLClient, made: Mapping[str, str]) -> dict[str, Any]:
    """What mounted.py left; nothing where there is none."""
    with contextlib.suppress(FileNotFoundError):
        if where := made.get(_RESULT):
            return dict(json.loads(_content(client, f"{where.rstrip('/')}/result.json")))
    return {}


def _why(record: Record) -> str:
    error = (record.get("error") or {}).get("error") or {}
    return str(error.get("message") or "").strip()


def _records(place: AzureMLSpec, id: str) -> tuple[Record, list[Record]]:
    """A job and its steps in the run history, those that are there by now, as JSON."""
    with service.logged_in(place) as credential, service.sender(credential) as client:
        from azure.core.rest import HttpRequest

        def get(url: str, **query: str) -> Record:
            request = HttpRequest("GET", url, params=query)
            response = client.send_request(request, read_timeout=service.PATIENCE["read_timeout"])
            response.raise_for_status()
            return dict(response.json())

        root = service.workspace_path(place)
        about = get(f"{service.ARM}{root}", **{"api-version": _VERSION})["properties"]
        url = f"{get(about['discoveryUrl'])['history']}/history/v1.0{root}/runs/{id}"
        job, steps, token = get(url), list[Record](), {"$top": "100"}
        while token:
            page = get(f"{url}/children", **token)
            steps += page.get("value", ())
            following = page.get("continuationToken")
            token = {"$continuationtoken": following} if following else {}
        return job, steps


def _outputs(client: MLClient, id: str) -> dict[str, str]:
    """Where a step's outputs lie, by the names that they have there: `azureml://...`."""
    from azure.ai.ml.operations._job_ops_helper import get_job_output_uris_from_dataplane

    jobs: Any = client.jobs
    datasets, models = jobs._dataset_dataplane_operations, jobs._model_dataplane_operations
    return dict(get_job_output_uris_from_dataplane(id, _runs(client), datasets, models))


def _content(client: MLClient, uri: str) -> bytes:
    """A file in a datastore; FileNotFoundError."""
    from azure.ai.ml._artifacts._artifact_utilities import get_datastore_info
    from azure.core.exceptions import ResourceNotFoundError
    from azure.storage.blob import BlobClient

    if (match := _PATH.fullmatch(uri)) is None:
        raise FileNotFoundError(uri)
    store = get_datastore_info(client.datastores, match[1])
    account = store["account_url"].replace(".dfs.", ".blob.")  # the same files, by another protocol
    with BlobClient(
        account,
        store["container_name"],
        match[2],
        credential=store["credential"],
        retry_policy=_patience(),
    ) as blob:
        try:
            return bytes(blob.download_blob().readall())
        except ResourceNotFoundError:
            raise FileNotFoundError(uri) from None


def _since(url: str, offset: int) -> bytes:
    """What a file that grows holds after its first `offset` bytes."""
    from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
    from azure.storage.blob import BlobClient

    blob: BlobClient
    with BlobClient.from_blob_url(url, retry_policy=_patience()) as blob:
        try:
            return bytes(blob.download_blob(offset=offset).readall())
        except ResourceNotFoundError:
            return b""
        except HttpResponseError as error:
            if error.status_code == 416:  # nothing yet
                return b""
            raise


def _runs(client: MLClient) -> Any:
    """The SDK's own client of run history, whose address it asks for first."""
    from azure.core.exceptions import ServiceResponseError

    try:
        return client.jobs._runs_operations
    except (KeyError, ValueError) as error:  # it takes any answer for the addresses
        raise ServiceResponseError("the workspace does not say where its history is") from error


def _patience() -> Any:
    from azure.storage.blob import LinearRetry

    return LinearRetry(backoff=PAUSE_SECONDS, retry_total=_TRIES, random_jitter_range=0)
