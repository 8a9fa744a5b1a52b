"""A deployment on Vertex AI: an endpoint, in which each version is a DeployedModel. All names and ids
are ours: what an interrupted command made, or has under way, is found by them.

A request cannot choose among deployed models (PredictRequest has no field for it), so a version is
smoked on a second endpoint of its own. `response_count` has requests by class of status code, while
`prediction_count` has instances and `error_count` also what clients did wrong. Authority:
aiplatform_v1 2.7; cloud.google.com/monitoring/api/metrics_gcp. Untested against a real project."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
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
LAG_SECONDS = 240  # what is newer may yet change: points come up to 120 s late
_TRIES, _LONGEST_SECONDS = 5, 3 * 3600.0  # the service ends a deployment after 2 hours at most
_OF = 'resource.type="aiplatform.googleapis.com/Endpoint" AND resource.labels.endpoint_id='
_COUNT = 'metric.type="aiplatform.googleapis.com/prediction/online/response_count" AND '


def endpoint(settings: VertexSpec, deploy: DeploySpec, name: str) -> Endpoint:
    """See `Platform.endpoint`."""
    return VertexEndpoint(settings, deploy, name)


class VertexEndpoint:
    """The deployment of the model `name`, as `Endpoint` describes its methods."""

    poll_seconds = 15.0

    def __init__(self, place: VertexSpec, deploy: DeploySpec, name: str) -> None:
        self.place, self.deploy, self.id = place, deploy, _id(name)
        self.machine = deploy.machine or limits("vertex")["custom_job"]["cpu_machines"][0]
        with connected(place) as self.project:
            self.url = f"{self.project.url}/{self.project.parent}"
        self.address, self.main = f"{self.url}/endpoints/{self.id}:predict", f"endpoints/{self.id}"

    def usd_per_day(self) -> tuple[str, float | None]:
        price, count = book().find(self.machine, self.place.region), self.deploy.replicas
        usd = price.on_demand_usd_per_hour if price else None
        return f"{count} x {self.machine}", None if usd is None else 24 * usd * count

    def standing(self) -> Mapping[str, tuple[str, int]]:
        shares = (found := self._own(self.main)).get("trafficSplit", {})
        return {v: (_state(one), shares.get(one["id"], 0)) for v, one in _versions(found).items()}

    def create(self, model: ServedModel, number: int) -> None:
        if not self.place.image:
            fix = "name one in Artifact Registry, by its digest"
            raise RequestError("an endpoint needs one", where="platforms.vertex.image", fix=fix)
        name = self._name(model)
        for path in (self.main, f"endpoints/{name}", of := f"models/{name}"):
            self._own(path)  # what is foreign is refused before anything is made
        container = {"imageUri": self.place.image, "args": ["serve"], "predictRoute": "/predict",
            "healthRoute": "/health/ready", "ports": [{"containerPort": 8080}]}  # fmt: skip
        made = {"artifactUri": stage(model, self.place.artifact_root), "containerSpec": container}
        body = {"modelId": name, "model": self._about(name) | made}
        self._do("models:upload", of, lambda: self._own(of), body)
        self._stand(self.main, model, {})

    def smoke(self, model: ServedModel) -> None:
        path, id = f"endpoints/{self._name(model)}", _deployed_id(model)

        def ask(body: Message) -> Any:
            self._stand(path, model, {"trafficSplit": {"0": 100}})
            answer = self._call("POST", f"{path}:predict", json=body)
            if answer.get("deployedModelId") != id:
                raise StepError(f"smoke: {answer.get('deployedModelId')} answered instead of {id}")
            return json.loads(json.dumps(answer), parse_int=float)  # a Struct may say 1 for 1.0

        prove(model, ask)
        self._remove(path)

    def split(self, shares: Mapping[str, int], number: int) -> None:
        for _ in range(_TRIES):
            versions = _versions(found := self._own(self.main))
            if missing := shares.keys() - versions.keys():
                raise StepError(f"version {min(missing)} does not run", where=self.address)
            wanted = {versions[version]["id"]: share for version, share in shares.items()}
            if found.get("trafficSplit") == wanted and found["labels"].get(NUMBER) == str(number):
                return  # perhaps since a command before: its requests stay counted
            marks = {NUMBER: str(number), SINCE: str(int(time.time()) + 1)}
            self._change(found, trafficSplit=wanted, labels=found["labels"] | marks)
        what = f"the shares are not what was asked for after {_TRIES} tries"
        raise StepError(what, where=self.address, fix="see who else changes this endpoint")

    def observe(self) -> Mapping[str, Traffic]:
        versions = _versions(found := self._own(self.main))
        began, end = float(found.get("labels", {}).get(SINCE, 0)), time.time() - LAG_SECONDS
        start, stop = (datetime.fromtimestamp(t, UTC).isoformat() for t in (began, end))
        query = {"filter": f'{_COUNT}{_OF}"{self.id}"', "interval.startTime": start,
                 "interval.endTime": stop}  # fmt: skip
        url = f"https://monitoring.googleapis.com/v3/projects/{self.place.project}/timeSeries"
        counts = {one["id"]: [0, 0] for one in versions.values()}
        for series in self._pages("timeSeries", url, query) if 0 < began < end else ():
            labels = series["metric"]["labels"]
            requests = sum(
                int(point["value"]["int64Value"]) for point in series["points"]
                if began <= _when(point, "startTime") and _when(point, "endTime") <= end
            )  # fmt: skip
            count = counts.setdefault(labels["deployed_model_id"], [0, 0])
            count[0] += requests
            count[1] += requests * labels["response_code"].startswith("5")
        return {version: Traffic(*counts[one["id"]], ()) for version, one in versions.items()}

    def retain(self, versions: set[str], number: int) -> None:
        for version, one in _versions(self._own(self.main)).items():
            if version not in versions:
                self._undeploy(self.main, one["id"])
        self._clear(versions, self.main)

    def delete(self) -> None:
        self._own(self.main)
        self._clear(set(), "")

    def _clear(self, versions: set[str], but: str) -> None:
        """Remove the other endpoints of the deployment, and the models of other versions."""
        for kind in ("endpoints", "models"):
            query = {"filter": f"labels.{LABEL}={self.id}"}
            for one in self._pages(kind, f"{self.url}/{kind}", query):
                path = f"{kind}/{one['name'].rpartition('/')[2]}"
                version = path.removeprefix(f"models/{self.id}-v").rpartition("-")[0]
                if path != but and version not in versions:
                    self._remove(path)

    def _stand(self, path: str, model: ServedModel, more: Message) -> None:
        """Have the version run in that endpoint, and wait until it is ready."""
        name, id, count = self._name(model), _deployed_id(model), self.deploy.replicas
        new, about = path.rpartition("/")[2], self._about(path.rpartition("/")[2])
        self._do(f"endpoints?endpointId={new}", path, lambda: self._own(path), about)
        machines = {"machineSpec": _machine_spec(self.machine), "minReplicaCount": count,
                    "maxReplicaCount": count}  # fmt: skip
        body = {"deployedModel": {
            "id": id, "displayName": name, "model": f"{self.project.parent}/models/{name}",
            "dedicatedResources": machines, "serviceAccount": self.place.service_account}}  # fmt: skip
        try:
            self._do(f"{path}:deployModel", path, lambda: id in self._ids(path), body | more)
        except StepError as error:
            wanted, lines = f'{_OF}"{new}" AND labels.deployed_model_id="{id}"', ["(not readable)"]
            query = {"resourceNames": [f"projects/{self.place.project}"], "filter": wanted,
                     "orderBy": "timestamp desc", "pageSize": 20}  # fmt: skip
            with contextlib.suppress(PlatformError):
                log = self._call(
                    "POST", "https://logging.googleapis.com/v2/entries:list", json=query
                )
                lines = [text_of(entry).rstrip() for entry in log.get("entries", ())[::-1]]
            what = [f"version {model.version} is not ready: {error}", "the end of its log:", *lines]
            raise StepError("\n".join(what), where=path) from None

    def _remove(self, path: str) -> None:
        if (found := self._own(path)).get("trafficSplit"):
            self._change(found, trafficSplit={})  # what has a share is not undeployed
        for id in self._ids(path):
            self._undeploy(path, id)
        self._do(path, path, lambda: not self._own(path), None, "DELETE")

    def _undeploy(self, path: str, id: str) -> None:
        body = {"deployedModelId": id}
        self._do(f"{path}:undeployModel", path, lambda: id not in self._ids(path), body)

    def _do(
        self, path: str, of: str, done: Callable[[], Any], body: Any, how: str = "POST"
    ) -> None:
        """Have it done and wait, unless it is, by what is under way or a call without an answer."""
        if not self._settled(of, done):
            try:
                self._wait(self._call(how, path, json=body))
            except PlatformError:
                if not self._settled(of, done):
                    raise

    def _settled(self, of: str, done: Callable[[], Any]) -> Any:
        for operation in self._call("GET", f"{of}/operations", 404).get("operations", ()):
            with contextlib.suppress(StepError):  # that of a command before
                self._wait(operation)
        return done()

    def _wait(self, operation: Message) -> None:
        give_up, url = (
            time.monotonic() + _LONGEST_SECONDS,
            f"{self.project.url}/{operation['name']}",
        )
        while not operation.get("done"):
            if time.monotonic() > give_up:
                raise StepError("it does not end", where=url)
            time.sleep(self.poll_seconds)
            operation = self._call("GET", url, 404) or {"done": True}
        if "error" in operation:
            raise StepError(str(operation["error"]["message"]))

    def _change(self, found: Message, **fields: Any) -> None:
        """Change an endpoint, unless others changed it since it was read."""
        path = f"endpoints/{found['name'].rpartition('/')[2]}?updateMask={','.join(fields)}"
        self._call("PATCH", path, 409, 412, json={"etag": found["etag"], **fields})

    def _own(self, path: str) -> Message:
        """What is there, {} where nothing is; RequestError where it is not ours."""
        found = self._call("GET", path, 404)
        if found and found.get("labels", {}).get(LABEL) != self.id:
            what = f"{path} is there, and rekindle did not make it for this model"
            raise RequestError(what, where=self.url, fix="remove it, or set register.model_name")
        return found

    def _ids(self, path: str) -> list[str]:
        return [one["id"] for one in self._own(path).get("deployedModels", ())]

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


def _id(name: str) -> str:
    """Up to 40 of a-z, 0-9 and -, from a letter on."""
    if re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        return name
    plain = re.sub(r"[^a-z0-9]", "-", name)[:29]
    return f"m-{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _deployed_id(model: ServedModel) -> str:
    """Up to 10 digits: the version, and 5 that follow from its files."""
    return f"{model.version}{int(model.digest[:8], 16) % 100_000:05}"


def _versions(found: Message) -> dict[str, Message]:
    """The deployed models with ids of ours; those of the service are longer."""
    return {o["id"][:-5]: o for o in found.get("deployedModels", ()) if len(o["id"]) <= 10}


def _state(deployed: Message) -> str:
    status = deployed.get("status", {"availableReplicaCount": 1})  # JSON leaves out a zero
    return "ready" if status.get("availableReplicaCount") else "starting"


def _machine_spec(name: str) -> Message:
    """With the GPUs that a machine of this type always has; n1 machines are taken without."""
    for machine, _, gpu, count in limits("vertex")["custom_job"]["machines"]:
        if machine == name and not name.startswith("n1-"):
            return {"machineType": name, "acceleratorType": gpu, "acceleratorCount": count}
    return {"machineType": name}


def _when(point: Message, side: str) -> float:
    return datetime.fromisoformat(point["interval"][side]).timestamp()
