"""Deployments on Azure ML: a managed online endpoint for a model, and a deployment in it
for each version, which runs rekindle's image as a custom container.

What is made is found again by its name, and is ours by its tag `rekindle`. When shares
last changed, and by which event, is a tag of the endpoint, set by the same request.
Callers present a token of Entra. What a container answers other than 200 is 424 for
clients, so the status of the model says who failed.

Authority: the models of azure-ai-ml 1.35.2 (REST 2025-12-01), whose own polling hides why
something failed;
learn.microsoft.com/azure/machine-learning/how-to-troubleshoot-online-endpoints, and
azure-monitor/reference/supported-metrics. No workspace has been asked."""

import dataclasses
import datetime
import functools
import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rekindle.catalog.prices import per_day
from rekindle.errors import (
    PlatformError,
    RekindleError,
    RequestError,
    StepError,
    first_line,
)
from rekindle.platforms.azureml import client
from rekindle.platforms.azureml.client import where, workspace_path
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.ownership import OwnerMark
from rekindle.platforms.polling import polls
from rekindle.protojson import Json
from rekindle.serve.messages import ServedModel, Traffic, is_refusal
from rekindle.serve.staging import stage
from rekindle.spec.deploy import DeploySpec

WAIT_SECONDS = 3_600.0
TRIES = 10
LAG_MINUTES = 3  # metrics are complete after so many minutes
_API_VERSION = "2025-12-01"
_SCORING = "https://ml.azure.com"
_TAG = "rekindle"
_TAG_VERSION = "rekindle-version"
_TAG_SPLIT = "rekindle-split"  # number and time of the last split
_STATES = {
    "Succeeded": "ready",
    "Deleting": "stopping",
    "Failed": "failed",
    "Canceled": "failed",
}
# a PUT replaces the endpoint: these are sent again as they are
_UNCHANGED = (
    "authMode",
    "description",
    "properties",
    "publicNetworkAccess",
    "mirrorTraffic",
)


class AzureMLEndpoint:
    """The `Endpoint` of the model `model`; its name there is unique in the region."""

    poll_seconds = 15.0

    def __init__(self, place: AzureMLSpec, deploy: DeploySpec, model: str) -> None:
        self.place = place
        self.model = model
        self.mark = OwnerMark("tag", _TAG, model)
        self.machine = deploy.machine or place.machine
        self.replicas = deploy.replicas
        # the hash sets it apart from the same model's of other workspaces in the region
        name = _short(model, _hash(f"{workspace_path(place)}/{model}"))
        self.path = f"/onlineEndpoints/{name}"
        self.address = f"{name} in {where(place)}"

    def usd_per_day(self) -> tuple[str, float | None]:
        return per_day(self.machine, self._location, self.replicas)

    def standing(self) -> Mapping[str, tuple[str, int]]:
        endpoint = self._endpoint() or {}
        shares = endpoint.get("properties", {}).get("traffic") or {}
        standing = {}
        for version, deployment in self._deployments().items():
            state = _STATES.get(_state(deployment), "starting")
            standing[version] = (state, shares.get(deployment["name"], 0))
        return standing

    def create(self, model: ServedModel, number: int) -> None:
        version = model.deployed_name
        if not self.place.image:
            raise RequestError(
                "a deployment needs it",
                where="platforms.azureml.image",
                fix="set it to rekindle's image, by digest",
            )
        # both refuse before anything is created
        self._root()
        location = self._location
        if self._endpoint() is None:
            self.call("PUT", self.path, self._endpoint_body(location), RequestError)
        if _state(self._settled()) != "Succeeded":
            raise StepError("Azure ML could not make the endpoint", where=self.address)
        path = f"{self.path}/deployments/{_short(self.model, version)}"
        existing = self._get(path)
        if existing:
            self.mark.check(path, existing.get("tags"), where(self.place))
        files = self._create_asset(
            f"/models/{_short(self.model, version, 200)}/versions/1", self._files(model)
        )
        image = self.place.image
        environment = self._create_asset(
            f"/environments/{_short(self.model, _hash(image), 200)}/versions/1",
            _environment_properties(image),
        )
        body = self._deployment_body(model.version, files, environment, location)
        self._start(path, body)

    def ask(self, model: ServedModel, body: Json) -> Any:
        self._endpoint()  # which sets the address
        deployment = _short(self.model, model.deployed_name)
        headers = {"azureml-model-deployment": deployment}
        response = self.call("POST", self.address, body, headers=headers)
        if response.status_code != 200:
            message = f"smoke: the endpoint answered {response.status_code}: "
            raise StepError(message + response.text()[:300], where=self.address)
        return response.json()

    def split(self, shares: Mapping[str, int], number: int) -> None:
        """See `Endpoint.split`;
        what the same event set already stays, and is counted on."""
        for _ in range(TRIES + 1):  # the last one only looks
            deployments = self._deployments()
            for version in shares:
                if version not in deployments:
                    message = f"version {version} does not run any more"
                    raise StepError(message, where=self.address)
            desired = {deployments[version]["name"]: share for version, share in shares.items()}
            endpoint = self._settled()
            properties = endpoint["properties"]
            traffic = properties.get("traffic", {})
            current = {name: share for name, share in traffic.items() if share}
            split_number = endpoint.get("tags", {}).get(_TAG_SPLIT, "").split(" ")[0]
            is_split = current == desired and split_number == str(number)
            if is_split and _state(endpoint) == "Succeeded":
                return
            self.call("PUT", self.path, _split_body(endpoint, desired, number))
            time.sleep(self.poll_seconds)
        raise PlatformError(
            f"the endpoint does not keep the shares {desired}; it has {current}",
            where=self.address,
            fix="see who else changes it, and run again",
        )

    def observe(self) -> Mapping[str, Traffic]:
        """See `Endpoint.observe`: of whole minutes that the metrics have for certain."""
        deployments = self._deployments()
        endpoint = self._endpoint() or {}
        split = endpoint.get("tags", {}).get(_TAG_SPLIT, "")
        minute = datetime.timedelta(minutes=1)
        now = datetime.datetime.now(datetime.UTC)
        split_at = datetime.datetime.fromisoformat(split.partition(" ")[2]) if split else now
        begin = f"{split_at + minute:%Y-%m-%dT%H:%M:00Z}"
        end = f"{now - LAG_MINUTES * minute:%Y-%m-%dT%H:%M:00Z}"
        counts = {version: _RequestCounts() for version in deployments}
        if begin < end:
            versions = {row["name"]: version for version, row in deployments.items()}
            for series in self._request_series(begin, end):
                labels = {
                    label["name"]["value"].lower(): label["value"]
                    for label in series["metadatavalues"]
                }
                version = versions.get(labels["deployment"])
                if version is None:
                    continue
                requests = sum(point.get("average") or 0 for point in series["data"])
                counts[version].add(requests, labels["statuscode"], labels["modelstatuscode"])
        return {version: count.traffic() for version, count in counts.items()}

    def retain(self, versions: set[str], number: int) -> None:
        for version, deployment in self._deployments().items():
            if version not in versions:
                self._remove(f"{self.path}/deployments/{deployment['name']}")

    def delete(self) -> None:
        """See `Endpoint.delete`; models and environments stay, which cost nothing."""
        if self._endpoint() is not None:  # and is ours
            self._remove(self.path)

    def publish(self, model: ServedModel, lineage: Mapping[str, str]) -> str:
        """See `Publisher.publish`:
        versions with our numbers, the champion's stage Production."""
        versions_path = f"/models/{_plain(self.model)}/versions"
        path = f"{versions_path}/{model.version}"
        digest = model.digest[:32]
        existing = self._get(path)
        if existing is None:
            tags = {**self.mark.tags, "digest": digest}
            tags |= {key: value[:256] for key, value in lineage.items() if value}
            properties = {**self._files(model), "tags": tags, "stage": "Production"}
            self.call("PUT", path, {"properties": properties}, RequestError)
        else:
            tags = existing["properties"].get("tags", {})
            self.mark.check(path, tags, where(self.place))
            if tags.get("digest") != digest:
                raise RequestError(
                    f"version {model.version} of {_plain(self.model)} is another model there",
                    where=where(self.place),
                    fix="a registry that was set up again gives its numbers again: "
                    "name another model",
                )
        for version in self._all(versions_path):
            properties = version["properties"]
            stage_name = "Production" if version["name"] == model.version else "Archived"
            is_ours = self.mark.is_on(properties.get("tags"))
            if is_ours and properties.get("stage") != stage_name:
                changed = {key: properties[key] for key in ("modelType", "modelUri", "tags")}
                changed["stage"] = stage_name
                version_path = f"{versions_path}/{version['name']}"
                self.call("PUT", version_path, {"properties": changed}, RequestError)
        return workspace_path(self.place) + path

    def _endpoint_body(self, location: str) -> Json:
        return {
            "location": location,
            "tags": self.mark.tags,
            "identity": {"type": "SystemAssigned"},
            "properties": {
                "authMode": "AADToken",
                "publicNetworkAccess": "Enabled",
                "traffic": {},
            },
        }

    def _deployment_body(self, version: str, files: str, environment: str, location: str) -> Json:
        """A deployment of a version; `files` and `environment` are ids of assets."""
        return {
            "location": location,
            "tags": {**self.mark.tags, _TAG_VERSION: version},
            "sku": {"name": "Default", "capacity": self.replicas},
            "properties": {
                "endpointComputeType": "Managed",
                "instanceType": self.machine,
                "model": files,
                "environmentId": environment,
                "environmentVariables": {"REKINDLE_SERVE": "1"},
                "requestSettings": {"requestTimeout": "PT60S"},
                "readinessProbe": {
                    "initialDelay": "PT10S",
                    "period": "PT10S",
                    "timeout": "PT10S",
                    "failureThreshold": 180,
                },
            },
        }

    def _request_series(self, begin: str, end: str) -> Iterator[Json]:
        """Requests a minute, a time series for each deployment and status."""
        query = {
            "api-version": "2023-10-01",
            "metricnames": "RequestsPerMinute",
            "timespan": f"{begin}/{end}",
            "interval": "PT1M",
            "aggregation": "Average",
            "top": "1000",
            "$filter": "deployment eq '*' and statusCode eq '*' and modelStatusCode eq '*'",
        }
        path = f"{self.path}/providers/Microsoft.Insights/metrics"
        metrics = self.call("GET", path, query=query).json()
        for metric in metrics["value"]:
            yield from metric["timeseries"]

    def _root(self) -> SplitResult:
        """The folder of storage. RequestError where it is not one in Azure."""
        root = urlsplit(self.place.artifact_root)
        if root.scheme not in ("abfs", "abfss") or not root.username:
            raise RequestError(
                "it needs one",
                where="platforms.azureml.artifact_root",
                fix="set it to abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER",
            )
        return root

    def _files(self, model: ServedModel) -> Json:
        """A version's files as a model, once they are in a datastore of the workspace."""
        root = self._root()
        folder = urlsplit(stage(model, self.place.artifact_root)).path
        store = f"rekindle_{_hash(f'{root.netloc}/{self.model}')}"
        account, _, host = root.netloc.partition(".")
        properties = {
            "datastoreType": "AzureBlob",
            "accountName": account.rpartition("@")[2],
            "containerName": root.username,
            # the same files, by another protocol
            "endpoint": host.removeprefix("dfs."),
            "protocol": "https",
            "credentials": {"credentialsType": "None"},
        }
        self._create_asset(f"/datastores/{store}", properties)
        # paths in a datastore leave the provider out
        provider = "/providers/Microsoft.MachineLearningServices"
        workspace = workspace_path(self.place).replace(provider, "")
        path = f"azureml:/{workspace}/datastores/{store}/paths{folder}"
        return {"modelType": "custom_model", "modelUri": path}

    def _endpoint(self) -> Json | None:
        """What Azure says of our endpoint; None where there is none."""
        endpoint = self._get(self.path)
        if not endpoint:
            return endpoint
        self.mark.check(self.path, endpoint.get("tags"), where(self.place))
        self.address = endpoint.get("properties", {}).get("scoringUri") or self.address
        return endpoint

    def _deployments(self) -> dict[str, Json]:
        """Our deployments by version."""
        deployments = {}
        for deployment in self._all(f"{self.path}/deployments"):
            tags = deployment.get("tags", {})
            if self.mark.is_on(tags):
                deployments[tags[_TAG_VERSION]] = deployment
        return deployments

    def _all(self, path: str) -> list[Json]:
        """All rows of a list, over its pages."""
        rows: list[Json] = []
        page = self._get(path)
        while page:
            rows += page["value"]
            page = self._get(page["nextLink"]) if page.get("nextLink") else None
        return rows

    def _polls(self) -> Iterator[None]:
        """Yields once for each look, with a pause between two; StepError after the
        limit."""
        yield from polls(WAIT_SECONDS, self.poll_seconds)
        message = f"Azure ML does not end this in {WAIT_SECONDS:.0f} s"
        raise StepError(message, where=self.address)

    def _settled(self) -> Json:
        """The endpoint once no change of it is under way."""
        endpoint = None
        for _ in self._polls():
            endpoint = self._endpoint()
            if endpoint is None or _state(endpoint) in _STATES:
                break
        return endpoint or {"properties": {}}

    def _start(self, path: str, body: Json) -> None:
        """Create the deployment and wait until it is ready; one that failed before is
        created again. Raises StepError with the end of its log."""
        operation = ""
        for _ in self._polls():
            state = _state(self._get(path))
            if state == "Succeeded":
                return
            if state in ("", "Failed", "Canceled"):
                if operation:
                    break  # it failed again
                response = self.call("PUT", path, body, StepError)
                operation = response.headers.get("Azure-AsyncOperation", "")
        error = (self._get(operation) or {}).get("error") or {}
        reason = error.get("message") or state
        log = self.call("POST", f"{path}/getLogs", {"containerType": "InferenceServer", "tail": 50})
        log_end = log.json()["content"][-1_500:] if log.status_code == 200 else ""
        name = path.rpartition("/")[2]
        raise StepError(f"{name} did not start: {reason}\n{log_end}".rstrip())

    def _remove(self, path: str) -> None:
        """Delete what is there, and wait until it is gone."""
        for _ in self._polls():
            state = _state(self._get(path))
            if not state:
                break
            if state != "Deleting":
                self.call("DELETE", path)

    def _create_asset(self, path: str, properties: Json) -> str:
        """The id of what is there under this name, or is created now."""
        existing = self._get(path)
        if existing is None:
            tagged = {**properties, "tags": self.mark.tags}
            try:
                self.call("PUT", path, {"properties": tagged}, StepError)
            except StepError:
                # a call whose answer was lost, repeated, is refused since it is there
                existing = self._get(path)
                if existing is None:
                    raise
        if existing:
            self.mark.check(path, existing["properties"].get("tags"), where(self.place))
        return workspace_path(self.place) + path

    @functools.cached_property
    def _location(self) -> str:
        """The workspace's region."""
        return str(self.call("GET", "").json()["location"])

    def _get(self, path: str) -> Json | None:
        """What Azure has at a path; None where it has nothing."""
        response = self.call("GET", path)
        # without a path it is the workspace itself that is missing
        if response.status_code == 404 and path:
            return None
        return dict(response.json())

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        refused: type[RekindleError] | None = None,
        headers: dict[str, str] | None = None,
        query: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        """Azure's response, also that nothing is there (404), that another change is
        under way (409) and any to a POST; `refused` is raised where Azure refuses a
        change for another reason."""
        from azure.core.exceptions import (
            AzureError,
            ClientAuthenticationError,
            HttpResponseError,
        )
        from azure.core.rest import HttpRequest

        url = path
        parameters: dict[str, str] = {}
        if "://" not in path:
            url = f"{client.ARM}{workspace_path(self.place)}{path}"
            parameters = {"api-version": _API_VERSION, **query}
        try:
            pipeline = self._client(client.ARM if url.startswith(client.ARM) else _SCORING)
            response = pipeline.send_request(
                HttpRequest(method, url, params=parameters, json=body, headers=headers),
                read_timeout=client.PATIENCE["read_timeout"],
                # the POSTs here ask for predictions and logs, and change nothing
                retry_on_methods=("GET", "PUT", "DELETE", "POST"),
            )
            status = response.status_code
            if status in (401, 403):
                raise ClientAuthenticationError(response=response)
            is_missing = status == 404 and path and method != "PUT"
            if status < 400 or status == 409 or is_missing or method == "POST":
                return response
            if refused and status < 500 and status not in (408, 429):
                message = first_line(HttpResponseError(response=response))
                raise refused(message, where=where(self.place))
            response.raise_for_status()
        except ClientAuthenticationError as error:  # says nothing of the version
            fix = "az login, and ask for the roles that `rekindle doctor` names"
            raise RequestError(first_line(error), where=where(self.place), fix=fix) from None
        except AzureError as error:
            raise client.explained(error, self.place) from error

    @functools.cache  # noqa: B019 - one command has one endpoint
    def _client(self, resource: str) -> Any:
        with client.logged_in(self.place) as credential:
            return client.sender(credential, resource)


@dataclasses.dataclass
class _RequestCounts:
    """Requests of a version."""

    requests: float = 0.0
    failed: float = 0.0
    refused: float = 0.0

    def add(self, requests: float, status: str, model_status: str) -> None:
        """Count requests that ended with these statuses, of the endpoint and of the
        model."""
        self.requests += requests
        if _failed(status, model_status):
            self.failed += requests
        if _refused(status, model_status):
            self.refused += requests

    def traffic(self) -> Traffic:
        """The counts as whole numbers; the metrics have means of a minute."""
        requests = round(self.requests)
        return Traffic(requests, round(self.failed), (), refused=round(self.refused))


def _environment_properties(image: str) -> Json:
    return {
        "image": image,
        "osType": "Linux",
        "inferenceConfig": {
            "livenessRoute": {"path": "/health/live", "port": 8080},
            "readinessRoute": {"path": "/health/ready", "port": 8080},
            "scoringRoute": {"path": "/predict", "port": 8080},
        },
    }


def _split_body(endpoint: Json, traffic: Mapping[str, int], number: int) -> Json:
    """The endpoint with other shares, and the tag that says since when."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    properties = {}
    for key in _UNCHANGED:
        if endpoint["properties"].get(key) is not None:
            properties[key] = endpoint["properties"][key]
    properties["traffic"] = traffic
    return {
        "location": endpoint["location"],
        "tags": {**endpoint.get("tags", {}), _TAG_SPLIT: f"{number} {now}"},
        "identity": {"type": endpoint["identity"]["type"]},
        "properties": properties,
    }


def _failed(status: str, model_status: str) -> bool:
    """Whether the version failed requests of these statuses:
    424 is what its container did."""
    if status == "424":
        return not model_status.startswith("4")
    return status >= "500" or status == "408"


def _refused(status: str, model_status: str) -> bool:
    """Whether the version's own server refused requests of these statuses: what Azure
    refuses itself, such as a wrong key (401), has no status of the model."""
    return status == "424" and model_status.isdigit() and is_refusal(int(model_status))


def _state(resource: Json | None) -> str:
    """The state of a resource; "" where there is none."""
    if not resource:
        return ""
    return str(resource["properties"].get("provisioningState", ""))


def _hash(text: str) -> str:
    return hashlib.sha256(text.lower().encode()).hexdigest()[:8]


def _plain(model: str) -> str:
    text = re.sub(r"[^a-z0-9]+", "-", model)
    return text if text[0].isalpha() else f"m-{text}"


def _short(model: str, end: str, most: int = 32) -> str:
    """A name that Azure takes: a letter first, then letters, digits and dashes."""
    return f"{_plain(model)[: most - len(end) - 1].rstrip('-')}-{end}"
