"""A deployment on Vertex AI: an endpoint, in which each version is a DeployedModel. Names
and ids are ours: what an interrupted command made, or has under way, is found by them.

A request cannot choose among deployed models (PredictRequest has no field for it), so a
version without a share is asked on a second endpoint of its own. `response_count` has
requests by class of status code, while `prediction_count` has instances and `error_count`
also what clients did wrong. Authority: aiplatform_v1 2.7;
cloud.google.com/monitoring/api/metrics_gcp. Untested against a real project."""

import contextlib
import dataclasses
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rekindle.catalog.prices import per_day
from rekindle.errors import PlatformError, RequestError, StepError
from rekindle.platforms.ownership import OwnerMark
from rekindle.platforms.polling import polls
from rekindle.platforms.vertex.client import connected
from rekindle.platforms.vertex.limits import limits
from rekindle.platforms.vertex.runs import on_pages, send, text_of
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.protojson import Json
from rekindle.serve.messages import ServedModel, Traffic, is_refusal
from rekindle.serve.staging import stage
from rekindle.spec.deploy import DeploySpec

# labels of endpoints and models: whose they are; number and time of the last split
LABEL = "rekindle"
NUMBER = "rekindle-split"
SINCE = "rekindle-since"
# labels of what is published: whose it is; the files' digest, and our number
PUBLISHED = "rekindle-registry"
DIGEST = "rekindle-digest"
VERSION = "rekindle-version"
_MOST_CHARACTERS = 1_000  # of a description
LAG_SECONDS = 240  # what is newer may yet change: points come up to 120 s late
_SPLIT_TRIES = 5
_ASK_TRIES = 200
_LONGEST_SECONDS = 3 * 3600.0  # the service ends a deployment after 2 hours at most
_IN_ENDPOINT = 'resource.type="aiplatform.googleapis.com/Endpoint" AND resource.labels.endpoint_id='
_LOGS = "https://logging.googleapis.com/v2/entries:list"
_COUNT = 'metric.type="aiplatform.googleapis.com/prediction/online/response_count" AND '


class VertexEndpoint:
    """The deployment of the model `name`, as `Endpoint` describes its methods."""

    poll_seconds = 15.0

    def __init__(self, place: VertexSpec, deploy: DeploySpec, name: str) -> None:
        self.place = place
        self.deploy = deploy
        self.id = _id(name)
        self.mark = OwnerMark("label", LABEL, self.id)
        self.published_mark = OwnerMark("label", PUBLISHED, self.id)
        self.machine = deploy.machine or limits()["custom_job"]["cpu_machines"][0]
        with connected(place) as self.project:
            self.url = f"{self.project.url}/{self.project.parent}"
        self.main = f"endpoints/{self.id}"
        self.address = f"{self.url}/{self.main}:predict"

    def usd_per_day(self) -> tuple[str, float | None]:
        return per_day(self.machine, self.place.region, self.deploy.replicas)

    def standing(self) -> Mapping[str, tuple[str, int]]:
        endpoint = self._own(self.main)
        shares = endpoint.get("trafficSplit", {})
        standing = {}
        for version, deployed in _versions(endpoint).items():
            # one without a status is taken for ready
            status = deployed.get("status", {"availableReplicaCount": 1})
            state = "ready" if status.get("availableReplicaCount") else "starting"
            standing[version] = (state, int(shares.get(deployed["id"], 0)))
        return standing

    def create(self, model: ServedModel, number: int) -> None:
        name = self._name(model)
        path = f"models/{name}"
        for own_path in (self.main, f"endpoints/{name}", path):
            self._own(own_path)  # what is foreign is refused before anything is created
        body = {"modelId": name, "model": self._labelled(name) | self._container(model)}
        self._do("models:upload", path, lambda: self._own(path), body)
        self._deploy(self.main, model, {})

    def ask(self, model: ServedModel, body: Json) -> Any:
        """See `Endpoint.ask`; the endpoint of its own lasts until the next `split`."""
        path = self.main
        id = _deployed_id(model)
        share = self._own(path).get("trafficSplit", {}).get(id, 0)
        if not int(share):
            path = f"endpoints/{self._name(model)}"
            self._deploy(path, model, {"trafficSplit": {"0": 100}})
        for _ in range(_ASK_TRIES):  # which version answers is drawn by the shares
            answer = self.call("POST", f"{path}:predict", json=body)
            if answer.get("deployedModelId") == id:
                return answer
        raise StepError(f"{answer.get('deployedModelId')} answers instead of {id}", where=path)

    def split(self, shares: Mapping[str, int], number: int) -> None:
        self.retain(set(_versions(self._own(self.main))), number)
        for _ in range(_SPLIT_TRIES):
            endpoint = self._own(self.main)
            versions = _versions(endpoint)
            missing = shares.keys() - versions.keys()
            if missing:
                raise StepError(f"version {min(missing)} does not run", where=self.address)
            traffic = {versions[version]["id"]: share for version, share in shares.items()}
            is_split = endpoint.get("trafficSplit") == traffic
            if is_split and endpoint["labels"].get(NUMBER) == str(number):
                return  # perhaps since a command before: its requests stay counted
            # a label has whole seconds: the next one is the first that counts in full
            labels = endpoint["labels"] | {
                NUMBER: str(number),
                SINCE: str(int(time.time()) + 1),
            }
            self._change(self.main, endpoint, trafficSplit=traffic, labels=labels)
        raise StepError(
            f"the shares are not what was asked for after {_SPLIT_TRIES} tries",
            where=self.address,
            fix="see who else changes this endpoint",
        )

    def observe(self) -> Mapping[str, Traffic]:
        endpoint = self._own(self.main)
        versions = _versions(endpoint)
        begin = float(endpoint.get("labels", {}).get(SINCE, 0))
        end = time.time() - LAG_SECONDS
        counts = {deployed["id"]: _ResponseCounts() for deployed in versions.values()}
        if 0 < begin < end:
            for series in self._response_series(begin, end):
                labels = series["metric"]["labels"]
                count = counts.get(labels["deployed_model_id"])
                if count is not None:
                    count.add(series["points"], labels["response_code"], begin, end)
        return {version: counts[deployed["id"]].traffic() for version, deployed in versions.items()}

    def _response_series(self, begin: float, end: float) -> list[Json]:
        """Responses between these seconds of 1970, a series for each version and status
        code."""
        query = {
            "filter": f'{_COUNT}{_IN_ENDPOINT}"{self.id}"',
            "interval.startTime": datetime.fromtimestamp(begin, UTC).isoformat(),
            "interval.endTime": datetime.fromtimestamp(end, UTC).isoformat(),
        }
        url = f"https://monitoring.googleapis.com/v3/projects/{self.place.project}/timeSeries"
        return self.pages("timeSeries", url, query)

    def retain(self, versions: set[str], number: int) -> None:
        """See `Endpoint.retain`; without versions, nothing is left."""
        self._own(self.main)  # refuses what is foreign
        for kind in ("endpoints", "models"):
            query = {"filter": f"labels.{LABEL}={self.id}"}
            for resource in self.pages(kind, f"{self.url}/{kind}", query):
                path = f"{kind}/{resource['name'].rpartition('/')[2]}"
                version = path.removeprefix(f"models/{self.id}-v").rpartition("-")[0]
                if version not in versions:  # which no endpoint's path is
                    self._remove(path, versions if path == self.main else set())

    def delete(self) -> None:
        self.retain(set(), 0)

    def publish(self, model: ServedModel, lineage: Mapping[str, str]) -> str:
        """See `Publisher.publish`: versions of one model, whose alias `default` is the
        champion's, as each model has that alias once."""
        path = f"models/{self.id}"
        mark = {DIGEST: model.digest[:40], VERSION: model.version}
        if self._published_version(path, mark) is None:
            lines = [f"{key}: {value}" for key, value in lineage.items() if value]
            new_version = self._labelled(self.id) | self._container(model)
            new_version["versionDescription"] = "\n".join(lines)[:_MOST_CHARACTERS]
            # not the label of what is deployed, which `retain` removes
            new_version["labels"] = {**self.place.labels, **self.published_mark.tags, **mark}
            body: Json = {"modelId": self.id, "model": new_version}
            if self._published_versions(path):
                parent = f"{self.project.parent}/{path}"
                body = {"parentModel": parent, "model": new_version}
            is_published = lambda: self._published_version(path, mark) is not None  # noqa: E731
            self._do("models:upload", path, is_published, body)
        version = self._published_version(path, mark)
        assert version is not None  # it is published by now
        version_path = f"{path}@{version['versionId']}"
        if "default" not in version.get("versionAliases", ()):
            aliases = {"versionAliases": ["default"]}
            self.call("POST", f"{version_path}:mergeVersionAliases", json=aliases)
        return f"{self.project.parent}/{version_path}"

    def _published_versions(self, path: str) -> list[Json]:
        """All versions of what we published as this model;
        RequestError where it is not ours."""
        model = self.call("GET", path, 404)
        if not model:
            return []
        self.published_mark.check(path, model.get("labels"), where=self.url)
        return self.pages("models", f"{self.url}/{path}:listVersions", {})

    def _published_version(self, path: str, mark: Mapping[str, str]) -> Json | None:
        """The first version with these labels."""
        for version in self._published_versions(path):
            if mark.items() <= version.get("labels", {}).items():
                return version
        return None

    def _container(self, model: ServedModel) -> Json:
        """What a version's server is made of;
        uploads the version's files to the bucket."""
        if not self.place.image:
            raise RequestError(
                "an endpoint needs one",
                where="platforms.vertex.image",
                fix="name one in Artifact Registry, by its digest",
            )
        return {
            "artifactUri": stage(model, self.place.artifact_root),
            "containerSpec": {
                "imageUri": self.place.image,
                "args": ["serve"],
                "predictRoute": "/predict",
                "healthRoute": "/health/ready",
                "ports": [{"containerPort": 8080}],
            },
        }

    def _deploy(self, path: str, model: ServedModel, traffic: Json) -> None:
        """Have the version run in that endpoint, which is created where it is missing,
        and wait until it is ready; `traffic` are more fields of DeployModel."""
        name = self._name(model)
        id = _deployed_id(model)
        endpoint_id = path.rpartition("/")[2]
        create_path = f"endpoints?endpointId={endpoint_id}"
        self._do(create_path, path, lambda: self._own(path), self._labelled(endpoint_id))
        deployed = {
            "id": id,
            "displayName": name,
            "model": f"{self.project.parent}/models/{name}",
            "serviceAccount": self.place.service_account,
            "dedicatedResources": {
                "machineSpec": self._machine_spec(),
                "minReplicaCount": self.deploy.replicas,
                "maxReplicaCount": self.deploy.replicas,
            },
        }
        body = {"deployedModel": deployed, **traffic}
        try:
            self._do(f"{path}:deployModel", path, lambda: id in self._deployed_ids(path), body)
        except StepError as error:
            lines = [
                f"version {model.version} is not ready: {error}",
                "the end of its log:",
                *self._log_end(endpoint_id, id),
            ]
            raise StepError("\n".join(lines), where=path) from None

    def _log_end(self, endpoint_id: str, deployed_id: str) -> list[str]:
        """The end of what a version's containers printed, the oldest first."""
        version = f'labels.deployed_model_id="{deployed_id}"'
        query = {
            "resourceNames": [f"projects/{self.place.project}"],
            "filter": f'{_IN_ENDPOINT}"{endpoint_id}" AND {version}',
            "orderBy": "timestamp desc",
            "pageSize": 20,
        }
        with contextlib.suppress(PlatformError):
            entries = self.call("POST", _LOGS, json=query).get("entries", ())
            return [text_of(entry).rstrip() for entry in reversed(entries)]
        return ["(not readable)"]

    def _remove(self, path: str, retained: set[str]) -> None:
        """Undeploy all versions but the `retained` ones, and delete the rest where there
        are none."""
        self._settle(path)  # what is being deployed is not shown yet
        endpoint = self._own(path)
        if not retained and endpoint.get("trafficSplit"):  # what has a share is not undeployed
            self._change(path, endpoint, trafficSplit={})
        if retained:
            versions = _versions(endpoint).items()
            ids = [deployed["id"] for version, deployed in versions if version not in retained]
        else:
            ids = self._deployed_ids(path)
        for id in ids:
            is_gone = lambda id=id: id not in self._deployed_ids(path)  # noqa: E731 - bound now
            self._do(f"{path}:undeployModel", path, is_gone, {"deployedModelId": id})
        if not retained:
            self._do(path, path, lambda: not self._own(path), None, "DELETE")

    def _do(
        self,
        path: str,
        resource: str,
        is_done: Callable[[], object],
        body: Json | None,
        method: str = "POST",
    ) -> None:
        """Have it done and wait, unless it is, by what is under way at the resource or by
        a call without an answer."""
        refusal: PlatformError | None = None
        while True:
            self._settle(resource)
            if is_done():
                return
            if refusal:
                raise refusal
            try:
                self._wait(self.call(method, path, json=body))
                return
            except PlatformError as error:
                # it may have been done all the same, by this call or another
                refusal = error

    def _settle(self, path: str) -> None:
        """Wait for what is under way: a command before may have begun it."""
        for operation in self.call("GET", f"{path}/operations", 404).get("operations", ()):
            with contextlib.suppress(StepError):
                self._wait(operation)

    def _wait(self, operation: Json) -> None:
        """Wait until an operation ends; StepError where it fails."""
        url = f"{self.project.url}/{operation['name']}"
        if not operation.get("done"):
            operation = self._ended(url)
        if "error" in operation:
            raise StepError(str(operation["error"]["message"]))

    def _ended(self, url: str) -> Json:
        """The operation once it has ended; empty where it is not known any more."""
        for _ in polls(_LONGEST_SECONDS, self.poll_seconds):
            operation = self.call("GET", url, 404)
            if not operation or operation.get("done"):
                return operation
        raise StepError("it does not end", where=url)

    def _change(self, path: str, endpoint: Json, **fields: Any) -> None:
        """Change an endpoint, unless others changed it since it was read."""
        mask = {"updateMask": ",".join(fields)}
        body = {"etag": endpoint["etag"], **fields}
        self.call("PATCH", path, 409, 412, params=mask, json=body)

    def _own(self, path: str) -> Json:
        """What is there, {} where nothing is; RequestError where it is not ours."""
        resource = self.call("GET", path, 404)
        if resource:
            self.mark.check(path, resource.get("labels"), where=self.url)
        return resource

    def _deployed_ids(self, path: str) -> list[str]:
        return [deployed["id"] for deployed in self._own(path).get("deployedModels", ())]

    def pages(self, kind: str, url: str, query: Json) -> list[Json]:
        """What all pages of a GET hold under `kind`."""
        with connected(self.place):
            return list(on_pages(self.project, kind, "GET", url, query))

    def call(self, method: str, path: str, *absent: int, **arguments: Any) -> Json:
        """The answer; {} where its status is one of `absent`."""
        url = path if "://" in path else f"{self.url}/{path}"
        try:
            with connected(self.place):
                response = send(self.project, method, url, **arguments)
                return dict(response.json(parse_int=float))  # a Struct's number may come as 1
        except PlatformError as error:
            if getattr(error.__cause__, "code", 0) not in absent:
                raise
            return {}

    def _machine_spec(self) -> Json:
        """The machine, with the GPUs that one of this type always has; n1 machines are
        taken without."""
        for machine, _, gpu, count in limits()["custom_job"]["machines"]:
            if machine == self.machine and not machine.startswith("n1-"):
                return {
                    "machineType": machine,
                    "acceleratorType": gpu,
                    "acceleratorCount": count,
                }
        return {"machineType": self.machine}

    def _labelled(self, name: str) -> Json:
        """The fields that endpoints and models have alike."""
        fields: Json = {
            "displayName": name,
            "labels": {**self.place.labels, **self.mark.tags},
        }
        if self.place.kms_key:
            fields["encryptionSpec"] = {"kmsKeyName": self.place.kms_key}
        return fields

    def _name(self, model: ServedModel) -> str:
        return f"{self.id}-{model.deployed_name}"


@dataclasses.dataclass
class _ResponseCounts:
    """Responses of a version."""

    requests: int = 0
    errors: int = 0
    refused: int = 0

    def add(self, points: Iterable[Json], code: str, begin: float, end: float) -> None:
        """Count responses with this code, of points between `begin` and `end` (seconds of
        1970); part of another point is not certain."""
        for point in points:
            point_begin = datetime.fromisoformat(point["interval"]["startTime"]).timestamp()
            point_end = datetime.fromisoformat(point["interval"]["endTime"]).timestamp()
            if begin <= point_begin and point_end <= end:
                responses = int(point["value"]["int64Value"])
                self.requests += responses
                if code.startswith("5"):
                    self.errors += responses
                if _is_refusal(code):
                    self.refused += responses

    def traffic(self) -> Traffic:
        return Traffic(self.requests, self.errors, (), refused=self.refused)


def _id(name: str) -> str:
    """An id of up to 40 of a-z, 0-9 and -, from a letter on."""
    if re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        return name
    return f"m-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _deployed_id(model: ServedModel) -> str:
    """An id of up to 10 digits: the version, and 5 that follow from its files."""
    return f"{model.version}{int(model.digest[:8], 16) % 100_000:05}"


def _is_refusal(code: str) -> bool:
    """Whether a version refused requests of this code, or of this class of codes
    (4xx)."""
    return is_refusal(int(code)) if code.isdigit() else code.startswith("4")


def _versions(endpoint: Json) -> dict[str, Json]:
    """The deployed models with ids of ours by version; ids of the service are longer."""
    versions = {}
    for deployed in endpoint.get("deployedModels", ()):
        if len(deployed["id"]) <= 10:
            versions[deployed["id"][:-5]] = deployed
    return versions
