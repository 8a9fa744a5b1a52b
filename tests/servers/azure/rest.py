"""Azure's REST APIs as far as azure-ai-ml asks them for jobs and schedules: a workspace, its compute,
uploads of code, environments, components, jobs and schedules.

What is asked otherwise than the service takes it is a 400 or a 404 and stands in `refused`: unknown
paths and fields, fields that lack, references to what there is not, a job that exists with another
content. Calls need a token for Azure Resource Manager, uploads the signature that they were given.
`faults` are answered in place of, or after, the next call that they fit.

Authority: the clients of azure-ai-ml 1.35.2; learn.microsoft.com/rest/api/azureml."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import jwt

from tests.servers.azure.endpoints import SUFFIX, Endpoints
from tests.servers.azure.history import DISCOVERY, SIGNATURE, History
from tests.servers.tls_hosts import Answer, Asked, Dropped
from tests.servers.troubles import Broken, Troubled

HOSTS = (
    "management.azure.com",
    "*.blob.core.windows.net",
    "*.api.azureml.ms",
    f"*{SUFFIX}",
)
RESOURCES = (
    "https://management.azure.com",
    "https://management.core.windows.net/",
    "https://ml.azure.com",
)
SUBSCRIPTION = "00000000-0000-0000-0000-000000000001"
TENANT = "00000000-0000-0000-0000-00000000000a"
_SIGNATURE = "of-this-upload"
_KEY = "a key that nobody checks, long enough"
_VERSION = re.compile(r"\d{4}-\d\d-\d\d(-preview)?")
_OVER = ("Completed", "Failed", "Canceled")


def token_for(resource: str) -> str:
    """As Entra would sign one, but for the key."""
    return jwt.encode({"aud": resource, "tid": TENANT, "sub": "who submits"}, _KEY, "HS256")


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


_ALARMS = {  # learn.microsoft.com/rest/api/monitor/metric-alerts; azure-portal/azure-portal-dashboards-structure
    "Microsoft.Insights/metricAlerts": (
        "2018-03-01",
        {
            "description",
            "severity",
            "enabled",
            "autoMitigate",
            "scopes",
            "evaluationFrequency",
            "windowSize",
            "criteria",
            "actions",
        },
    ),
    "Microsoft.Portal/dashboards": ("2020-09-01-preview", {"lenses"}),
}


class Workspace(Troubled):
    """The workspace `forge` in the group `rg`; `compute` are its clusters."""

    resources = RESOURCES  # any of these tokens is good for its run history

    def __init__(self, compute: tuple[str, ...] = ()) -> None:
        self.root = (
            f"/subscriptions/{SUBSCRIPTION}/resourceGroups/rg/providers/"
            "Microsoft.MachineLearningServices/workspaces/forge"
        )
        self.compute = compute
        self.most = 4  # nodes of a cluster
        self.around: Any = None  # facts.py's, where it is played too
        self.assets: dict[str, dict[str, Any]] = {}  # by path below the workspace
        self.blobs: dict[str, bytes] = {}
        self.uploads: set[str] = set()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.schedules: dict[str, dict[str, Any]] = {}
        self.alarms: dict[str, dict[str, Any]] = {}  # metric alerts and dashboards, by path
        super().__init__()
        self.history = History(self)
        self.endpoints = Endpoints(self)
        self.once = False  # whether a job that is there refuses even what it was made with
        asset = r"([\w.-]+)/versions/([\w.-]+)"
        routes: list[tuple[str, str, Callable[..., Answer]]] = [
            *self.endpoints.routes,
            ("GET", r"computes/([\w-]+)", self.get_compute),
            ("GET", r"codes/([\w.-]+)/versions", self.list_codes),
            ("POST", rf"codes/{asset}/startPendingUpload", self.start_upload),
            ("PUT", rf"codes/{asset}", self.put_code),
            ("GET", rf"(codes|environments|components|models)/{asset}", self.get_asset),
            ("PUT", rf"environments/{asset}", self.put_environment),
            ("PUT", rf"components/{asset}", self.put_component),
            ("GET", r"datastores/(\w+)", lambda a, name: self.history.datastore(a, name, False)),
            (
                "POST",
                r"datastores/(\w+)/listSecrets",
                lambda a, name: self.history.datastore(a, name, True),
            ),
            ("GET", r"jobs", self.list_jobs),
            ("PUT", r"jobs/([\w-]+)", self.put_job),
            ("GET", r"jobs/([\w-]+)", self.get_job),
            ("POST", r"jobs/([\w-]+)/cancel", self.cancel_job),
            ("PUT", r"schedules/([\w-]+)", self.put_schedule),
            ("GET", r"schedules/([\w-]+)", self.get_schedule),
            ("DELETE", r"schedules/([\w-]+)", self.delete_schedule),
            ("GET", r"schedules", self.list_schedules),
        ]
        self.routes = [(method, re.compile(path), call) for method, path, call in routes]

    def answer(self, asked: Asked) -> Answer:
        try:
            return self.met(self.name_of(asked), lambda: self.done(asked))
        except Refused as error:
            self.refused.append(f"{asked}: {error.message}")
            return Answer(error.status, _error(error.code, error.message))
        except Broken as broken:
            fault = broken.fault
            if broken.dropped():
                raise Dropped from None
            return Answer(fault.status, _error("Fault", "as the test wants it"), fault.headers)

    def name_of(self, asked: Asked) -> str:
        if asked.host.endswith(".api.azureml.ms"):
            return f"{asked.method} history {asked.path.rpartition('/')[2]}"
        if asked.host.endswith(SUFFIX):
            return f"{asked.method} score"
        if asked.host != "management.azure.com":
            return f"{asked.method} blob"
        rest = asked.path.removeprefix(self.root).strip("/").split("/")
        if rest[2:] and rest[0] == "onlineEndpoints":
            rest = ["metrics" if rest[2] == "providers" else rest[2], *rest[3:]]
        return f"{asked.method} {rest[0]}" + (f" {rest[-1]}" if asked.method == "POST" else "")

    def done(self, asked: Asked) -> Answer:
        if asked.host.endswith(".blob.core.windows.net"):
            return self.blob(asked)
        if asked.host.endswith(".api.azureml.ms"):
            return self.history.answer(asked)
        if asked.host.endswith(SUFFIX):
            return self.endpoints.score(asked)
        self.check_token(asked, "authorization", "Bearer ", RESOURCES[:2])
        if not _VERSION.fullmatch(asked.query.get("api-version", "")):
            raise Refused(400, "MissingApiVersionParameter", f"api-version in {asked.query}")
        if (asked.method, asked.path) == ("GET", self.root):
            about = {
                "friendlyName": "forge",
                "discoveryUrl": DISCOVERY,
                "applicationInsights": f"{self.group}/Microsoft.insights/components/forge",
            }
            return Answer(200, self.resource("", about))
        if "/mfeOperationsStatus/" in asked.path:
            return self.endpoints.operation(asked.path)
        if not asked.path.startswith(f"{self.root}/"):
            return self.alarm(asked)
        rest = asked.path.removeprefix(f"{self.root}/")
        for method, pattern, call in self.routes:
            if method == asked.method and (match := pattern.fullmatch(rest)):
                return call(asked, *match.groups())
        raise Refused(404, "NotFound", f"there is no {asked.method} {rest}")

    @property
    def group(self) -> str:
        return f"{self.root.partition('/providers/')[0]}/providers"

    def alarm(self, asked: Asked) -> Answer:
        """Microsoft.Insights/metricAlerts and Microsoft.Portal/dashboards: a PUT replaces all."""
        match = re.fullmatch(rf"{self.group}/({'|'.join(_ALARMS)})/[\w-]+", asked.path)
        if match is None:
            raise Refused(404, "ResourceNotFound", f"there is no {asked.path}")
        kind = match[1]
        version, properties = _ALARMS[kind]
        if asked.query != {"api-version": version}:
            raise Refused(400, "NoRegisteredProviderFound", f"{kind} in {asked.query}")
        if asked.method == "PUT":
            body = asked.json()
            found = {*body} - {"tags"}, {*body["properties"]}
            if found != ({"location", "properties"}, properties):
                raise Refused(400, "BadRequest", f"{kind} with {found}")
            for criterion in body["properties"].get("criteria", {}).get("allOf", ()):
                criterion["monitorTemplateType"] = "MonitorTemplate"  # a field of its own
            self.alarms[asked.path] = {
                "id": asked.path,
                "name": asked.path.rpartition("/")[2],
                **body,
            }
        elif asked.method == "DELETE":
            return Answer(200 if self.alarms.pop(asked.path, None) else 204)
        if asked.path not in self.alarms:
            raise Refused(404, "ResourceNotFound", f"there is no {asked.path}")
        return Answer(200, self.alarms[asked.path])

    def check_token(
        self, asked: Asked, header: str, prefix: str, resources: tuple[str, ...]
    ) -> None:
        given = asked.headers.get(header, "")
        try:
            assert given.startswith(prefix)
            claims = jwt.decode(
                given.removeprefix(prefix), _KEY, ["HS256"], options={"verify_aud": False}
            )
            assert claims["aud"] in resources
        except (AssertionError, jwt.PyJWTError):
            raise Refused(401, "InvalidAuthenticationToken", f"no {header} for this") from None

    # storage

    def blob(self, asked: Asked) -> Answer:
        if asked.method == "GET" and f"sig={asked.query.get('sig')}" in SIGNATURE.split("&"):
            return self.history.file(asked)
        if asked.query.get("sig") != _SIGNATURE or "authorization" in asked.headers:
            raise Refused(403, "AuthenticationFailed", "no signature")
        container, _, name = asked.path.strip("/").partition("/")
        if container not in self.uploads:
            raise Refused(404, "ContainerNotFound", f"there is no {container}")
        key, comp = f"{container}/{name}", asked.query.get("comp")
        if asked.method == "PUT" and comp is None:
            if asked.headers.get("x-ms-blob-type") != "BlockBlob":
                raise Refused(400, "InvalidHeaderValue", "only block blobs")
            self.blobs[key] = asked.body
            return Answer(201, None, _ETAG)
        if key not in self.blobs:
            return Answer(404, None, {"x-ms-error-code": "BlobNotFound"})
        if asked.method == "HEAD":
            return Answer(200, None, {**_ETAG, "x-ms-blob-type": "BlockBlob"})
        if asked.method == "PUT" and comp == "metadata":
            return Answer(200, None, _ETAG)
        raise Refused(400, "UnsupportedHttpVerb", str(asked))

    # assets

    def get_compute(self, asked: Asked, name: str) -> Answer:
        if name not in self.compute:
            raise Refused(404, "ResourceNotFound", f"there is no compute {name}")
        scale = {
            "minNodeCount": 0,
            "maxNodeCount": self.most,
            "nodeIdleTimeBeforeScaleDown": "PT2M",
        }
        cluster = {"vmSize": "Standard_D4s_v5", "vmPriority": "Dedicated", "scaleSettings": scale}
        properties = {"computeType": "AmlCompute", "computeLocation": "here", "properties": cluster}
        return Answer(200, self.resource(f"computes/{name}", properties))

    def list_codes(self, asked: Asked, name: str) -> Answer:
        found = [
            asset
            for path, asset in self.assets.items()
            if path.startswith("codes/")
            and asset["properties"]["properties"].get("hash_sha256") == asked.query.get("hash", "-")
        ]
        return Answer(200, {"value": found})

    def start_upload(self, asked: Asked, name: str, version: str) -> Answer:
        body = _only(asked.json(), {"pendingUploadType"}, set())
        if body["pendingUploadType"] != "TemporaryBlobReference":
            raise Refused(400, "BadArgument", str(body))
        container = f"upload-{len(self.uploads)}"
        self.uploads.add(container)
        url = f"https://account.blob.core.windows.net/{container}"
        credential = {"credentialType": "SAS", "sasUri": f"{url}?sig={_SIGNATURE}"}
        reference = {"blobUri": url, "storageAccountArmId": "account", "credential": credential}
        return Answer(
            200,
            {
                "blobReferenceForConsumption": reference,
                "pendingUploadId": container,
                "pendingUploadType": "TemporaryBlobReference",
            },
        )

    def put_code(self, asked: Asked, name: str, version: str) -> Answer:
        properties = _properties(asked, {"codeUri"}, _COMMON)
        container = properties["codeUri"].split("/")[3]
        if not any(key.startswith(f"{container}/") for key in self.blobs):
            raise Refused(400, "UserError", f"nothing lies at {properties['codeUri']}")
        return self.put_asset(f"codes/{name}/versions/{version}", properties)

    def put_environment(self, asked: Asked, name: str, version: str) -> Answer:
        properties = _properties(asked, {"image"}, _COMMON | {"osType", "inferenceConfig"})
        return self.put_asset(f"environments/{name}/versions/{version}", properties)

    def put_component(self, asked: Asked, name: str, version: str) -> Answer:
        properties = _properties(asked, {"componentSpec"}, _COMMON)
        spec = properties["componentSpec"]
        _only(spec, _COMPONENT, _COMPONENT_MORE)
        for field in ("code", "environment"):
            self.known(spec[field].removeprefix("azureml:"))
        return self.put_asset(f"components/{name}/versions/{version}", properties)

    def put_asset(self, path: str, properties: dict[str, Any]) -> Answer:
        status = 200 if path in self.assets else 201
        self.assets[path] = self.resource(path, {"properties": {}, **properties})
        return Answer(status, self.assets[path])

    def get_asset(self, asked: Asked, kind: str, name: str, version: str) -> Answer:
        path = f"{kind}/{name}/versions/{version}"
        if path not in self.assets:
            raise Refused(404, "ResourceNotFound", f"there is no {path}")
        return Answer(200, self.assets[path])

    def known(self, reference: str) -> None:
        """A reference by the asset's whole id."""
        if reference.removeprefix(f"{self.root}/") not in self.assets:
            raise Refused(400, "UserError", f"there is no {reference}")

    def resource(self, path: str, properties: dict[str, Any]) -> dict[str, Any]:
        parts = path.split("/")
        return {
            "id": f"{self.root}/{path}",
            "name": parts[-1],
            "properties": properties,
            "type": "Microsoft.MachineLearningServices/workspaces/" + "/".join(parts[::2]),
            "systemData": {"createdAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
        }

    # jobs

    def put_job(self, asked: Asked, name: str) -> Answer:
        self.check_token(asked, "x-azureml-token", "", RESOURCES[2:])
        properties = self.checked_job(asked.json())
        if name in self.jobs:
            if self.once or self.jobs[name]["asked"] != asked.json():
                raise Refused(400, "UserError", "a job cannot be changed once it is there")
            return Answer(200, self.jobs[name]["resource"])
        url = f"https://ml.azure.com/runs/{name}?wsid={self.root}"
        properties |= {
            "status": "NotStarted",
            "services": {"Studio": {"jobServiceType": "Studio", "endpoint": url, "status": None}},
        }
        made = self.resource(f"jobs/{name}", properties)
        self.jobs[name] = {"asked": asked.json(), "resource": made}
        return Answer(201, made)

    def checked_job(self, body: Any) -> dict[str, Any]:
        found = _only(_only(body, {"properties"}, set())["properties"], _JOB, _JOB_MORE)
        properties: dict[str, Any] = dict(found)
        if properties["jobType"] != "Pipeline":
            raise Refused(400, "BadArgument", properties["jobType"])
        for node in properties["jobs"].values():
            _only(node, _NODE, _NODE_MORE)
            self.known(node["componentId"])
            tier = _only(node.get("queue_settings", {}), set(), {"job_tier"}).get(
                "job_tier", "null"
            )
            if tier.lower() not in ("null", "basic", "standard", "premium", "spot"):
                raise Refused(400, "BadArgument", f"no tier {tier}")
            if compute := node.get("computeId"):
                self.known_compute(compute)
        self.known_compute(properties["settings"]["default_compute"])
        return properties

    def known_compute(self, reference: str) -> None:
        known = {f"{self.root}/computes/{name}" for name in ("serverless", *self.compute)}
        if reference not in known:
            raise Refused(400, "UserError", f"there is no compute {reference}")

    def list_jobs(self, asked: Asked) -> Answer:
        """Those that have a tag, the newest first, in pages of two."""
        tag = asked.query["tag"]
        jobs = [job["resource"] for job in reversed(self.jobs.values())]
        jobs = [job for job in jobs if tag in job["properties"].get("tags", {})]
        begin = int(asked.query.get("$skip", 0))
        more = {}
        if begin + 2 < len(jobs):
            query = f"api-version={asked.query['api-version']}&tag={tag}&$skip={begin + 2}"
            more["nextLink"] = f"https://{asked.host}{asked.path}?{query}"
        return Answer(200, {"value": jobs[begin : begin + 2], **more})

    def get_job(self, asked: Asked, name: str) -> Answer:
        if name not in self.jobs:
            raise Refused(404, "UserError", f"Job {name} was not found")
        return Answer(200, self.jobs[name]["resource"])

    def cancel_job(self, asked: Asked, name: str) -> Answer:
        self.get_job(asked, name)
        properties = self.jobs[name]["resource"]["properties"]
        if properties["status"] in _OVER:
            raise Refused(400, "UserError", f"the job is {properties['status']} already")
        properties["status"] = "Canceled"
        return Answer(200)

    # schedules

    def put_schedule(self, asked: Asked, name: str) -> Answer:
        properties = _properties(
            asked,
            {"trigger", "action"},
            {
                "displayName",
                "description",
                "isEnabled",
                "tags",
                "properties",
            },
        )
        trigger = _only(
            properties["trigger"],
            {"triggerType", "expression"},
            {
                "timeZone",
                "startTime",
                "endTime",
            },
        )
        if trigger["triggerType"] != "Cron" or len(trigger["expression"].split()) != 5:
            raise Refused(400, "BadArgument", str(trigger))
        action = _only(properties["action"], {"actionType", "jobDefinition"}, set())
        self.checked_job({"properties": action["jobDefinition"]})
        status = 200 if name in self.schedules else 201
        more = {"provisioningState": "Succeeded", "isEnabled": properties.get("isEnabled", True)}
        self.schedules[name] = self.resource(f"schedules/{name}", {**properties, **more})
        return Answer(status, self.schedules[name])

    def get_schedule(self, asked: Asked, name: str) -> Answer:
        if name not in self.schedules:
            raise Refused(404, "UserError", f"there is no schedule {name}")
        return Answer(200, self.schedules[name])

    def delete_schedule(self, asked: Asked, name: str) -> Answer:
        if name in self.schedules and self.schedules[name]["properties"]["isEnabled"]:
            raise Refused(400, "UserError", "a schedule that is enabled cannot be deleted")
        return Answer(200 if self.schedules.pop(name, None) else 204)

    def list_schedules(self, asked: Asked) -> Answer:
        return Answer(200, {"value": list(self.schedules.values())})


_ETAG = {"ETag": '"0x1"', "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT"}
_COMMON = {"isAnonymous", "isArchived", "properties", "tags", "description"}
_COMPONENT = {"type", "command", "code", "environment", "inputs", "outputs", "name", "version"}
_COMPONENT_MORE = {"is_deterministic", "distribution", "$schema", "_source", "display_name"}
_JOB = {"jobType", "jobs", "settings"}
_JOB_MORE = {
    "displayName",
    "experimentName",
    "tags",
    "properties",
    "inputs",
    "outputs",
    "isArchived",
    "description",
}
_NODE = {"componentId", "type", "inputs", "outputs", "name"}
_NODE_MORE = {
    "resources",
    "distribution",
    "limits",
    "identity",
    "environment_variables",
    "computeId",
    "queue_settings",
    "_source",
}


def _properties(asked: Asked, required: set[str], more: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = _only(
        _only(asked.json(), {"properties"}, set())["properties"], required, more
    )
    return found


def _only(body: Any, required: set[str], more: set[str]) -> Any:
    """`body`, which has the fields that it needs and none that nobody knows."""
    given = set(body)
    if lacks := required - given:
        raise Refused(400, "BadArgument", f"lacks {sorted(lacks)}: {sorted(given)}")
    if unknown := given - required - more:
        raise Refused(400, "BadArgument", f"unknown {sorted(unknown)}")
    return body


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}
