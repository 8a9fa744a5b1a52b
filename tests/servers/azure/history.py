"""Run history of a workspace that is played (rest.py): records of its jobs and their steps, in
pages of two, the files that steps write, their outputs, and the datastore where those lie.

Every record is one of the SDK's own models. Tests say what steps do (`step`), print (`printed`) and
leave (`left`); files are handed out by the signature of the address that was asked for.

Authority: the run history and dataset clients of azure-ai-ml 1.35.2."""

from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING, Any

from tests.servers.tls_hosts import Answer, Asked

if TYPE_CHECKING:
    from tests.servers.azure.rest import Workspace

API = "https://westeurope.api.azureml.ms"
DISCOVERY = f"{API}/discovery/workspaces/1"
STORE, CONTAINER = "workspaceblobstore", "azureml-blobstore"
ACCOUNT = "https://account.blob.core.windows.net"
SIGNATURE = "sv=2025-01-01&sr=c&sig=of-this-store"
_LOGS = "azureml"  # another container


class History:
    """What happened in the workspace."""

    def __init__(self, workspace: Workspace) -> None:
        from azure.ai.ml._restclient.runhistory import models

        self.workspace, self.models = workspace, models
        self.steps: dict[str, list[Any]] = {}  # by job
        self.files: dict[str, list[str]] = {}  # names of logs by step
        self.denied = False  # whether nobody may read the datastore

    # what a test has happen

    def step(self, job: str, name: str, status: str, why: str = "", **more: Any) -> str:
        """What the history says from now on of a step of the job; the step's id."""
        steps = self.steps.setdefault(job, [])
        found = next((one for one in steps if one.display_name == name), None)
        if found is None:
            id = f"{len(steps):08d}-0000-0000-0000-{abs(hash(job)) % 10**12:012d}"
            found = self.models.Run(run_id=id, display_name=name, parent_run_id=job, outputs={})
            steps.append(found)
        found.status = status
        if why:
            root = self.models.RootError(code="UserError", message=why)
            found.error = self.models.RunHistoryErrorResponse(error=root)
        for field, value in more.items():
            setattr(found, field, value)
        return str(found.run_id)

    def printed(self, step: str, text: bytes, file: str = "user_logs/std_log.txt") -> None:
        """Have the step print."""
        names = self.files.setdefault(step, [])
        if file not in names:
            names.append(file)
        key = f"{_LOGS}/ExperimentRun/dcid.{step}/{file}"
        self.workspace.blobs[key] = self.workspace.blobs.get(key, b"") + text

    def left(self, step: str, output: str, files: dict[str, bytes]) -> None:
        """Have the step leave an output."""
        run = next(one for steps in self.steps.values() for one in steps if one.run_id == step)
        asset = f"azureml://locations/westeurope/workspaces/1/data/{step}_{output}/versions/1"
        run.outputs[output] = self.models.TypedAssetReference(asset_id=asset, type="uri_folder")
        for name, content in files.items():
            self.workspace.blobs[f"{CONTAINER}/azureml/{step}/{output}/{name}"] = content

    # the calls

    def answer(self, asked: Asked) -> Answer:
        if f"https://{asked.host}{asked.path}" == DISCOVERY:
            return Answer(200, {"api": API, "history": API, "studio": "https://ml.azure.com"})
        self.workspace.check_token(asked, "authorization", "Bearer ", self.workspace.resources)
        match = re.fullmatch(rf"/(history|data)/v1.0{self.workspace.root}/([\w/-]+)", asked.path)
        kind, *rest = [match[1], *match[2].split("/")] if match else [""]
        match (asked.method, kind, *rest):
            case ("GET", "history", "runs", id):
                return Answer(200, self.run(id).as_dict())
            case ("GET", "history", "runs", id, "children"):
                return self.children(asked, id)
            case ("GET", "history", "runs", id, "details"):
                return self.details(id)
            case ("POST", "history", "rundata"):
                found = self.run(asked.json()["runId"])
                return Answer(200, self.models.GetRunDataResult(run_metadata=found).as_dict())
            case ("POST", "data", "dataversion", "batchGetResolvedUris"):
                return self.resolved(asked.json()["values"])
        raise self.refused(404, f"there is no {asked}")

    def run(self, id: str) -> Any:
        if id in self.workspace.jobs:
            properties = self.workspace.jobs[id]["resource"]["properties"]
            return self.models.Run(run_id=id, status=properties["status"], **self.end(properties))
        for steps in self.steps.values():
            for step in steps:
                if step.run_id == id:
                    return step
        raise self.refused(404, f"Run {id} was not found")

    def end(self, properties: dict[str, Any]) -> dict[str, Any]:
        """When and why a job ended, which only history says."""
        found: dict[str, Any] = {}
        if properties["status"] in ("Completed", "Failed", "Canceled"):
            found["end_time_utc"] = datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC)
        if properties["status"] == "Failed":
            root = self.models.RootError(code="UserError", message="a step of the job failed")
            found["error"] = self.models.RunHistoryErrorResponse(error=root)
        return found

    def children(self, asked: Asked, id: str) -> Answer:
        self.run(id)
        steps = self.steps.get(id, [])
        begin = int(asked.query.get("$continuationtoken", 0))
        more = {}
        if begin + 2 < len(steps):
            more["continuation_token"] = str(begin + 2)
            more["next_link"] = f"https://{asked.host}{asked.path}?$continuationtoken={begin + 2}"
        page = self.models.PaginatedRunList(value=steps[begin : begin + 2], **more)
        return Answer(200, page.as_dict())

    def details(self, id: str) -> Answer:
        self.run(id)
        at = f"{ACCOUNT}/{_LOGS}/ExperimentRun/dcid.{id}"
        files = {name: f"{at}/{name}?{SIGNATURE}" for name in self.files.get(id, [])}
        return Answer(200, self.models.RunDetails(run_id=id, log_files=files).as_dict())

    def resolved(self, assets: list[str]) -> Answer:
        from azure.ai.ml._restclient.dataset_dataplane import models

        found = {}
        for asset in assets:
            step, _, output = asset.split("/")[-3].partition("_")
            path = f"datastores/{STORE}/paths/azureml/{step}/{output}/"
            found[asset] = models.DataUriV2Response(
                uri=f"azureml:/{self.workspace.root.replace('resourceGroups', 'resourcegroups')}/{path}",
                type="uri_folder",
            )
        return Answer(200, models.BatchDataUriResponse(values_property=found).as_dict())

    def datastore(self, asked: Asked, name: str, secrets: bool) -> Answer:
        """The datastore, or a signature for it."""
        if name != STORE:
            raise self.refused(404, f"there is no datastore {name}")
        if secrets:
            return Answer(200, {"secretsType": "Sas", "sasToken": SIGNATURE})
        return Answer(
            200,
            self.workspace.resource(
                f"datastores/{name}",
                {
                    "datastoreType": "AzureBlob",
                    "accountName": "account",
                    "containerName": CONTAINER,
                    "endpoint": "core.windows.net",
                    "protocol": "https",
                    "isDefault": True,
                    "credentials": {"credentialsType": "AccountKey"},
                },
            ),
        )

    def file(self, asked: Asked) -> Answer:
        """A part of a blob, as storage hands it out."""
        key = asked.path.strip("/")
        if self.denied and key.startswith(f"{CONTAINER}/"):
            return Answer(403, None, {"x-ms-error-code": "AuthorizationPermissionMismatch"})
        if (content := self.workspace.blobs.get(key)) is None:
            return Answer(404, None, {"x-ms-error-code": "BlobNotFound"})
        headers = {
            "ETag": '"0x1"',
            "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT",
            "x-ms-blob-type": "BlockBlob",
            "Content-Type": "application/octet-stream",
        }
        given = asked.headers.get("x-ms-range", asked.headers.get("range", ""))
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", given)
        if match is None:
            return Answer(200, content, headers)
        begin, end = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
        if begin >= len(content):
            whole = {"Content-Range": f"bytes */{len(content)}"}
            return Answer(416, None, {"x-ms-error-code": "InvalidRange", **whole})
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
        return Answer(206, content[begin : end + 1], headers)

    def refused(self, status: int, message: str) -> Exception:
        from tests.servers.azure.rest import Refused

        return Refused(status, "UserError", message)
