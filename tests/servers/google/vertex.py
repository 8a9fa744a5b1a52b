"""Vertex AI, as far as a launcher and its nodes need it, over real HTTP and with real processes.

customJobs create, get, list and cancel, pipelineJobs get, the metadata server's token, Secret
Manager's access. Every body is parsed into the service's own proto (an unknown field is a 400),
every call needs the token (else 401). Replicas are processes with CLUSTER_SPEC as the documentation
has it and a /gcs of their own (a mount in a namespace).

The primary's end is the job's; any other replica that fails ends all. Tests steer it: `hold` stops
the next call of a kind before or after it took effect, `failures` are answers to give instead,
`capacity` says whether there are machines, `take_away` is what befalls spot machines."""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import re
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from google.cloud import aiplatform_v1 as api
from google.protobuf import json_format

from tests.servers.google.job import OVER, Job
from tests.servers.google.rest import STEPS_TOKEN as TOKEN

ROOT = Path(__file__).parents[3]
_JOBS = re.compile(r"/v1/(projects/[^/]+/locations/[^/]+)/customJobs")
_JOB = re.compile(r"/v1/(projects/[^/]+/locations/[^/]+/customJobs/\d+)(:cancel)?")
_RUN = re.compile(r"/v1/(projects/[^/]+/locations/[^/]+/pipelineJobs/[^/:]+)")
_SECRET = re.compile(r"/v1/(projects/[^/]+/secrets/[^/]+/versions/[^/:]+):access")

METADATA: dict[str, dict[str, Any]] = {
    "": {},
    "/computeMetadata/v1/instance/service-accounts/default": {
        "aliases": ["default"],
        "email": "steps@forge.iam.gserviceaccount.com",
        "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
    },
}


@dataclasses.dataclass
class Gate:
    """A call that was stopped: `reached` once it is there, `open` to let it go on."""

    reached: threading.Event = dataclasses.field(default_factory=threading.Event)
    open: threading.Event = dataclasses.field(default_factory=threading.Event)


class Refused(Exception):
    """An answer that is no 200."""

    def __init__(self, code: int, status: str, message: str) -> None:
        self.code, self.status, self.message = code, status, message


class Vertex:
    """The service; `folder` is Cloud Storage, with a folder a bucket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, Job] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, str] = {}
        self.gates: dict[str, Gate] = {}
        self.failures: list[tuple[str, int, str, str]] = []
        self.denied: set[str] = set()
        self.unlisted = 0
        self.calls: collections.Counter[str] = collections.Counter()
        self.capacity = threading.Event()
        self.capacity.set()
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"service": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Vertex:
        return self

    def __exit__(self, *_: object) -> None:
        for gate in self.gates.values():
            gate.open.set()
        for job in self.jobs.values():
            job.tell(signal.SIGKILL)
        self.server.shutdown()
        self.server.server_close()

    def environment(self) -> dict[str, str]:
        """What a container needs to find all of this in place of Google."""
        host = f"127.0.0.1:{self.server.server_address[1]}"
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "GCE_METADATA_HOST": host,
            "GCE_METADATA_IP": host,
            "REKINDLE_GOOGLE_ENDPOINT": f"http://{host}",
        }

    def hold(self, moment: str) -> Gate:
        """Stop the next call at `before create`, `after create`, `before list`, ..."""
        self.gates[moment] = Gate()
        return self.gates[moment]

    def come(self, moment: str) -> None:
        gate = self.gates.pop(moment, None)
        if gate:
            gate.reached.set()
            gate.open.wait(60)

    # the calls

    def token(self, headers: Any) -> dict[str, Any]:
        if headers.get("Metadata-Flavor") != "Google":
            raise Refused(403, "PERMISSION_DENIED", "Missing Metadata-Flavor:Google header.")
        return {"access_token": TOKEN, "expires_in": 3599, "token_type": "Bearer"}

    def create(self, parent: str, body: Any) -> dict[str, Any]:
        proto = api.CustomJob()
        _parse(body, api.CustomJob.pb(proto))
        _check(proto)
        with self.lock:
            name = f"{parent}/customJobs/{len(self.jobs) + 1:019d}"
            self.jobs[name] = Job(self, name, proto)
        return _json(self.jobs[name].proto)

    def list(self, parent: str, query: dict[str, list[str]]) -> dict[str, Any]:
        request = {"parent": parent, **{k: v[0] for k, v in query.items()}}
        _parse(request, api.ListCustomJobsRequest.pb(api.ListCustomJobsRequest()))
        match = re.fullmatch(r"labels\.([a-z0-9_-]+)=([a-z0-9_-]*)", request.get("filter", ""))
        if not match:
            raise Refused(400, "INVALID_ARGUMENT", f"no filter: {request.get('filter')}")
        found = [job for job in self.jobs.values() if job.proto.labels.get(match[1]) == match[2]]
        if self.unlisted:  # the newest is not there yet
            self.unlisted -= 1
            found = found[:-1]
        at, size = int(request.get("pageToken", 0)), min(2, int(request.get("pageSize", 100)))
        page: dict[str, Any] = {"customJobs": [_json(job.proto) for job in found[at : at + size]]}
        return page | ({"nextPageToken": str(at + size)} if at + size < len(found) else {})

    def job(self, name: str) -> Job:
        if name not in self.jobs:
            raise Refused(404, "NOT_FOUND", f"{name} does not exist")
        return self.jobs[name]

    def cancel(self, name: str) -> dict[str, Any]:
        if self.job(name).state in OVER:
            raise Refused(400, "FAILED_PRECONDITION", f"{name} is over")
        self.job(name).end("CANCELLED")
        return {}

    def run(self, name: str) -> dict[str, Any]:
        if name not in self.runs:
            raise Refused(404, "NOT_FOUND", f"{name} does not exist")
        proto = api.PipelineJob()
        _parse(self.runs[name], api.PipelineJob.pb(proto))
        return _json(proto)

    def access(self, name: str) -> dict[str, Any]:
        if name not in self.secrets:
            raise Refused(403, "PERMISSION_DENIED", f"secretmanager.versions.access on {name}")
        return {
            "name": name,
            "payload": {"data": base64.b64encode(self.secrets[name].encode()).decode()},
        }


def _json(proto: Any) -> dict[str, Any]:
    found: dict[str, Any] = json_format.MessageToDict(type(proto).pb(proto))
    return found


def _parse(body: Any, proto: Any) -> None:
    try:
        json_format.ParseDict(body, proto)
    except json_format.ParseError as error:
        raise Refused(400, "INVALID_ARGUMENT", str(error)) from error


def _check(job: Any) -> None:
    """What the service says of a CustomJob beyond its proto."""
    spec = job.job_spec
    if not job.display_name or len(job.display_name) > 128:
        raise Refused(400, "INVALID_ARGUMENT", "display_name")
    if spec.worker_pool_specs[0].replica_count != 1:
        raise Refused(400, "INVALID_ARGUMENT", "the first worker pool has one replica")
    for key, value in job.labels.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or not re.fullmatch(
            r"[a-z0-9_-]{0,63}", value
        ):
            raise Refused(400, "INVALID_ARGUMENT", f"label {key}={value}")
    for pool in spec.worker_pool_specs:
        if not pool.container_spec.image_uri or not pool.machine_spec.machine_type:
            raise Refused(400, "INVALID_ARGUMENT", "an image and a machine")


class _Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True
    service: Vertex
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""

    def answer(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        try:
            told, code = self.told(unquote(url.path), parse_qs(url.query), raw), 200
        except Refused as refused:
            code = refused.code
            told = {"error": {"code": code, "status": refused.status, "message": refused.message}}
        except ConnectionAbortedError:  # half an answer
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b'{"half": ')
            self.close_connection = True
            return
        content = json.dumps(told).encode()
        try:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # whoever asked was killed
            self.close_connection = True

    def told(self, path: str, query: dict[str, list[str]], raw: bytes) -> dict[str, Any]:
        service, get = self.service, self.command == "GET"
        if get and (path == "/" or path.startswith("/computeMetadata/")):
            return self.metadata(path.rstrip("/"))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "UNAUTHENTICATED", "no token")
        body = json.loads(raw or b"{}")
        if match := _JOBS.fullmatch(path):
            if get:
                return self.call("list", lambda: service.list(match[1], query))
            return self.call("create", lambda: service.create(match[1], body))
        if (match := _JOB.fullmatch(path)) and get == (match[2] is None):
            if get:
                return self.call("get", lambda: _json(service.job(match[1]).proto))
            return self.call("cancel", lambda: service.cancel(match[1]))
        if get and (match := _RUN.fullmatch(path)):
            return self.call("run", lambda: service.run(match[1]))
        if get and (match := _SECRET.fullmatch(path)):
            return self.call("secret", lambda: service.access(match[1]))
        raise Refused(404, "NOT_FOUND", f"{self.command} {path}")

    def metadata(self, path: str) -> dict[str, Any]:
        """What the metadata server has, whom Google's own login asks a few things before a token."""
        if path == "/computeMetadata/v1/instance/service-accounts/default/token":
            return self.call("token", lambda: self.service.token(self.headers))
        if path not in METADATA:
            raise Refused(404, "NOT_FOUND", path)
        return METADATA[path]

    def call(self, kind: str, work: Any) -> dict[str, Any]:
        service = self.service
        service.calls[kind] += 1
        if kind in service.denied:
            raise Refused(403, "PERMISSION_DENIED", f"Permission denied: {kind}")
        with service.lock:
            at = next((i for i, f in enumerate(service.failures) if f[0] == kind), None)
            failure = service.failures.pop(at) if at is not None else None
        if failure and failure[2] == "CUT":
            raise ConnectionAbortedError
        if failure and failure[2] != "LOST":
            raise Refused(*failure[1:])
        service.come(f"before {kind}")
        told: dict[str, Any] = work()
        service.come(f"after {kind}")
        if failure:  # it took effect, but nobody hears of it
            raise Refused(failure[1], "UNAVAILABLE", failure[3])
        return told
