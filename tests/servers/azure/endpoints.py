"""Managed online endpoints of a workspace that is played (rest.py): their deployments, datastores and
models, logs, scoring by Entra's tokens, and the metrics of Azure Monitor.

What is asked is checked against the SDK's own models: fields that they lack, or that are read only,
are refused, as are traffic that does not sum to 100 or 0, names of others, references to nothing,
changes while another is under way (409), and deleting what has traffic. States last a few polls. A
container answers from the evidence that lies in the folder of its model, or is the server that
`containers` names for the deployment.

Authority: azure-ai-ml 1.35.2 (arm_ml_service, 2025-12-01), learn.microsoft.com/azure/machine-learning
(how-to-troubleshoot-online-endpoints), learn.microsoft.com/rest/api/monitor/metrics/list."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.servers import behind
from tests.servers.shadow import Answering
from tests.servers.tls_hosts import Answer, Asked

if TYPE_CHECKING:
    from tests.servers.azure.rest import Workspace

SUFFIX = ".westeurope.inference.ml.azure.com"
POLLS = 2  # that a change takes
_OVER = ("Succeeded", "Failed", "Canceled")
_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]{1,30}[a-zA-Z0-9]")
_MACHINES = ("Standard_D4s_v5", "Standard_DS3_v2")


class Endpoints:
    """`lake` is the folder in which containers of storage lie, as ACCOUNT/CONTAINER. Tests say who is
    `broken` and why, who answers `wrong`, how many `requests` a deployment gets once it has traffic
    and what share of them it `fails`, and what names are `taken` in the region."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.lake = workspace, Path("/nowhere")
        self.there: dict[str, dict[str, Any]] = {}  # by path below the workspace
        self.changes: dict[str, list[Any]] = {}  # polls that are left, and what is done then
        self.operations: dict[str, dict[str, Any]] = {}
        self.points: list[tuple[str, str, str, datetime.datetime, float]] = []
        self.broken: dict[str, str] = {}
        self.fails: dict[str, float] = {}
        self.wrong: set[str] = set()
        self.containers: dict[str, str] = {}
        self.answering = Answering()
        self.taken: set[str] = set()
        self.requests, self.quota, self.model_status = 500, 100, "500"
        one, both = r"(onlineEndpoints/[\w-]+)", r"(onlineEndpoints/[\w-]+)/(deployments/[\w-]+)"
        self.routes: list[tuple[str, str, Callable[..., Answer]]] = [
            ("PUT", one, self.put_endpoint),
            ("GET", one, self.get),
            ("DELETE", one, self.delete),
            ("GET", rf"{one}/deployments", self.list),
            ("PUT", both, self.put_deployment),
            ("GET", both, self.get),
            ("DELETE", both, self.delete),
            ("POST", rf"{both}/getLogs", self.logs),
            ("GET", rf"{one}/providers/Microsoft.Insights/metrics", self.metrics),
            ("PUT", r"datastores/(\w+)", self.put_datastore),
            ("GET", r"datastores/(rekindle_\w+)", self.get_datastore),
            ("PUT", r"models/([\w.-]+)/versions/([\w.-]+)", self.put_model),
            ("GET", r"models/([\w.-]+)/versions", self.list_models),
        ]

    @property
    def names(self) -> dict[str, set[str]]:
        """Deployments by endpoint."""
        found: dict[str, set[str]] = {}
        for path in self.there:
            parts = path.split("/")
            found.setdefault(parts[1], set()).update(parts[3:])
        return found

    def get(self, asked: Asked, *parts: str) -> Answer:
        path = "/".join(parts)
        if change := self.changes.get(path):
            change[0] -= 1
            if change[0] < 0:
                del self.changes[path]
                change[1]()
        if path not in self.there:
            raise self.refused(404, "ResourceNotFound", f"there is no {path}")
        return Answer(200, self.there[path])

    def list(self, asked: Asked, path: str) -> Answer:
        """One a page."""
        if path not in self.there:
            raise self.refused(404, "ResourceNotFound", f"there is no {path}")
        return self.page(asked, self.there, f"{path}/")

    def page(self, asked: Asked, there: dict[str, Any], prefix: str) -> Answer:
        """One of those whose path begins so."""
        found = [one for key, one in there.items() if key.startswith(prefix)]
        begin = int(asked.query.get("$skip", 0))
        page = {"value": found[begin : begin + 1]}
        if begin + 1 < len(found):
            query = f"api-version={asked.query['api-version']}&$skip={begin + 1}"
            page["nextLink"] = f"https://{asked.host}{asked.path}?{query}"
        return Answer(200, page)

    def put_endpoint(self, asked: Asked, path: str) -> Answer:
        body, name = asked.json(), path.rpartition("/")[2]
        self.check(body, "OnlineEndpoint", {"location", "properties", "identity"})
        self.check(body["properties"], "OnlineEndpointProperties", {"authMode"})
        if not _NAME.fullmatch(name) or body["location"] != "westeurope":
            raise self.refused(400, "BadArgument", f"{name} in {body['location']}")
        if name in self.taken:
            raise self.refused(
                400,
                "BadArgument",
                "There is already an endpoint with this name, "
                "Endpoint name needs to be unique within a region.",
            )
        self.settled(path)
        traffic = body["properties"].get("traffic", {})
        if sum(traffic.values()) not in (0, 100):
            raise self.refused(400, "BadArgument", f"traffic sums to {sum(traffic.values())}")
        for one in traffic:
            there = self.there.get(f"{path}/deployments/{one}")
            if there is None or there["properties"]["provisioningState"] != "Succeeded":
                raise self.refused(400, "BadArgument", f"there is no deployment {one}")
        more = {"scoringUri": f"https://{name}{SUFFIX}/predict", "traffic": {}}
        if had := self.there.get(path):
            more["traffic"] = had["properties"]["traffic"]
        made = self.made(path, body, more)

        def done() -> None:
            made["properties"] |= {"provisioningState": "Succeeded", "traffic": traffic}
            for one in traffic:
                bad = round(self.requests * self.fails.get(one, 0))
                self.happened(one, "200", "200", 2, self.requests - bad)
                self.happened(one, "424", self.model_status, 2, bad)

        return self.change(path, made, "Updating" if had else "Creating", done)

    def put_deployment(self, asked: Asked, endpoint: str, rest: str) -> Answer:
        body, path, name = asked.json(), f"{endpoint}/{rest}", rest.rpartition("/")[2]
        self.check(body, "OnlineDeployment", {"location", "properties", "sku"})
        properties = body["properties"]
        self.check(
            properties,
            "ManagedOnlineDeployment",
            {
                "endpointComputeType",
                "model",
                "environmentId",
                "instanceType",
            },
        )
        for probe in ("livenessProbe", "readinessProbe"):
            self.check(properties.get(probe, {}), "ProbeSettings", set())
        self.check(properties.get("requestSettings", {}), "OnlineRequestSettings", set())
        self.check(body["sku"], "Sku", {"name", "capacity"})
        if endpoint not in self.there:
            raise self.refused(404, "ResourceNotFound", f"there is no {endpoint}")
        self.settled(endpoint)
        self.settled(path)
        if not _NAME.fullmatch(name) or properties["instanceType"] not in _MACHINES:
            raise self.refused(400, "BadArgument", f"{name} on {properties['instanceType']}")
        if body["sku"]["capacity"] > self.quota:
            raise self.refused(400, "OutOfQuota", "Not enough quota available for this machine")
        self.workspace.known(properties["model"])
        self.workspace.known(properties["environmentId"])
        assert set(properties["environmentVariables"]) == {"REKINDLE_SERVE"}
        made = self.made(path, body, {})
        operation = f"mfeOperationsStatus/{len(self.operations)}"
        self.operations[operation] = {"status": "InProgress"}

        def done() -> None:
            reason = self.broken.get(name)
            if reason is None and not (self.folder(made) / "served.json").is_file():
                reason = f"no model lies at {self.folder(made)}"
            made["properties"]["provisioningState"] = "Failed" if reason else "Succeeded"
            self.operations[operation] = {"status": "Succeeded"}
            if reason:
                error = {"code": "BadArgument", "message": reason}
                self.operations[operation] = {"status": "Failed", "error": error}

        answer = self.change(path, made, "Creating", done)
        place = self.workspace.root.partition("/resourceGroups")[0]
        url = f"https://management.azure.com{place}/providers/Microsoft.MachineLearningServices"
        at = f"{url}/locations/westeurope/{operation}?api-version=2025-12-01"
        return Answer(answer.status, answer.body, {"Azure-AsyncOperation": at})

    def delete(self, asked: Asked, *parts: str) -> Answer:
        path = "/".join(parts)
        if path not in self.there:
            return Answer(204)
        for one in self.there if len(parts) == 1 else [path]:
            if one.startswith(path):
                self.settled(one)
        name, traffic = path.rpartition("/")[2], self.there[parts[0]]["properties"]["traffic"]
        if len(parts) == 2 and traffic.get(name):
            raise self.refused(400, "BadArgument", f"{name} has traffic")

        def done() -> None:
            for one in [key for key in self.there if key == path or key.startswith(f"{path}/")]:
                del self.there[one]

        return self.change(path, self.there[path], "Deleting", done)

    def logs(self, asked: Asked, endpoint: str, rest: str) -> Answer:
        self.check(asked.json(), "DeploymentLogsRequest", set())
        assert asked.json()["containerType"] in ("InferenceServer", "StorageInitializer")
        self.get(asked, endpoint, rest)
        return Answer(200, {"content": "starting\nerror: the end of its log"})

    def operation(self, path: str) -> Answer:
        found = self.operations.get(path[path.index("mfeOperationsStatus") :])
        return Answer(200, found) if found else Answer(404, {"error": {"code": "NotFound"}})

    def put_datastore(self, asked: Asked, name: str) -> Answer:
        properties = asked.json()["properties"]
        self.check(properties, "AzureBlobDatastore", {"datastoreType", "credentials"})
        if properties["credentials"] != {"credentialsType": "None"}:
            raise self.refused(400, "BadArgument", "a secret")
        self.workspace.assets[f"datastores/{name}"] = made = {"properties": properties}
        return Answer(201, made)

    def get_datastore(self, asked: Asked, name: str) -> Answer:
        found = self.workspace.assets.get(f"datastores/{name}")
        if found is None:
            raise self.refused(404, "UserError", f"there is no datastore {name}")
        return Answer(200, found)

    def put_model(self, asked: Asked, name: str, version: str) -> Answer:
        properties = asked.json()["properties"]
        self.check(properties, "ModelVersionProperties", {"modelUri", "modelType"})
        path = f"models/{name}/versions/{version}"
        if had := self.workspace.assets.get(path):
            same = all(
                had["properties"][key] == properties[key] for key in ("modelUri", "modelType")
            )
            if not same:
                raise self.refused(
                    400, "UserError", "of a version only tags and stage can be changed"
                )
            had["properties"] |= properties
            return Answer(200, had)
        root = self.workspace.root.replace("/providers/Microsoft.MachineLearningServices", "")
        store = re.fullmatch(rf"azureml:/{root}/(datastores/\w+)/paths/.+", properties["modelUri"])
        if not store or store[1] not in self.workspace.assets:
            raise self.refused(400, "UserError", f"nothing lies at {properties['modelUri']}")
        return self.workspace.put_asset(path, properties)

    def list_models(self, asked: Asked, name: str) -> Answer:
        return self.page(asked, self.workspace.assets, f"models/{name}/versions/")

    def score(self, asked: Asked) -> Answer:
        """The service lets the container answer; other than 200 is 424."""
        self.workspace.check_token(asked, "authorization", "Bearer ", ("https://ml.azure.com",))
        endpoint = f"onlineEndpoints/{asked.host.removesuffix(SUFFIX)}"
        name = asked.headers.get("azureml-model-deployment", "")
        made = self.there.get(f"{endpoint}/deployments/{name}")
        if (asked.method, asked.path) != ("POST", "/predict") or made is None:
            raise self.refused(404, "NotFound", f"there is no deployment {name}")
        if name in self.containers:
            answer = behind.answered(f"{self.containers[name]}/predict", asked.body, asked.headers)
            code = {"ms-azureml-model-error-statuscode": str(answer.status_code)}
            fine = answer.status_code == 200
            return Answer(200 if fine else 424, answer.json(), {} if fine else code)
        rows = json.loads((self.folder(made) / "evidence.json").read_text())["smoke"]["rows"]
        found = self.answering.answers(rows, asked.json()["instances"])
        if name in self.wrong:
            found = [{**one, "label": "low"} for one in found]
        return Answer(200, {"predictions": found})

    def folder(self, deployment: dict[str, Any]) -> Path:
        """Where the model of a deployment lies."""
        assets, root = self.workspace.assets, f"{self.workspace.root}/"
        uri = assets[deployment["properties"]["model"].removeprefix(root)]["properties"]["modelUri"]
        store, _, below = uri.partition("/datastores/")[2].partition("/paths/")
        of = assets[f"datastores/{store}"]["properties"]
        return self.lake / of["accountName"] / of["containerName"] / below

    def happened(self, name: str, status: str, model: str, minutes: float, count: float) -> None:
        """`count` requests, so many minutes from now."""
        at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=minutes)
        self.points.append((name, status, model, at, count))

    def metrics(self, asked: Asked, path: str) -> Answer:
        query, dimensions = asked.query, ("deployment", "statusCode", "modelStatusCode")
        wanted = {
            "metricnames": "RequestsPerMinute",
            "interval": "PT1M",
            "aggregation": "Average",
            "$filter": " and ".join(f"{one} eq '*'" for one in dimensions),
        }
        if any(query.get(key) != value for key, value in wanted.items()):
            raise self.refused(400, "BadRequest", f"{query}")
        begin, end = (datetime.datetime.fromisoformat(one) for one in query["timespan"].split("/"))
        if begin >= end:
            raise self.refused(400, "BadRequest", "the timespan is empty")
        series: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for *key, at, count in self.points:
            if begin <= at < end:
                point = {"timeStamp": at.isoformat(), "average": count}
                series.setdefault(tuple(key), []).append(point)
        found = [
            {
                "metadatavalues": [
                    {"name": {"value": name.lower()}, "value": value}
                    for name, value in zip(dimensions, key, strict=True)
                ],
                "data": data,
            }
            for key, data in series.items()
        ]
        found = found[: int(query.get("top", 10))]
        return Answer(
            200, {"value": [{"name": {"value": "RequestsPerMinute"}, "timeseries": found}]}
        )

    # what they share

    def check(self, body: dict[str, Any], model: str, required: set[str]) -> None:
        """Whether the SDK's model has these fields, and lets them be set."""
        from azure.ai.ml._restclient.arm_ml_service import models

        fields = getattr(models, model)({})._attr_to_rest_field.values()
        known = {
            one._rest_name
            for one in fields
            if one._visibility is None or {"create", "update"} & {*one._visibility}
        }
        if lacks := required - set(body):
            raise self.refused(400, "BadArgument", f"lacks {sorted(lacks)}")
        if unknown := set(body) - known:
            raise self.refused(400, "BadArgument", f"{model}: unknown {sorted(unknown)}")

    def settled(self, path: str) -> None:
        if path in self.changes:
            state = self.there[path]["properties"]["provisioningState"]
            raise self.refused(409, "Conflict", f"{path} is in {state} provisioning state")

    def made(self, path: str, body: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        made = self.workspace.resource(path, {**body["properties"], **more})
        self.there[path] = {**made, **{key: body[key] for key in body if key != "properties"}}
        return self.there[path]

    def change(
        self, path: str, there: dict[str, Any], state: str, done: Callable[[], None]
    ) -> Answer:
        there["properties"]["provisioningState"] = state
        self.changes[path] = [POLLS, done]
        return Answer(202 if state == "Deleting" else 201, there)

    def refused(self, status: int, code: str, message: str) -> Exception:
        from tests.servers.azure.rest import Refused

        return Refused(status, code, message)
