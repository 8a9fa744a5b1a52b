"""Deployments on Azure ML: a managed online endpoint for a model, and a deployment in it for each
version, which runs rekindle's image as a custom container.

What is made is found again by its name, and is ours by its tag `rekindle`. When shares last
changed, and by which event, is a tag of the endpoint, set by the same request. Callers present a
token of Entra. What a container answers other than 200 is 424 for clients, so the status of the
model says who failed.

Authority: the models of azure-ai-ml 1.35.2 (REST 2025-12-01), whose own polling hides why something
failed; learn.microsoft.com/azure/machine-learning/how-to-troubleshoot-online-endpoints, and
azure-monitor/reference/supported-metrics. No workspace has been asked."""

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
from rekindle.errors import PlatformError, RekindleError, RequestError, StepError, first_line
from rekindle.platforms.azureml import client
from rekindle.platforms.azureml.client import where, workspace_path
from rekindle.platforms.submission import problems_in, requests_in
from rekindle.serve.messages import ServedModel, Traffic, is_refusal
from rekindle.serve.staging import stage
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.platforms import AzureMLSpec

WAIT_SECONDS, TRIES, LAG_MINUTES = 3_600.0, 10, 3  # metrics are complete after so many minutes
_VERSION, _SCORING = "2025-12-01", "https://ml.azure.com"
_TAG, _TAG_VERSION, _TAG_SPLIT = "rekindle", "rekindle-version", "rekindle-split"
_STATES = {"Succeeded": "ready", "Deleting": "stopping", "Failed": "failed", "Canceled": "failed"}
_KEPT = ("authMode", "description", "properties", "publicNetworkAccess", "mirrorTraffic")
_problem, _request = problems_in(__file__), requests_in(__file__)


class AzureMLEndpoint:
    """The `Endpoint` of the model `model`; its name there is unique in the region."""

    poll_seconds, sees_latency = 15.0, False

    def __init__(self, place: AzureMLSpec, deploy: DeploySpec, model: str) -> None:
        self.place, self.model = place, model
        self.machine, self.replicas = deploy.machine or place.machine, deploy.replicas
        self.path = f"/onlineEndpoints/{_short(model, _hash(f'{workspace_path(place)}/{model}'))}"
        self.address = f"{self.path.rpartition('/')[2]} in {where(place)}"

    def usd_per_day(self) -> tuple[str, float | None]:
        return per_day(self.machine, self._location, self.replicas)

    def standing(self) -> Mapping[str, tuple[str, int]]:
        shares = (self._endpoint() or {}).get("properties", {}).get("traffic") or {}
        found = {v: (one["name"], _state(one)) for v, one in self._deployments().items()}
        return {v: (_STATES.get(s, "starting"), shares.get(n, 0)) for v, (n, s) in found.items()}

    def create(self, model: ServedModel, number: int) -> None:
        version = f"v{model.version}-{model.digest[:8]}"
        if not self.place.image:
            raise RequestError([_problem("no_image")])
        self._root()
        ours = {"location": self._location, "model": self.model}
        if self._endpoint() is None:
            self.call("PUT", self.path, _request("endpoint", traffic={}, **ours), RequestError)
        if _state(self._settled()) != "Succeeded":
            raise StepError("Azure ML could not make the endpoint", where=self.address)
        path = f"{self.path}/deployments/{_short(self.model, version)}"
        if (other := self._get(path)) and other.get("tags", {}).get(_TAG) != self.model:
            raise self._foreign(path)
        files = self._files(model)
        found = self._asset(f"/models/{_short(self.model, version, 200)}/versions/1", files)
        image = self.place.image
        environment = self._asset(
            f"/environments/{_short(self.model, _hash(str(image)), 200)}/versions/1",
            _request("environment", image=image),
        )
        about = {"replicas": self.replicas, "machine": self.machine, "version": model.version}
        wanted = {"files": found, "environment": environment, **about, **ours}
        self._start(path, _request("deployment", **wanted))

    def ask(self, model: ServedModel, body: dict[str, Any]) -> Any:
        self._endpoint()
        name = _short(self.model, f"v{model.version}-{model.digest[:8]}")
        response = self.call("POST", self.address, body, headers={"azureml-model-deployment": name})
        if response.status_code != 200:
            what = f"smoke: the endpoint answered {response.status_code}: "
            raise StepError(what + response.text()[:300], where=self.address)
        return response.json()

    def split(self, shares: Mapping[str, int], number: int) -> None:
        """See `Endpoint.split`; what the same event set already stays, and is counted on."""
        for _ in range(TRIES + 1):  # the last one only looks
            names = {version: one["name"] for version, one in self._deployments().items()}
            if gone := [version for version in shares if version not in names]:
                raise StepError(f"version {gone[0]} does not run any more", where=self.address)
            wanted = {names[version]: share for version, share in shares.items()}
            there = self._settled()
            properties, tags = there["properties"], there.get("tags", {})
            had = {name: share for name, share in properties.get("traffic", {}).items() if share}
            known = had == wanted and tags.get(_TAG_SPLIT, "").split(" ")[0] == str(number)
            if known and _state(there) == "Succeeded":
                return
            now = datetime.datetime.now(datetime.UTC).isoformat()
            kept = {key: properties[key] for key in _KEPT if properties.get(key) is not None}
            self.call(
                "PUT",
                self.path,
                {
                    "location": there["location"],
                    "tags": {**tags, _TAG_SPLIT: f"{number} {now}"},
                    "identity": {"type": there["identity"]["type"]},
                    "properties": {**kept, "traffic": wanted},
                },
            )
            time.sleep(self.poll_seconds)
        raise PlatformError([_problem("contended", where=self.address, wanted=wanted, had=had)])

    def observe(self) -> Mapping[str, Traffic]:
        """See `Endpoint.observe`: of whole minutes that the metrics have for certain."""
        names = self._deployments()
        counts = {version: [0.0, 0.0, 0.0] for version in names}
        split = (self._endpoint() or {}).get("tags", {}).get(_TAG_SPLIT, "")
        minute, now = datetime.timedelta(minutes=1), datetime.datetime.now(datetime.UTC)
        since = datetime.datetime.fromisoformat(split.partition(" ")[2]) if split else now
        begin, end = (
            f"{at:%Y-%m-%dT%H:%M:00Z}" for at in (since + minute, now - LAG_MINUTES * minute)
        )
        if begin < end:
            query = _request("metrics", timespan=f"{begin}/{end}")
            path = f"{self.path}/providers/Microsoft.Insights/metrics"
            found = self.call("GET", path, query=query).json()
            versions = {one["name"]: version for version, one in names.items()}
            for series in (one for metric in found["value"] for one in metric["timeseries"]):
                pairs = [(one["name"]["value"], one["value"]) for one in series["metadatavalues"]]
                of = {name.lower(): value for name, value in pairs}
                if (version := versions.get(of["deployment"])) is not None:
                    requests = sum(point.get("average") or 0 for point in series["data"])
                    failed = _failed(of["statuscode"], of["modelstatuscode"])
                    counts[version][0] += requests
                    counts[version][1] += requests * failed
                    if _refused(of["statuscode"], of["modelstatuscode"]):
                        counts[version][2] += requests
        traffic = {}
        for version, (all_, bad, refused) in counts.items():
            traffic[version] = Traffic(round(all_), round(bad), (), refused=round(refused))
        return traffic

    def retain(self, versions: set[str], number: int) -> None:
        for version, one in self._deployments().items():
            if version not in versions:
                self._remove(f"{self.path}/deployments/{one['name']}")

    def delete(self) -> None:
        """See `Endpoint.delete`; models and environments stay, which cost nothing."""
        if self._endpoint() is not None:
            self._remove(self.path)

    def publish(self, model: ServedModel, lineage: Mapping[str, str]) -> str:
        """See `Publisher.publish`: versions with our numbers, the champion's stage Production."""
        name = f"/models/{_plain(self.model)}/versions"
        path, mark = f"{name}/{model.version}", model.digest[:32]
        found = self._get(path)
        tags = {_TAG: self.model, "digest": mark, **{k: v[:256] for k, v in lineage.items() if v}}
        if found is None:
            new = {**self._files(model), "tags": tags, "stage": "Production"}
            self.call("PUT", path, {"properties": new}, RequestError)
        elif (had := found["properties"]).get("tags", {}).get(_TAG) != self.model:
            raise self._foreign(path)
        elif had["tags"].get("digest") != mark:
            about = {"version": model.version, "name": _plain(self.model)}
            raise RequestError([_problem("other_version", where=where(self.place), **about)])
        for one in self._all(name):
            had, is_champion = one["properties"], one["name"] == model.version
            wanted = {"stage": "Production" if is_champion else "Archived"}
            if had.get("tags", {}).get(_TAG) == self.model and not wanted.items() <= had.items():
                kept = {k: had[k] for k in ("modelType", "modelUri", "tags")} | wanted
                self.call("PUT", f"{name}/{one['name']}", {"properties": kept}, RequestError)
        return workspace_path(self.place) + path

    def _root(self) -> SplitResult:
        """The folder of storage. RequestError where it is not one in Azure."""
        root = urlsplit(self.place.artifact_root)
        if root.scheme not in ("abfs", "abfss") or not root.username:
            raise RequestError([_problem("no_root")])
        return root

    def _files(self, model: ServedModel) -> dict[str, Any]:
        """A version's files as a model, once they are in a datastore of the workspace."""
        root, staged = self._root(), urlsplit(stage(model, self.place.artifact_root)).path
        store, (account, _, host) = _hash(f"{root.netloc}/{self.model}"), root.netloc.partition(".")
        about = {"account": account.rpartition("@")[2], "host": host.removeprefix("dfs.")}
        body = _request("datastore", container=root.username, **about)
        self._asset(f"/datastores/rekindle_{store}", body)
        uri = workspace_path(self.place).replace("/providers/Microsoft.MachineLearningServices", "")
        path = f"azureml:/{uri}/datastores/rekindle_{store}/paths{staged}"
        return {"modelType": "custom_model", "modelUri": path}

    def _endpoint(self) -> dict[str, Any] | None:
        """What Azure says of our endpoint; None where there is none."""
        if (found := self._get(self.path)) and found.get("tags", {}).get(_TAG) != self.model:
            raise self._foreign(self.path)
        self.address = (found or {}).get("properties", {}).get("scoringUri") or self.address
        return found

    def _deployments(self) -> dict[str, dict[str, Any]]:
        """Our deployments by version."""
        found = self._all(f"{self.path}/deployments")
        ours = [one for one in found if one.get("tags", {}).get(_TAG) == self.model]
        return {one["tags"][_TAG_VERSION]: one for one in ours}

    def _all(self, path: str) -> list[dict[str, Any]]:
        page, found = self._get(path), list[dict[str, Any]]()
        while page:
            found += page["value"]
            page = self._get(page["nextLink"]) if page.get("nextLink") else None
        return found

    def _polls(self) -> Iterator[None]:
        give_up = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < give_up:
            yield
            time.sleep(self.poll_seconds)
        raise StepError(f"Azure ML does not end this in {WAIT_SECONDS:.0f} s", where=self.address)

    def _settled(self) -> dict[str, Any]:
        """The endpoint once no change of it is under way."""
        for _ in self._polls():
            if (found := self._endpoint()) is None or _state(found) in _STATES:
                break
        return found or {"properties": {}}

    def _start(self, path: str, body: dict[str, Any]) -> None:
        """Have the deployment be there and ready; one that failed before is made again."""
        operation = ""
        for _ in self._polls():
            if (state := _state(self._get(path))) == "Succeeded":
                return
            if state in ("", "Failed", "Canceled"):
                if operation:
                    break
                made = self.call("PUT", path, body, StepError)
                operation = made.headers.get("Azure-AsyncOperation", "")
        reason = ((self._get(operation) or {}).get("error") or {}).get("message") or state
        log = self.call("POST", f"{path}/getLogs", {"containerType": "InferenceServer", "tail": 50})
        end = log.json()["content"][-1_500:] if log.status_code == 200 else ""
        raise StepError(f"{path.rpartition('/')[2]} did not start: {reason}\n{end}".rstrip())

    def _remove(self, path: str) -> None:
        for _ in self._polls():
            if not (state := _state(self._get(path))):
                break
            if state != "Deleting":
                self.call("DELETE", path)

    def _asset(self, path: str, properties: dict[str, Any]) -> str:
        """The id of what is there under this name, or is made now."""
        if (found := self._get(path)) is None:
            tagged = {**properties, "tags": {_TAG: self.model}}
            try:
                self.call("PUT", path, {"properties": tagged}, StepError)
            except StepError:  # a repeated call may be told that it is there
                if (found := self._get(path)) is None:
                    raise
        if found and found["properties"].get("tags", {}).get(_TAG) != self.model:
            raise self._foreign(path)
        return workspace_path(self.place) + path

    def _foreign(self, path: str) -> RequestError:
        about = {"path": path, "tag": _TAG, "model": self.model}
        return RequestError([_problem("foreign", where=where(self.place), **about)])

    @functools.cached_property
    def _location(self) -> str:
        return str(self.call("GET", "").json()["location"])

    def _get(self, path: str) -> dict[str, Any] | None:
        response = self.call("GET", path)
        return None if response.status_code == 404 and path else dict(response.json())

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        refused: type[RekindleError] | None = None,
        headers: dict[str, str] | None = None,
        query: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        """The answer, also that nothing is there (404), that another change is under way (409) and
        any to a POST; `refused` is raised where Azure refuses a change for another reason."""
        from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
        from azure.core.rest import HttpRequest

        url = path if "://" in path else f"{client.ARM}{workspace_path(self.place)}{path}"
        given = {"api-version": _VERSION, **query} if "://" not in path else {}
        try:
            there = self._client(client.ARM if url.startswith(client.ARM) else _SCORING)
            response = there.send_request(
                HttpRequest(method, url, params=given, json=body, headers=headers),
                read_timeout=client.PATIENCE["read_timeout"],
                retry_on_methods=("GET", "PUT", "DELETE", "POST"),
            )
            status = response.status_code
            if status in (401, 403):
                raise ClientAuthenticationError(response=response)
            missing = status == 404 and path and method != "PUT"
            if status < 400 or status == 409 or missing or method == "POST":
                return response
            if refused and status < 500 and status not in (408, 429):
                what = first_line(HttpResponseError(response=response))
                raise refused(what, where=where(self.place))
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


def _failed(status: str, of_model: str) -> bool:
    """Whether the version failed requests of these statuses: 424 is what its container did."""
    return status >= "500" or status == "408" or (status == "424" and not of_model.startswith("4"))


def _refused(status: str, of_model: str) -> bool:
    """Whether the version's own server refused requests of these statuses: what Azure refuses
    itself, such as a wrong key (401), has no status of the model."""
    return status == "424" and of_model.isdigit() and is_refusal(int(of_model))


def _state(found: dict[str, Any] | None) -> str:
    return str(found["properties"].get("provisioningState", "")) if found else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.lower().encode()).hexdigest()[:8]


def _plain(model: str) -> str:
    text = re.sub(r"[^a-z0-9]+", "-", model)
    return text if text[0].isalpha() else f"m-{text}"


def _short(model: str, rest: str, most: int = 32) -> str:
    """A name that Azure takes: a letter first, then letters, digits and dashes."""
    return f"{_plain(model)[: most - len(rest) - 1].rstrip('-')}-{rest}"
