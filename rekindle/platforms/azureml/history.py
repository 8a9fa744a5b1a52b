"""What Azure ML's run history knows of a job and its steps, and files in datastores: what
azure-ai-ml asks for itself and shows no further.

Its public `jobs.list(parent_job_name=...)` leaves out when a step began and why it failed,
`jobs.stream` prints, `jobs.download` fetches whole outputs. So this is the one place that reaches
into it.

Authority: RunOperations, get_job_output_uris_from_dataplane and get_datastore_info of azure-ai-ml
1.35.2."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rekindle.platforms.azureml.client import ARM, PATIENCE, logged_in, workspace_path
from rekindle.spec.platforms import AzureMLSpec

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.storage.blob import BlobClient

Record = dict[str, Any]
_VERSION = "2024-04-01"
_PATH = re.compile(r"azureml:/.*/datastores/([^/]+)/paths/(.+)")
_TRIES, PAUSE_SECONDS = 4, 2


def records(place: AzureMLSpec, id: str) -> tuple[Record, list[Record]]:
    """A job and its steps, those that are there by now, as JSON."""
    from azure.core import PipelineClient
    from azure.core.pipeline.policies import BearerTokenCredentialPolicy, RetryPolicy
    from azure.core.rest import HttpRequest

    with logged_in(place) as credential:
        who = BearerTokenCredentialPolicy(credential, f"{ARM}/.default")
        with PipelineClient[Any, Any](ARM, policies=[RetryPolicy(**PATIENCE), who]) as client:

            def get(url: str, **query: str) -> Record:
                request = HttpRequest("GET", url, params=query)
                response = client.send_request(request, read_timeout=PATIENCE["read_timeout"])
                response.raise_for_status()
                found: Record = response.json()
                return found

            root = workspace_path(place)
            about = get(f"{ARM}{root}", **{"api-version": _VERSION})["properties"]
            url = f"{get(about['discoveryUrl'])['history']}/history/v1.0{root}/runs/{id}"
            job, steps, token = get(url), list[Record](), {"$top": "100"}
            while token:
                page = get(f"{url}/children", **token)
                steps += page.get("value", ())
                following = page.get("continuationToken")
                token = {"$continuationtoken": following} if following else {}
            return job, steps


def log_files(client: MLClient, id: str) -> dict[str, str]:
    """Addresses of the files that a step's machines write, by name, good for a while."""
    return dict(_runs(client).get_run_details(id).log_files or {})


def outputs(client: MLClient, id: str) -> dict[str, str]:
    """Where a step's outputs lie, by the names that they have there: `azureml://...`."""
    from azure.ai.ml.operations._job_ops_helper import get_job_output_uris_from_dataplane

    jobs: Any = client.jobs
    found: dict[str, str] = get_job_output_uris_from_dataplane(
        id, _runs(client), jobs._dataset_dataplane_operations,
        jobs._model_dataplane_operations,
    )  # fmt: skip
    return found


def content(client: MLClient, uri: str) -> bytes:
    """A file in a datastore; FileNotFoundError."""
    from azure.ai.ml._artifacts._artifact_utilities import get_datastore_info
    from azure.core.exceptions import ResourceNotFoundError
    from azure.storage.blob import BlobClient

    if (match := _PATH.fullmatch(uri)) is None:
        raise FileNotFoundError(uri)
    store = get_datastore_info(client.datastores, match[1])
    account = store["account_url"].replace(".dfs.", ".blob.")  # the same files, by another protocol
    with BlobClient(
        account, store["container_name"], match[2], credential=store["credential"],
        retry_policy=_patience(),
    ) as blob:  # fmt: skip
        try:
            return bytes(blob.download_blob().readall())
        except ResourceNotFoundError:
            raise FileNotFoundError(uri) from None


def since(url: str, offset: int) -> bytes:
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
