"""A deployment on Vertex AI: an endpoint, in which each version is a DeployedModel. Names and ids
are ours: what an interrupted command made, or has under way, is found by them.

A request cannot choose among deployed models (PredictRequest has no field for it), so a version
without a share is asked on a second endpoint of its own. `response_count` has requests by class of
status code, while `prediction_count` has instances and `error_count` also what clients did wrong.
Authority: aiplatform_v1 2.7; cloud.google.com/monitoring/api/metrics_gcp. Untested against a real
project."""

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from rekindle.catalog.prices import per_day
from rekindle.catalog.tables import limits
from rekindle.errors import PlatformError, RequestError, StepError
from rekindle.platforms.submission import problems_in, requests_in
from rekindle.platforms.vertex.client import connected
from rekindle.platforms.vertex.runs import Message, asked, on_pages, text_of
from rekindle.serve.messages import ServedModel, Traffic, is_refusal
from rekindle.serve.staging import stage
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.platforms import VertexSpec

LABEL, NUMBER, SINCE = "rekindle", "rekindle-split", "rekindle-since"
PUBLISHED, DIGEST, VERSION = "rekindle-registry", "rekindle-digest", "rekindle-version"
_MOST_WORDS = 1_000
LAG_SECONDS = 240  # what is newer may yet change: points come up to 120 s late
_TRIES, _ASKS = 5, 200
_LONGEST = 3 * 3600.0  # seconds: the service ends a deployment after 2 hours at most
_Done = Callable[[], Any]
_OF = 'resource.type="aiplatform.googleapis.com/Endpoint" AND resource.labels.endpoint_id='
_LOGS = "https://logging.googleapis.com/v2/entries:list"
_COUNT = 'metric.type="aiplatform.googleapis.com/prediction/online/response_count" AND '
_problem, _request = problems_in(__file__), requests_in(__file__)


class VertexEndpoint:
    """The deployment of the model `name`, as `Endpoint` describes its methods."""

    poll_seconds, sees_latency = 15.0, False

    def __init__(self, place: VertexSpec, deploy: DeploySpec, name: str) -> None:
        self.place, self.deploy, self.id = place, deploy, _id(name)
        self.machine = deploy.machine or limits("vertex")["custom_job"]["cpu_machines"][0]
        with connected(place) as self.project:
            self.url = f"{self.project.url}/{self.project.parent}"
        self.address, self.main = f"{self.url}/endpoints/{self.id}:predict", f"endpoints/{self.id}"

    def usd_per_day(self) -> tuple[str, float | None]:
        return per_day(self.machine, self.place.region, self.deploy.replicas)

    def standing(self) -> Mapping[str, tuple[str, int]]:
        shares = (found := self._own(self.main)).get("trafficSplit", {})
        return {
            v: (
                "ready"
                if o.get("status", {"availableReplicaCount": 1}).get("availableReplicaCount")
                else "starting",
                int(shares.get(o["id"], 0)),
            )
            for v, o in _versions(found).items()
        }

    def create(self, model: ServedModel, number: int) -> None:
        of = f"models/{self._name(model)}"
        for path in (self.main, of.replace("models", "endpoints", 1), of):
            self._own(path)  # what is foreign is refused before anything is made
        body = {"modelId": of[7:], "model": self._about(of[7:]) | self._served(model)}
        self._do("models:upload", of, lambda: self._own(of), body)
        self._stand(self.main, model, {})

    def ask(self, model: ServedModel, body: Message) -> Any:
        """See `Endpoint.ask`; the endpoint of its own lasts until the next `split`."""
        path, id = self.main, _deployed_id(model)
        if not int(self._own(path).get("trafficSplit", {}).get(id, 0)):
            path = f"endpoints/{self._name(model)}"
            self._stand(path, model, {"trafficSplit": {"0": 100}})
        for _ in range(_ASKS):  # which version answers is drawn by the shares
            answer = self.call("POST", f"{path}:predict", json=body)
            if answer.get("deployedModelId") == id:
                return answer
        raise StepError(f"{answer.get('deployedModelId')} answers instead of {id}", where=path)

    def split(self, shares: Mapping[str, int], number: int) -> None:
        self.retain(set(_versions(self._own(self.main))), number)
        for _ in range(_TRIES):
            versions = _versions(found := self._own(self.main))
            if missing := shares.keys() - versions.keys():
                raise StepError(f"version {min(missing)} does not run", where=self.address)
            wanted = {versions[version]["id"]: share for version, share in shares.items()}
            if found.get("trafficSplit") == wanted and found["labels"].get(NUMBER) == str(number):
                return  # perhaps since a command before: its requests stay counted
            marks = {NUMBER: str(number), SINCE: str(int(time.time()) + 1)}
            self._change(self.main, found, trafficSplit=wanted, labels=found["labels"] | marks)
        raise StepError([_problem("no_shares", where=self.address, tries=_TRIES)])

    def observe(self) -> Mapping[str, Traffic]:
        versions = _versions(found := self._own(self.main))
        began, end = float(found.get("labels", {}).get(SINCE, 0)), time.time() - LAG_SECONDS
        start, stop = (datetime.fromtimestamp(t, UTC).isoformat() for t in (began, end))
        query = {
            "filter": f'{_COUNT}{_OF}"{self.id}"',
            "interval.startTime": start,
            "interval.endTime": stop,
        }
        url = f"https://monitoring.googleapis.com/v3/projects/{self.place.project}/timeSeries"
        counts = {one["id"]: [0, 0, 0] for one in versions.values()}
        for series in self.pages("timeSeries", url, query) if 0 < began < end else ():
            labels = series["metric"]["labels"]
            id, code = labels["deployed_model_id"], labels["response_code"]
            for point in series["points"] if id in counts else ():
                times = (point["interval"][side] for side in ("startTime", "endTime"))
                first, last = (datetime.fromisoformat(time).timestamp() for time in times)
                if began <= first and last <= end:  # part of another one is not certain
                    new = int(point["value"]["int64Value"])
                    counts[id][0] += new
                    counts[id][1] += new if code.startswith("5") else 0
                    counts[id][2] += new if _is_refusal(code) else 0
        traffic = {}
        for version, one in versions.items():
            requests, errors, refused = counts[one["id"]]
            traffic[version] = Traffic(requests, errors, (), refused=refused)
        return traffic

    def retain(self, versions: set[str], number: int) -> None:
        """See `Endpoint.retain`; without versions, nothing is left."""
        self._own(self.main)  # refuses what is foreign
        for kind in ("endpoints", "models"):
            query = {"filter": f"labels.{LABEL}={self.id}"}
            for one in self.pages(kind, f"{self.url}/{kind}", query):
                path = f"{kind}/{one['name'].rpartition('/')[2]}"
                if path.removeprefix(f"models/{self.id}-v").rpartition("-")[0] not in versions:
                    self._remove(path, versions if path == self.main else set())

    def delete(self) -> None:
        self.retain(set(), 0)

    def publish(self, model: ServedModel, lineage: Mapping[str, str]) -> str:
        """See `Publisher.publish`: versions of one model, whose alias `default` is the champion's,
        as each model has that alias once."""
        path, mark = f"models/{self.id}", {DIGEST: model.digest[:40], VERSION: model.version}

        def known() -> list[Message]:
            if not (found := self.call("GET", path, 404)):
                return []
            if found.get("labels", {}).get(PUBLISHED) != self.id:
                raise self._foreign(path)
            return self.pages("models", f"{self.url}/{path}:listVersions", {})

        def mine() -> list[Message]:
            return [one for one in known() if mark.items() <= one.get("labels", {}).items()]

        if not mine():
            said = "\n".join(f"{key}: {value}" for key, value in lineage.items() if value)
            made = self._about(self.id) | self._served(model)
            made["versionDescription"] = said[:_MOST_WORDS]
            # not the label of what is deployed, which `retain` removes
            made["labels"] = {**self.place.labels, PUBLISHED: self.id, **mark}
            parent = {"parentModel": f"{self.project.parent}/{path}"}
            place = parent if known() else {"modelId": self.id}
            self._do("models:upload", path, lambda: bool(mine()), {**place, "model": made})
        (version, *_) = mine()
        named = f"{path}@{version['versionId']}"
        if "default" not in version.get("versionAliases", ()):
            self.call("POST", f"{named}:mergeVersionAliases", json={"versionAliases": ["default"]})
        return f"{self.project.parent}/{named}"

    def _served(self, model: ServedModel) -> Message:
        """What a version's server is made of, once its files are in the bucket."""
        if not self.place.image:
            raise RequestError([_problem("no_image")])
        uri = stage(model, self.place.artifact_root)
        return _request("served", uri=uri, image=self.place.image)

    def _stand(self, path: str, model: ServedModel, more: Message) -> None:
        """Have the version run in that endpoint, and wait until it is ready."""
        name, id, count = self._name(model), _deployed_id(model), self.deploy.replicas
        new = path.rpartition("/")[2]
        self._do(f"endpoints?endpointId={new}", path, lambda: self._own(path), self._about(new))
        about = {"account": self.place.service_account, "machine": self._machine(), "count": count}
        of = f"{self.project.parent}/models/{name}"
        body = _request("deployed", id=id, name=name, model=of, **about)
        try:
            self._do(f"{path}:deployModel", path, lambda: id in self._ids(path), body | more)
        except StepError as error:
            wanted, lines = f'{_OF}"{new}" AND labels.deployed_model_id="{id}"', ["(not readable)"]
            query = _request("log", project=f"projects/{self.place.project}", filter=wanted)
            with contextlib.suppress(PlatformError):
                entries = self.call("POST", _LOGS, json=query).get("entries", ())
                lines = [text_of(entry).rstrip() for entry in entries[::-1]]
            what = [f"version {model.version} is not ready: {error}", "the end of its log:", *lines]
            raise StepError("\n".join(what), where=path) from None

    def _remove(self, path: str, but: set[str]) -> None:
        """Undeploy all versions but those, and delete the rest where there are none."""
        self._settle(path)  # what is being deployed is not shown yet
        found = self._own(path)
        if not but and found.get("trafficSplit"):  # what has a share is not undeployed
            self._change(path, found, trafficSplit={})
        ids = [one["id"] for version, one in _versions(found).items() if version not in but]
        for id in ids if but else self._ids(path):
            gone = lambda id=id: id not in self._ids(path)  # noqa: E731 - bound now
            self._do(f"{path}:undeployModel", path, gone, {"deployedModelId": id})
        if not but:
            self._do(path, path, lambda: not self._own(path), None, "DELETE")

    def _do(self, path: str, of: str, done: _Done, body: Any, how: str = "POST") -> None:
        """Have it done and wait, unless it is, by what is under way or a call without an answer."""
        refused: PlatformError | None = None
        while True:
            self._settle(of)
            if done():
                return
            if refused:
                raise refused
            try:
                self._wait(self.call(how, path, json=body))
                return
            except PlatformError as error:
                refused = error

    def _settle(self, of: str) -> None:
        """Wait for what is under way: a command before may have begun it."""
        for operation in self.call("GET", f"{of}/operations", 404).get("operations", ()):
            with contextlib.suppress(StepError):
                self._wait(operation)

    def _wait(self, operation: Message) -> None:
        url, give_up = f"{self.project.url}/{operation['name']}", time.monotonic() + _LONGEST
        while not operation.get("done"):
            if time.monotonic() > give_up:
                raise StepError("it does not end", where=url)
            time.sleep(self.poll_seconds)
            operation = self.call("GET", url, 404) or {"done": True}
        if "error" in operation:
            raise StepError(str(operation["error"]["message"]))

    def _change(self, path: str, found: Message, **fields: Any) -> None:
        """Change an endpoint, unless others changed it since it was read."""
        query, body = {"updateMask": ",".join(fields)}, {"etag": found["etag"], **fields}
        self.call("PATCH", path, 409, 412, params=query, json=body)

    def _own(self, path: str) -> Message:
        """What is there, {} where nothing is; RequestError where it is not ours."""
        found = self.call("GET", path, 404)
        if found and found.get("labels", {}).get(LABEL) != self.id:
            raise self._foreign(path)
        return found

    def _foreign(self, path: str) -> RequestError:
        return RequestError([_problem("foreign", where=self.url, path=path)])

    def _ids(self, path: str) -> list[str]:
        return [one["id"] for one in self._own(path).get("deployedModels", ())]

    def pages(self, kind: str, url: str, query: Message) -> list[Message]:
        with connected(self.place):
            return [*on_pages(self.project, kind, "GET", url, query)]

    def call(self, method: str, path: str, *absent: int, **more: Any) -> Message:
        """The answer; {} where its status is one of `absent`."""
        url = path if "://" in path else f"{self.url}/{path}"
        try:
            with connected(self.place):
                answer = asked(self.project, method, url, **more)
                return dict(answer.json(parse_int=float))  # a Struct's number may come as 1
        except PlatformError as error:
            if getattr(error.__cause__, "code", 0) not in absent:
                raise
            return {}

    def _machine(self) -> Message:
        """With the GPUs that a machine of this type always has; n1 machines are taken without."""
        for machine, _, gpu, count in limits("vertex")["custom_job"]["machines"]:
            if machine == self.machine and not machine.startswith("n1-"):
                return {"machineType": machine, "acceleratorType": gpu, "acceleratorCount": count}
        return {"machineType": self.machine}

    def _about(self, name: str) -> Message:
        key = {"encryptionSpec": {"kmsKeyName": self.place.kms_key}} if self.place.kms_key else {}
        return {"displayName": name, "labels": {**self.place.labels, LABEL: self.id}, **key}

    def _name(self, model: ServedModel) -> str:
        return f"{self.id}-v{model.version}-{model.digest[:8]}"


def _id(name: str) -> str:
    """Up to 40 of a-z, 0-9 and -, from a letter on."""
    if re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        return name
    return f"m-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _deployed_id(model: ServedModel) -> str:
    """Up to 10 digits: the version, and 5 that follow from its files."""
    return f"{model.version}{int(model.digest[:8], 16) % 100_000:05}"


def _is_refusal(code: str) -> bool:
    """Whether a version refused requests of this code, or of this class of codes (4xx)."""
    return is_refusal(int(code)) if code.isdigit() else code.startswith("4")


def _versions(found: Message) -> dict[str, Message]:
    """The deployed models with ids of ours; those of the service are longer."""
    return {o["id"][:-5]: o for o in found.get("deployedModels", ()) if len(o["id"]) <= 10}
