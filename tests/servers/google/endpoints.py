"""Vertex AI's endpoints and models, as a deployment asks for them, with the counts of Cloud Monitoring
and the log of the containers.

Bodies are parsed into the service's own protos. What takes time is an operation, which is done at the
`polls`-th look at it. Names have the project's number, as the service's have. Refused are ids that are
taken, or have another form, shares that do not add up to 100 or name what is not there, a change with an
old etag, taking away what has a share, deleting what is in use. A container answers requests by the rows
of the evidence that was staged for it, `wrong` versions otherwise; `broken` ones never become ready. Where
`containers` names a server for the version, that one answers: numbers of a request reach it as floats, as
those of protobuf's Value are, and the service keeps its `predictions` alone.

Authority: endpoint.py, endpoint_service.py, model_service.py and prediction_service.py of aiplatform_v1;
timeSeries.list of cloud.google.com/monitoring/api. How the service words its refusals is a guess."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.cloud import aiplatform_v1 as api
from google.protobuf.json_format import MessageToDict

from tests.servers import behind
from tests.servers.google.rest import (
    PARENT,
    PROJECT,
    REGION,
    Project,
    Refused,
    check_token,
    parsed,
    shown_of,
)
from tests.servers.shadow import Answering
from tests.servers.tls_hosts import Asked

NUMBERED = f"projects/7/locations/{REGION}"
_PATH = re.compile(rf"/v1/{PARENT}/(endpoints|models)(?:/([\w@-]+))?(/operations)?(?::(\w+))?")
_PIPELINES = re.compile(rf"/v1/{PARENT}/(pipelineJobs|customJobs|schedules)\b")
_OPERATION = re.compile(rf"/v1/({NUMBERED}/\w+/[\w-]+/operations/\d+)")
_IDS = {"endpoints": r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "models": r"[a-z_][a-z0-9_-]{0,62}"}
_SERIES = (
    r'metric\.type="aiplatform\.googleapis\.com/prediction/online/response_count" AND '
    r'resource\.type="aiplatform\.googleapis\.com/Endpoint" AND resource\.labels\.endpoint_id="([\w-]+)"'
)
_LOG = (
    r'resource\.type="aiplatform\.googleapis\.com/Endpoint" AND resource\.labels\.endpoint_id="([\w-]+)" '
    r'AND labels\.deployed_model_id="(\d+)"'
)


class Endpoints(Project):
    """The project with `endpoints` and `models` by id; gs:// is `bucket`. `requests` is how many each
    version with a share has had, `fails` the share that it failed, by version; so `broken` and `wrong`."""

    def __init__(self, bucket: Path) -> None:
        super().__init__()
        self.bucket, self.polls = bucket, 2
        self.kinds: dict[str, dict[str, Any]] = {"endpoints": {}, "models": {}}
        self.versions: dict[str, list[Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.broken: dict[str, str] = {}
        self.wrong: set[str] = set()
        self.containers: dict[str, str] = {}
        self.answering, self.asked = Answering(), 0
        self.fails: dict[str, float] = {}
        self.requests, self.quota, self.log_denied = 500, "", False
        self.rivals = 0  # changes of others that come just before a change
        self.smoked: list[str] = []
        self.cut: tuple[int, bool] | None = (
            None  # at this call, before or after it, a login runs out
        )

    @property
    def endpoints(self) -> dict[str, Any]:
        return self.kinds["endpoints"]

    @property
    def models(self) -> dict[str, Any]:
        return self.kinds["models"]

    def name_of(self, asked: Asked) -> str:
        return (
            f"{asked.method} operations" if "/operations" in asked.path else super().name_of(asked)
        )

    def done(self, asked: Asked) -> Any:
        check_token(asked)
        if self.cut is None:
            return self.found(asked)
        count, after = self.cut
        self.cut = (count - 1, after) if count else None
        if count or after:
            answer = self.found(asked)
        if count:
            return answer
        raise Refused(401, "the login has run out")

    def found(self, asked: Asked) -> Any:
        if asked.host == "monitoring.googleapis.com":
            return self.series(asked)
        if asked.host == "logging.googleapis.com" and "aiplatform.googleapis.com/Endpoint" in str(
            asked.body
        ):
            return self.log(asked.json())
        if asked.host in ("logging.googleapis.com", "storage.googleapis.com") or _PIPELINES.match(
            asked.path
        ):
            return super().done(asked)
        if match := _OPERATION.fullmatch(asked.path):
            return self.looked(match[1])
        match = _PATH.fullmatch(asked.path)
        if match is None or asked.host != f"{REGION}-aiplatform.googleapis.com":
            raise Refused(404, f"nobody answers {asked}")
        kind, id, operations, verb = match.groups()
        if operations:
            found = [self.looked(name) for name in self.operations if f"/{kind}/{id}/" in name]
            if not found:
                raise Refused(404, f"there is no {kind}/{id}")
            return {"operations": found}
        call = {
            ("GET", "endpoints", False, None): self.list,
            ("GET", "models", False, None): self.list,
            ("GET", "endpoints", True, None): self.get,
            ("GET", "models", True, None): self.get,
            ("POST", "models", False, "upload"): self.upload,
            ("GET", "models", True, "listVersions"): self.list_versions,
            ("POST", "models", True, "mergeVersionAliases"): self.merge_aliases,
            ("POST", "endpoints", False, None): self.create,
            ("POST", "endpoints", True, "deployModel"): self.deploy,
            ("POST", "endpoints", True, "undeployModel"): self.undeploy,
            ("POST", "endpoints", True, "predict"): self.predict,
            ("PATCH", "endpoints", True, None): self.update,
            ("DELETE", "endpoints", True, None): self.delete,
            ("DELETE", "models", True, None): self.delete,
        }.get((asked.method, kind, id is not None, verb))
        if call is None:
            raise Refused(404, f"nobody answers {asked}")
        return call(asked, kind, id or "")

    def begin(
        self, kind: str, id: str, work: Callable[[], None], error: str = "", what: str = ""
    ) -> Any:
        """An operation; `what` it makes is taken from now on."""
        name = f"{NUMBERED}/{kind}/{id}/operations/{len(self.operations) + 1}"
        self.operations[name] = {"left": self.polls, "work": work, "error": error, "what": what}
        return {"name": name}

    def looked(self, name: str) -> Any:
        if name not in self.operations:
            raise Refused(404, f"there is no {name}")
        operation = self.operations[name]
        operation["left"] -= 1
        if operation["left"] > 0:
            return {"name": name, "done": False}
        if operation["left"] == 0 and not operation["error"]:
            operation["work"]()
        ends = (
            {"error": {"code": 9, "message": operation["error"]}}
            if operation["error"]
            else {"response": {}}
        )
        return {"name": name, "done": True, **ends}

    def taken(self, what: str) -> bool:
        return any(o["what"] == what and o["left"] > 0 for o in self.operations.values())

    def get(self, asked: Asked, kind: str, id: str) -> Any:
        if id not in self.kinds[kind]:
            raise Refused(404, f"there is no {kind}/{id}")
        return shown_of(self.kinds[kind][id])

    def list(self, asked: Asked, kind: str, _: str) -> Any:
        """Those with a label, one a page."""
        match = re.fullmatch(r"labels\.([a-z-]+)=([a-z0-9-]+)", asked.query["filter"])
        if match is None or asked.query.keys() - {"filter", "pageToken"}:
            raise Refused(400, f"no filter: {asked.query}")
        fits = [
            shown_of(o)
            for _, o in sorted(self.kinds[kind].items())
            if o.labels.get(match[1]) == match[2]
        ]
        begin = int(asked.query.get("pageToken", 0))
        more = {"nextPageToken": str(begin + 1)} if begin + 1 < len(fits) else {}
        return {kind: fits[begin : begin + 1], **more}

    def upload(self, asked: Asked, kind: str, _: str) -> Any:
        request = parsed(api.UploadModelRequest, asked.body)
        id, model = request.model_id, request.model
        if request.parent_model:
            id = request.parent_model.removeprefix(f"{PARENT}/models/")
            self.get(asked, kind, id)
            _check_labels(model.labels)
        else:
            self.check_new(kind, id, model)
        container, folder = (
            model.container_spec,
            self.bucket / model.artifact_uri.removeprefix("gs://"),
        )
        if not model.artifact_uri.startswith("gs://") or not (folder / "served.json").is_file():
            raise Refused(400, f"{model.artifact_uri!r} has no model")
        if not re.match(r"[a-z-]+-docker\.pkg\.dev/|gcr\.io/", container.image_uri):
            raise Refused(400, f"{container.image_uri!r} is not in Artifact Registry")
        if container.env:
            raise Refused(400, "this test wants no environment, in which secrets could be")
        return self.begin(kind, id, lambda: self.put_version(id, model), what=f"models/{id}")

    def put_version(self, id: str, model: Any) -> None:
        """The first version has the alias `default`, and is what the model is called by."""
        there = self.versions[id] if id in self.models else []
        model.version_id = str(len(there) + 1)
        if not there:
            self.versions[id] = there
            model.version_aliases = ["default"]
            self.put("models", id, model)
        there.append(model)

    def list_versions(self, asked: Asked, kind: str, id: str) -> Any:
        """One a page."""
        self.get(asked, kind, id)
        begin, there = int(asked.query.get("pageToken", 0)), self.versions[id]
        more = {"nextPageToken": str(begin + 1)} if begin + 1 < len(there) else {}
        return {"models": [shown_of(one) for one in there[begin : begin + 1]], **more}

    def merge_aliases(self, asked: Asked, kind: str, named: str) -> Any:
        """A model has each alias once, and always a default."""
        id, _, number = named.partition("@")
        self.get(asked, kind, id)
        request = parsed(api.MergeVersionAliasesRequest, asked.body)
        found = [one for one in self.versions[id] if one.version_id == number]
        if not found or any(alias.startswith("-") for alias in request.version_aliases):
            raise Refused(400, f"{named}: {request.version_aliases}")
        for alias in request.version_aliases:
            for one in self.versions[id]:
                one.version_aliases = [kept for kept in one.version_aliases if kept != alias]
            found[0].version_aliases.append(alias)
        return shown_of(found[0])

    def create(self, asked: Asked, kind: str, _: str) -> Any:
        id, endpoint = asked.query.get("endpointId", ""), parsed(api.Endpoint, asked.body)
        self.check_new(kind, id, endpoint)
        if endpoint.deployed_models or endpoint.traffic_split:
            raise Refused(400, "deployed_models is output only")
        return self.begin(kind, id, lambda: self.put(kind, id, endpoint), what=f"endpoints/{id}")

    def check_new(self, kind: str, id: str, made: Any) -> None:
        if not re.fullmatch(_IDS[kind], id) or not 1 <= len(made.display_name) <= 128:
            raise Refused(400, f"{id!r} is no id of {kind}, or {made.display_name!r} no name")
        _check_labels(made.labels)
        if id in self.kinds[kind] or self.taken(f"{kind}/{id}"):
            raise Refused(409, f"{kind}/{id} exists")

    def put(self, kind: str, id: str, made: Any) -> None:
        made.name, made.etag = f"{NUMBERED}/{kind}/{id}", "1"
        self.kinds[kind][id] = made

    def deploy(self, asked: Asked, kind: str, id: str) -> Any:
        self.get(asked, kind, id)
        endpoint, request = self.endpoints[id], parsed(api.DeployModelRequest, asked.body)
        deployed, split = request.deployed_model, dict(request.traffic_split)
        model = deployed.model.removeprefix(f"{PARENT}/models/")
        resources = deployed.dedicated_resources
        if model not in self.models or not re.fullmatch(r"\d{1,10}", deployed.id):
            raise Refused(400, f"no model {deployed.model}, or {deployed.id!r} is no id")
        if resources.min_replica_count < 1 or not resources.machine_spec.machine_type:
            raise Refused(400, "dedicated_resources needs a machine and a replica")
        gpu = resources.machine_spec.machine_type.startswith(("g2-", "a2-", "a3-"))
        if gpu != bool(resources.machine_spec.accelerator_count):
            raise Refused(400, f"accelerators of {resources.machine_spec.machine_type}")
        if self.quota:
            raise Refused(429, self.quota)
        if deployed.id in _ids(endpoint) or self.taken(f"{id}/{deployed.id}"):
            raise Refused(400, f"there is a deployed model {deployed.id} already")
        if split and ("0" not in split or sum(split.values()) != 100):
            raise Refused(400, f"shares {split}")
        version = _version(model)

        def work() -> None:
            deployed.status = {"available_replica_count": resources.min_replica_count}
            endpoint.deployed_models.append(deployed)
            if split:
                self.share(
                    endpoint, {deployed.id if key == "0" else key: n for key, n in split.items()}
                )

        return self.begin(kind, id, work, self.broken.get(version, ""), f"{id}/{deployed.id}")

    def undeploy(self, asked: Asked, kind: str, id: str) -> Any:
        self.get(asked, kind, id)
        endpoint, request = self.endpoints[id], parsed(api.UndeployModelRequest, asked.body)
        gone = request.deployed_model_id
        if gone not in _ids(endpoint):
            raise Refused(404, f"there is no deployed model {gone}")
        if endpoint.traffic_split.get(gone):
            raise Refused(400, f"deployed model {gone} has traffic")

        def work() -> None:
            kept = [one for one in endpoint.deployed_models if one.id != gone]
            endpoint.deployed_models = kept

        return self.begin(kind, id, work)

    def delete(self, asked: Asked, kind: str, id: str) -> Any:
        self.get(asked, kind, id)
        used = kind == "models" and any(
            one.model.endswith(f"/{id}")
            for e in self.endpoints.values()
            for one in e.deployed_models
        )
        if used or (kind == "endpoints" and self.endpoints[id].deployed_models):
            raise Refused(400, f"{kind}/{id} is in use")
        return self.begin(kind, id, lambda: self.kinds[kind].pop(id, None))

    def update(self, asked: Asked, kind: str, id: str) -> Any:
        self.get(asked, kind, id)
        endpoint, wanted = self.endpoints[id], parsed(api.Endpoint, asked.body)
        if self.rivals:
            self.rivals -= 1
            endpoint.etag = f"{endpoint.etag}+"
        mask = set(asked.query["updateMask"].split(","))
        if not mask <= {"trafficSplit", "labels"}:
            raise Refused(400, f"the mask {mask}")
        if not wanted.etag:
            raise Refused(400, "a blind overwrite")
        if wanted.etag != endpoint.etag:
            raise Refused(409, "the etag is not the current one")
        if "labels" in mask:
            _check_labels(wanted.labels)
            endpoint.labels = dict(wanted.labels)
        self.share(
            endpoint,
            dict(wanted.traffic_split) if "trafficSplit" in mask else dict(endpoint.traffic_split),
        )
        return shown_of(endpoint)

    def share(self, endpoint: Any, split: dict[str, int]) -> None:
        if split and sum(split.values()) != 100:
            raise Refused(400, f"{split} does not add up to 100")
        if not split.keys() <= _ids(endpoint):
            raise Refused(400, f"{split} names what is not deployed")
        endpoint.traffic_split, endpoint.etag = split, str(len(endpoint.etag) + 1) + endpoint.etag

    def predict(self, asked: Asked, kind: str, id: str) -> Any:
        self.get(asked, kind, id)
        endpoint, request = self.endpoints[id], parsed(api.PredictRequest, asked.body)
        body = asked.json()
        if not endpoint.traffic_split:
            raise Refused(400, "no deployed model has traffic")
        self.asked += 1  # requests are shared, as by the split
        chosen = sorted(endpoint.traffic_split)[self.asked % len(endpoint.traffic_split)]
        model = next(one.model for one in endpoint.deployed_models if one.id == chosen).rpartition(
            "/"
        )[2]
        who = {"deployedModelId": chosen, "model": f"{NUMBERED}/models/{model}"}
        if _version(model) in self.containers:
            return {"predictions": self.through(model, request), **who}
        folder = self.bucket / self.models[model].artifact_uri.removeprefix("gs://")
        rows = json.loads((folder / "evidence.json").read_text())["smoke"]["rows"]
        answers = self.answering.answers(rows, body["instances"])
        for answer in answers if _version(model) in self.wrong else ():
            answer["label"] = "other"
        self.smoked.append(_version(model))
        return {"predictions": answers, **who}

    def through(self, model: str, request: Any) -> Any:
        """The predictions of the container."""
        body = {"instances": list(map(MessageToDict, type(request).pb(request).instances))}
        if "parameters" in request:
            body["parameters"] = MessageToDict(type(request).pb(request).parameters)
        route = self.models[model].container_spec.predict_route
        url = f"{self.containers[_version(model)]}{route}"
        answer = behind.answered(
            url, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        if answer.status_code != 200:
            raise Refused(answer.status_code, answer.text)
        return answer.json()["predictions"]

    def series(self, asked: Asked) -> Any:
        """Of each deployed model with a share and each class of codes: a point that began before the
        interval, and one in it; one series a page."""
        match = re.fullmatch(_SERIES, asked.query["filter"])
        if match is None or asked.path != f"/v3/projects/{PROJECT}/timeSeries":
            raise Refused(400, f"{asked.path} with {asked.query}")
        began = datetime.datetime.fromisoformat(asked.query["interval.startTime"])
        end = datetime.datetime.fromisoformat(asked.query["interval.endTime"])
        if began.tzinfo is None or began >= end:
            raise Refused(400, "an interval ends after it begins")
        endpoint, found = self.endpoints[match[1]], []
        for one in endpoint.deployed_models:
            failed = int(self.requests * self.fails.get(_version(one.display_name), 0))
            for code, count in {"2xx": self.requests - failed, "5xx": failed}.items():
                points = [
                    _point(began, 2, count),
                    _point(began - datetime.timedelta(seconds=30), 60, 9_000),
                ]
                labels = {"deployed_model_id": one.id, "response_code": code}
                found.append({"metric": {"labels": labels}, "valueType": "INT64", "points": points})
        begin = int(asked.query.get("pageToken", 0))
        more = {"nextPageToken": str(begin + 1)} if begin + 1 < len(found) else {}
        return {"timeSeries": found[begin : begin + 1], **more}

    def log(self, body: Any) -> Any:
        match = re.fullmatch(_LOG, body["filter"])
        if match is None or body.keys() != {"resourceNames", "filter", "orderBy", "pageSize"}:
            raise Refused(400, f"no filter: {body}")
        if self.log_denied:
            raise Refused(403, "Permission denied")
        lines = [f"of {match[2]} in {match[1]}: ValueError: no tokenizer", "starting"]
        return {"entries": [{"textPayload": f"{line}\n"} for line in lines]}


def _ids(endpoint: Any) -> set[str]:
    return {one.id for one in endpoint.deployed_models}


def _version(name: str) -> str:
    return name.rpartition("-v")[2].partition("-")[0]


def _check_labels(labels: Any) -> None:
    for key, value in labels.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or not re.fullmatch(
            r"[a-z0-9_-]{0,63}", value
        ):
            raise Refused(400, f"label {key}={value}")


def _point(began: datetime.datetime, seconds: int, count: int) -> Any:
    interval = {"startTime": began, "endTime": began + datetime.timedelta(seconds=seconds)}
    shown = {side: time.strftime("%Y-%m-%dT%H:%M:%S.%fZ") for side, time in interval.items()}
    return {"interval": shown, "value": {"int64Value": str(count)}}
