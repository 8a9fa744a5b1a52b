"""A deployment on Vertex AI: an endpoint, in which each version is a DeployedModel under an id of
ours. Whatever an interrupted command made, or has under way, is found by its name.

A request cannot choose among the deployed models (PredictRequest has no field for it), so a version
is smoked on a second endpoint of its own. `response_count` has requests by class of status code,
where `prediction_count` has instances and `error_count` also what clients did wrong. Authority:
aiplatform_v1 2.7; cloud.google.com/monitoring/api/metrics_gcp. Untested against a real project."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.catalog.prices import book
from rekindle.catalog.tables import limits
from rekindle.errors import PlatformError, RequestError, StepError
from rekindle.platforms.vertex.client import connected
from rekindle.platforms.vertex.launcher import text_of
from rekindle.platforms.vertex.runs import Message, asked, on_pages
from rekindle.serve.deployed import Traffic
from rekindle.serve.model import ServedModel
from rekindle.serve.rollout import Endpoint
from rekindle.serve.smoke import prove
from rekindle.serve.staging import stage
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.platforms import VertexSpec

LABEL, NUMBER, SINCE = "rekindle", "rekindle-split", "rekindle-since"
LAG_SECONDS = 240  # what is newer may yet change: points are late by up to 120 s
_TRIES, _LONGEST_SECONDS = 5, 3 * 3600.0  # the service ends a deployment after 2 hours at most
_OF = 'resource.type="aiplatform.googleapis.com/Endpoint" AND resource.labels.endpoint_id='
_COUNT = 'metric.type="aiplatform.googleapis.com/prediction/online/response_count" AND '
_LOGS, _METRICS = "https://logging.googleapis.com/v2", "https://monitoring.googleapis.com/v3"


def endpoint(settings: VertexSpec, deploy: DeploySpec, name: str) -> Endpoint:
    """See `Platform.endpoint`."""
    return VertexEndpoint(settings, deploy, name)


class VertexEndpoint:
    """What `Endpoint` says, for the model `name`."""

    poll_seconds = 15.0

    def __init__(self, place: VertexSpec, deploy: DeploySpec, name: str) -> None:
        self.place, self.deploy, self.id = place, deploy, _id(name)
        self.machine = deploy.machine or limits("vertex")["custom_job"]["cpu_machines"][0]
        with connected(place) as self.project:
            self.url = f"{self.project.url}/{self.project.parent}"
        self.address = f"{self.url}/endpoints/{self.id}:predict"

    def usd_per_day(self) -> tuple[str, float | None]:
        price, count = book().find(self.machine, self.place.region), self.deploy.replicas
        usd = price.on_demand_usd_per_hour if price else None
        return f"{count} x {self.machine}", None if usd is None else 24 * usd * count

    def standing(self) -> Mapping[str, tuple[str, int]]:
        found = self._own("endpoints", self.id)
        shares, versions = found.get("trafficSplit", {}), self._versions(found).items()
        return {version: (_state(one), shares.get(one["id"], 0)) for version, one in versions}

    def create(self, model: ServedModel, number: int) -> None:
        name = self._name(model)
        if not self.place.image:
            fix = "name one that is in Artifact Registry, by its digest"
            raise RequestError(
                "an endpoint needs an image", where="platforms.vertex.image", fix=fix
            )
        for kind in (f"endpoints/{self.id}", f"endpoints/{name}", f"models/{name}"):
            self._own(*kind.split("/"))  # what is foreign is refused before anything is made
        source = stage(model, self.place.artifact_root)
        made = {**self._about(name), "artifactUri": source, "containerSpec": {
            "imageUri": self.place.image, "args": ["serve"], "ports": [{"containerPort": 8080}],
            "predictRoute": "/predict", "healthRoute": "/health/ready"}}  # fmt: skip
        self._do("POST", "models:upload", f"models/{name}",
                 lambda: bool(self._own("models", name)), {"modelId": name, "model": made})  # fmt: skip
        self._stand(self.id, model, {})

    def smoke(self, model: ServedModel) -> None:
        name, id = self._name(model), _deployed_id(model)

        def ask(body: Message) -> Any:
            self._stand(name, model, {"trafficSplit": {"0": 100}})
            answer = self._call("POST", f"endpoints/{name}:predict", json=body)
            if answer.get("deployedModelId") != id:
                raise StepError(f"smoke: {answer.get('deployedModelId')} answered instead of {id}")
            return json.loads(json.dumps(answer), parse_int=float)  # a Struct may say 1 for 1.0

        prove(model, ask)
        self._remove(name)

    def split(self, shares: Mapping[str, int], number: int) -> None:
        for _ in range(_TRIES):
            found = self._own("endpoints", self.id)
            ids = {version: one["id"] for version, one in self._versions(found).items()}
            if missing := shares.keys() - ids.keys():
                raise StepError(f"version {min(missing)} does not run", where=self.address)
            wanted, labels = {ids[v]: share for v, share in shares.items()}, found["labels"]
            if found.get("trafficSplit") == wanted and labels.get(NUMBER) == str(number):
                return  # perhaps since a command before: its requests stay counted
            marks = {**labels, NUMBER: str(number), SINCE: str(int(time.time()) + 1)}
            self._change(found, trafficSplit=wanted, labels=marks)
        what = f"the shares are not what was asked for after {_TRIES} tries"
        raise StepError(what, where=self.address, fix="see who else changes this endpoint")

    def observe(self) -> Mapping[str, Traffic]:
        found = self._own("endpoints", self.id)
        began, end = float(found.get("labels", {}).get(SINCE, 0)), time.time() - LAG_SECONDS
        counts = {one["id"]: [0, 0] for one in self._versions(found).values()}
        query = {"filter": f'{_COUNT}{_OF}"{self.id}"', "interval.startTime": _time(began),
                 "interval.endTime": _time(end)}  # fmt: skip
        url = f"{_METRICS}/projects/{self.place.project}/timeSeries"
        for series in self._pages("timeSeries", url, query) if 0 < began < end else ():
            labels, points = series["metric"]["labels"], series["points"]
            count = counts.setdefault(labels["deployed_model_id"], [0, 0])
            for point in points:
                if _seconds(point, "startTime") >= began and _seconds(point, "endTime") <= end:
                    count[0] += int(point["value"]["int64Value"])
                    if labels["response_code"].startswith("5"):
                        count[1] += int(point["value"]["int64Value"])
        versions = self._versions(found).items()
        return {version: Traffic(*counts[one["id"]], ()) for version, one in versions}

    def retain(self, versions: set[str], number: int) -> None:
        for version, one in self._versions(self._own("endpoints", self.id)).items():
            if version not in versions:
                self._undeploy(self.id, one["id"])
        self._clear(versions, {self.id})

    def delete(self) -> None:
        self._own("endpoints", self.id)
        self._clear(set(), set())

    def _clear(self, versions: set[str], endpoints: set[str]) -> None:
        """Remove the other endpoints of the deployment, and the models of other versions."""
        ours = {"filter": f"labels.{LABEL}={self.id}"}
        kinds = ("endpoints", "models")
        names = {kind: [one["name"].rpartition("/")[2] for one in
                        self._pages(kind, f"{self.url}/{kind}", dict(ours))] for kind in kinds}  # fmt: skip
        for name in set(names["endpoints"]) - endpoints:
            self._remove(name)
        for name in names["models"]:
            if self._version(name) not in versions:
                self._delete("models", name)

    def _stand(self, endpoint: str, model: ServedModel, more: Message) -> None:
        """Have the version run in that endpoint, and wait until it is ready."""
        name, id, count = self._name(model), _deployed_id(model), self.deploy.replicas
        self._do("POST", f"endpoints?endpointId={endpoint}", f"endpoints/{endpoint}",
                 lambda: bool(self._own("endpoints", endpoint)), self._about(endpoint))  # fmt: skip
        deployed = {"id": id, "displayName": name, "model": f"{self.project.parent}/models/{name}",
            "dedicatedResources": {"machineSpec": _machine_spec(self.machine),
                                   "minReplicaCount": count, "maxReplicaCount": count}}  # fmt: skip
        if self.place.service_account:
            deployed["serviceAccount"] = self.place.service_account
        try:
            self._do("POST", f"endpoints/{endpoint}:deployModel", f"endpoints/{endpoint}",
                     lambda: id in self._deployed(endpoint), {"deployedModel": deployed, **more})  # fmt: skip
        except StepError as error:
            wanted = f'{_OF}"{endpoint}" AND labels.deployed_model_id="{id}"'
            query = {"resourceNames": [f"projects/{self.place.project}"], "filter": wanted,
                     "orderBy": "timestamp desc", "pageSize": 20}  # fmt: skip
            lines = ["its log cannot be read"]
            with contextlib.suppress(PlatformError):
                entries = self._call("POST", f"{_LOGS}/entries:list", json=query).get("entries", ())
                lines = [text_of(entry).rstrip() for entry in reversed(entries)]
            what = f"version {model.version} is not ready: {error}\nthe end of its log:\n"
            raise StepError(what + "\n".join(lines), where=f"endpoints/{endpoint}") from None

    def _remove(self, endpoint: str) -> None:
        if (found := self._own("endpoints", endpoint)).get("trafficSplit"):
            self._change(found, trafficSplit={})  # what has a share is not undeployed
        for id in self._deployed(endpoint):
            self._undeploy(endpoint, id)
        self._delete("endpoints", endpoint)

    def _undeploy(self, endpoint: str, id: str) -> None:
        self._do("POST", f"endpoints/{endpoint}:undeployModel", f"endpoints/{endpoint}",
                 lambda: id not in self._deployed(endpoint), {"deployedModelId": id})  # fmt: skip

    def _delete(self, kind: str, name: str) -> None:
        self._do("DELETE", f"{kind}/{name}", f"{kind}/{name}", lambda: not self._own(kind, name))

    def _do(
        self, method: str, path: str, resource: str, done: Callable[[], bool],
        body: Message | None = None,
    ) -> None:  # fmt: skip
        """Have the service do it and wait, unless it is done, or is so by what is under way. What
        is refused because a call did it whose answer was lost, is done, too."""

        def settled() -> bool:
            known = self._call("GET", f"{resource}/operations", 404).get("operations", ())
            for operation in known:
                with contextlib.suppress(StepError):
                    self._wait(operation)
            return done()

        if not settled():
            try:
                self._wait(self._call(method, path, json=body))
            except PlatformError:
                if not settled():
                    raise

    def _wait(self, operation: Message) -> None:
        """Raises StepError with what the service says of an operation that failed."""
        give_up, name = time.monotonic() + _LONGEST_SECONDS, operation["name"]
        while not operation.get("done"):
            if time.monotonic() > give_up:
                raise StepError(f"{name} does not end")
            time.sleep(self.poll_seconds)
            operation = self._call("GET", f"{self.project.url}/{name}", 404) or {"done": True}
        if "error" in operation:
            raise StepError(str(operation["error"]["message"]))

    def _change(self, found: Message, **fields: Any) -> None:
        """Change an endpoint, unless others changed it since it was read."""
        path = f"endpoints/{found['name'].rpartition('/')[2]}?updateMask={','.join(fields)}"
        self._call("PATCH", path, 409, 412, json={"etag": found["etag"], **fields})

    def _own(self, kind: str, name: str) -> Message:
        """What has this name, {} where nothing has; RequestError where it is not ours."""
        found = self._call("GET", f"{kind}/{name}", 404)
        if found and found.get("labels", {}).get(LABEL) != self.id:
            what = f"{kind}/{name} is there, and rekindle did not make it for this model"
            raise RequestError(what, where=self.url, fix="remove it, or set register.model_name")
        return found

    def _deployed(self, endpoint: str) -> list[str]:
        return [one["id"] for one in self._own("endpoints", endpoint).get("deployedModels", ())]

    def _pages(self, kind: str, url: str, query: Message) -> list[Message]:
        with connected(self.place):
            return [*on_pages(self.project, kind, "GET", url, query)]

    def _call(self, method: str, path: str, *absent: int, **more: Any) -> Message:
        """The answer; {} where its status is one of `absent`."""
        with connected(self.place):
            from google.api_core.exceptions import GoogleAPICallError

            url = path if "://" in path else f"{self.url}/{path}"
            try:
                return dict(asked(self.project, method, url, **more).json())
            except GoogleAPICallError as error:
                if error.code not in absent:
                    raise
                return {}

    def _about(self, name: str) -> Message:
        key = {"encryptionSpec": {"kmsKeyName": self.place.kms_key}} if self.place.kms_key else {}
        return {"displayName": name, "labels": {**self.place.labels, LABEL: self.id}, **key}

    def _name(self, model: ServedModel) -> str:
        return f"{self.id}-v{model.version}-{model.digest[:8]}"

    def _version(self, name: str) -> str:
        match = re.fullmatch(rf"{self.id}-v(\d+)-[0-9a-f]{{8}}", name)
        return match[1] if match else ""

    def _versions(self, found: Message) -> dict[str, Message]:
        models = found.get("deployedModels", ())
        return {v: one for one in models if (v := self._version(one["displayName"]))}


def _id(name: str) -> str:
    """Of an endpoint: up to 40 of a-z, 0-9 and -, from a letter on."""
    if re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        return name
    plain = re.sub(r"[^a-z0-9]", "-", name)[:29]
    return f"m-{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _deployed_id(model: ServedModel) -> str:
    """Up to 10 digits: the version, and 5 that follow from its files."""
    return f"{model.version}{int(model.digest[:8], 16) % 100_000:05}"


def _state(deployed: Message) -> str:
    status = deployed.get("status", {"availableReplicaCount": 1})  # proto3 leaves out a zero
    return "ready" if status.get("availableReplicaCount") else "starting"


def _machine_spec(name: str) -> Message:
    """With the GPUs that a machine of this type always has; n1 machines are taken without."""
    rows = [row for row in limits("vertex")["custom_job"]["machines"] if row[0] == name]
    if not rows or name.startswith("n1-"):
        return {"machineType": name}
    return {
        "machineType": name, "acceleratorType": rows[0][2], "acceleratorCount": rows[0][3]
    }  # fmt: skip


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _seconds(point: Message, side: str) -> float:
    return datetime.datetime.fromisoformat(point["interval"][side]).timestamp()
