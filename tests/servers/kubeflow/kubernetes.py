"""A Kubernetes API server with Kubeflow Trainer v2.3 behind it, as far as rekindle speaks to them:
real HTTP, and real processes as the nodes of a TrainJob.

It takes what the real one would take and nothing else: objects are checked strictly
(schema.py), a request by a service account needs a rule of rekindle's own rbac.yaml, a
TrainJob needs its runtime, names are taken once, and what a Workflow owns goes with it. Nodes get
PET_* as Trainer's torch plugin sets them, restart by the failurePolicy and podFailurePolicy of the
runtime, and their pods keep a log until they are replaced. Requests can be held, refused or lost
(`Trouble`)."""

from __future__ import annotations

import base64
import contextlib
import copy
import dataclasses
import datetime
import functools
import json
import re
import shutil
import socket
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.servers.kubeflow import launchers
from tests.servers.kubeflow.deployments import Deployments
from tests.servers.kubeflow.pods import problems as pod_problems
from tests.servers.kubeflow.pods import template_of
from tests.servers.kubeflow.schema import problems
from tests.servers.kubeflow.trainer import INDEX, JOBSET, ROOT, Job, labels, now

MANIFESTS = ROOT / "rekindle" / "platforms" / "kubeflow" / "manifests"
ACCOUNT = "system:serviceaccount:kubeflow:pipeline-runner"
NODES = "system:serviceaccount:kubeflow:rekindle-node"
ADMIN = "system:admin"
DEPLOYER = "deployer@example.com"  # to whom the Role rekindle-deployer is bound
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v\w+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+)(?P<rest>/.*)?)?"
)


@dataclasses.dataclass
class Trouble:
    """What becomes of requests whose method and path match `what`, `times` times: `status` answers
    with that, `lose` carries it out and drops the connection before the answer, `hold` waits until
    `go` is set. `reached` says that one came."""

    what: str
    times: int = 1
    status: int = 0
    lose: bool = False
    hold: str = ""  # "before" or "after" it is carried out
    reached: threading.Event = dataclasses.field(default_factory=threading.Event)
    go: threading.Event = dataclasses.field(default_factory=threading.Event)


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeCluster:
    """The server and its cluster; a context manager, at the end of which nothing is left running."""

    def __init__(self, folder: Path, rbac: str | None = None) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.jobs: dict[str, Job] = {}
        self.created: list[str] = []
        self.workflows: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, Path] = {}
        # secrets by (name, key), config maps by ("configmap", name, key)
        self.secrets: dict[tuple[str, ...], str] = {
            ("mlpipeline-minio-artifact", key): "kfp" for key in ("accesskey", "secretkey")
        }
        self.owned: dict[str, str] = {}  # secrets by the uid of the job that they go with
        self.troubles: list[Trouble] = []
        self.requests: list[str] = []
        self.secrets_read: list[str] = []  # whose values went over the wire
        self.environment: dict[str, str] = {}
        self.configmaps: dict[str, dict[str, Any]] = {}
        self.events: dict[str, dict[str, Any]] = {}
        self.quotas: dict[str, dict[str, Any]] = {}  # which refuse what has a GPU
        self.quota: int | None = None  # pods of a job that the namespace has room for
        self.controllers_are_down = False  # of Trainer and JobSet: nothing comes of a job
        self.policies: list[str] = []  # in whose words TrainJobs are refused
        # of the namespace `kubeflow`, what a check can look at and no run needs
        self.objects: dict[str, dict[str, Any]] = {
            "serviceaccounts": {"pipeline-runner": {}, "rekindle-node": {}},
            "namespaces": {"kubeflow": {"metadata": {"labels": {}}}},
            "services": {"seaweedfs": {}, "minio-service": {}},
            "limitranges": {},
            "localqueues": {},
        }
        self.log_offset_hours = 0  # of the clocks of machines, by which kubelets stamp lines
        # lines after which a log that is followed breaks off, twice as many each time
        self.longest_log: int | None = None
        self.tokens = {
            "token-1": ACCOUNT,
            "token-node": NODES,
            "admin": ADMIN,
            "deployer": DEPLOYER,
        }
        text = (MANIFESTS / "rbac.yaml").read_text() if rbac is None else rbac
        self.rules: dict[str, list[Any]] = {}
        self.grant(text)
        self.served = Deployments(self)
        runtime = yaml.safe_load((MANIFESTS / "runtime.yaml").read_text())
        self.runtimes = {runtime["metadata"]["name"]: runtime}
        self.server = Server(self)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> FakeCluster:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.account = self.folder / "account"
        self.account.mkdir(parents=True)
        (self.account / "token").write_text("token-1")
        (self.account / "namespace").write_text("kubeflow")
        (self.account / "ca.crt").write_text("")
        # what is mounted in the pods of an account; the launcher's is `account`
        self.accounts = {"pipeline-runner": self.account, "rekindle-node": self.folder / "nodes"}
        shutil.copytree(self.account, self.accounts["rekindle-node"])
        (self.accounts["rekindle-node"] / "token").write_text("token-node")
        return self

    def __exit__(self, *_: object) -> None:
        for trouble in self.troubles:
            trouble.go.set()
        for job in list(self.jobs.values()):
            job.end()
        self.server.shutdown()
        self.server.server_close()

    def grant(self, text: str) -> None:
        """What `kubectl apply` of the manifests of rights does."""
        documents = [doc for doc in yaml.safe_load_all(text) if doc]
        roles = {d["metadata"]["name"]: d["rules"] for d in documents if d["kind"] == "Role"}
        for doc in documents:
            for subject in doc.get("subjects", ()):
                who = f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
                self.rules.setdefault(who, []).extend(roles[doc["roleRef"]["name"]])
        self.rules[DEPLOYER] = roles.get("rekindle-deployer", [])

    # What KFP and Argo do

    def start_run(self, name: str) -> None:
        """A Workflow that runs."""
        metadata = {"name": name, "namespace": "kubeflow", "uid": str(uuid.uuid4())}
        self.workflows[name] = {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": metadata,
            "spec": {},
            "status": {"phase": "Running", "startedAt": now()},
        }

    def start_pod(self, workflow: str, node: str) -> str:
        """A pod of a step of the run, with what Argo and KFP write on it; its name."""
        owner = self.workflows[workflow]
        name = f"{workflow}-{len(self.pods)}"
        self.pods[name] = {
            "metadata": {
                "name": name,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now(),
                "annotations": {"workflows.argoproj.io/node-name": f"{workflow}.{node}"},
                "labels": {
                    "pipeline/runid": f"run-{workflow}",
                    "workflows.argoproj.io/workflow": workflow,
                },
                "ownerReferences": [
                    {
                        "apiVersion": owner["apiVersion"],
                        "kind": "Workflow",
                        "name": workflow,
                        "uid": owner["metadata"]["uid"],
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": {"serviceAccountName": "pipeline-runner"},
            "status": {"phase": "Running"},
        }
        return name

    def terminate_run(self, workflow: str) -> None:
        """As KFP's API server does it."""
        self.workflows[workflow]["spec"]["activeDeadlineSeconds"] = 0

    def end_run(self, workflow: str, phase: str) -> None:
        """As Argo does it once nothing runs any more."""
        if workflow in self.workflows:
            self.workflows[workflow]["status"]["phase"] = phase

    def retry_run(self, workflow: str) -> None:
        """As KFP's API server does it: the deadline by which it terminated the run goes."""
        self.workflows[workflow]["spec"].pop("activeDeadlineSeconds", None)
        self.workflows[workflow]["status"]["phase"] = "Running"

    def delete_run(self, workflow: str) -> None:
        """And everything that it owns."""
        uid = self.workflows.pop(workflow)["metadata"]["uid"]
        for name, job in list(self.jobs.items()):
            if any(o["uid"] == uid for o in job.object["metadata"].get("ownerReferences", [])):
                self.remove_job(name)

    # What it does itself

    def active(self) -> list[str]:
        """Jobs that have not ended."""
        return [name for name, job in self.jobs.items() if not job.condition]

    def warn(self, kind: str, name: str, reason: str, message: str) -> None:
        """Record an event, once."""
        key = f"{name}.{reason}.{message}"
        with self.lock:
            self.events[key] = {
                "metadata": {"name": f"{name}.{len(self.events)}"},
                "involvedObject": {"kind": kind, "name": name},
                "type": "Warning",
                "reason": reason,
                "message": message,
            }

    def lose_machine(self, pod: str) -> None:
        """Its machine is gone: the pod is told to end, and says so for ever."""
        with self.lock:
            self.pods[pod]["metadata"]["deletionTimestamp"] = now()
        job = self.jobs[self.pods[pod]["metadata"]["labels"][JOBSET]]
        job.lost.add(pod)
        job.processes[int(self.pods[pod]["metadata"]["labels"][INDEX])].kill()

    def forget_machines(self) -> None:
        """What `kubectl delete node` does: pods of machines that are gone are gone as well."""
        for job in self.jobs.values():
            job.lost.clear()

    def remove_job(self, name: str) -> None:
        """As the garbage collector does it, without the lock while its nodes end."""
        job = self.jobs[name]
        job.end()
        with self.lock:
            self.jobs.pop(name, None)
            secret = self.owned.pop(job.object["metadata"]["uid"], "")
            self.secrets = {key: v for key, v in self.secrets.items() if key[0] != secret}
            for pod in [
                n for n, p in self.pods.items() if p["metadata"]["labels"].get(JOBSET) == name
            ]:
                del self.pods[pod]

    def answer(self, method: str, target: str, body: Any, user: str) -> tuple[int, Any]:
        parts = urlsplit(target)
        match = _PATH.fullmatch(parts.path)
        if match is None:
            raise Refused(404, "the server could not find the requested resource")
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        place = {key: value or "" for key, value in match.groupdict().items()}
        self.authorize(method, place, user)
        with self.lock:
            is_of_kfp = (
                place["resource"] == "services" and place["name"] in self.objects["services"]
            )
            if self.served.serves(place) and not is_of_kfp:
                return self.served.carry_out(method, place, query, body)
            return self.carry_out(method, place, query, body, user)

    def authorize(self, method: str, place: dict[str, str], user: str) -> None:
        verbs = {"POST": "create", "PUT": "update", "DELETE": "delete"}
        verbs["GET"] = "get" if place["name"] else "list"
        resource = "/".join(filter(None, (place["resource"], place["sub"])))
        if not self.allows(user, verbs[method], place["group"], resource, place["namespace"]):
            raise Refused(
                403,
                f'{resource} is forbidden: User "{user}" cannot {verbs[method]} resource '
                f'"{resource}" in API group "{place["group"]}"',
            )

    def allows(self, user: str, verb: str, group: str, resource: str, namespace: str) -> bool:
        # what one may do oneself all who log in may ask (the ClusterRole system:basic-user)
        if user == ADMIN or resource == "selfsubjectaccessreviews":
            return True
        return namespace == "kubeflow" and any(
            verb in rule["verbs"] and group in rule["apiGroups"] and resource in rule["resources"]
            for rule in self.rules.get(user, ())
        )

    def carry_out(
        self,
        method: str,
        place: dict[str, str],
        query: dict[str, str],
        body: Any,
        user: str,
    ) -> tuple[int, Any]:
        name, resource = place["name"], place["resource"]
        known: dict[str, Any] = {
            **self.objects,
            "trainjobs": {n: job.object for n, job in self.jobs.items()},
            "pods": self.pods,
            "workflows": self.workflows,
            "clustertrainingruntimes": self.runtimes,
            # to read one by its name is no right of rekindle's own Roles
            "secrets": self.secrets_as_objects(),
            "configmaps": self.configmaps,
            "events": self.events,
            "resourcequotas": self.quotas,
            # what stands between a TrainJob and its pods is not played
            "jobsets": {},
            "jobs": {},
            "subjectaccessreviews": {},
            "selfsubjectaccessreviews": {},
        }[resource]
        if method == "POST":
            creations = {
                "trainjobs": self.create_job,
                "secrets": self.create_secret,
                "resourcequotas": self.create_quota,
                "subjectaccessreviews": self.review,
                "selfsubjectaccessreviews": functools.partial(self.review, user=user),
            }
            return 201, creations[resource](body)
        if method == "GET" and not name:
            wanted = dict(w.split("=") for w in query.get("labelSelector", "").split(",") if w)
            items = [o for o in known.values() if wanted.items() <= labels(o).items()]
            if query.get("fieldSelector") == "type=Warning":
                items = [event for event in items if event["type"] == "Warning"]
            return 200, {"kind": "List", "items": copy.deepcopy(items)}
        if name not in known:
            raise Refused(404, f'{resource} "{name}" not found')
        if method == "DELETE":
            uid = (body or {}).get("preconditions", {}).get("uid")
            if uid and uid != known[name]["metadata"]["uid"]:
                raise Refused(409, "the UID in the precondition does not match")
            return 200, self.delete(resource, name)
        if method == "PUT" and resource == "pods":
            launchers.limit(self.pods[name], body)
        return 200, copy.deepcopy(known[name])

    def delete(self, resource: str, name: str) -> Any:
        """Delete a TrainJob, a quota, or the pod of a node."""
        if resource == "resourcequotas":
            return self.quotas.pop(name)
        if resource == "pods":
            return self.kill_node(name)
        self.jobs[name].object["metadata"]["deletionTimestamp"] = now()
        threading.Thread(target=self.remove_job, args=[name], daemon=True).start()
        return {"kind": "Status", "status": "Success"}

    def kill_node(self, pod: str) -> Any:
        """What a deletion without a grace period does to the pod of a node."""
        made = self.pods[pod]
        if JOBSET not in labels(made):
            raise Refused(405, "only nodes of jobs can be deleted here")
        self.jobs[labels(made)[JOBSET]].processes[int(labels(made)[INDEX])].kill()
        return made

    def create_quota(self, body: Any) -> Any:
        created = copy.deepcopy(body)
        created["metadata"]["uid"] = str(uuid.uuid4())
        self.quotas[body["metadata"]["name"]] = created
        return created

    def review(self, body: Any, user: str = "") -> Any:
        """Whether an account, or who asks, may do something, as the API server says it."""
        asked = body["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        who = user or body["spec"]["user"]
        allowed = self.allows(who, asked["verb"], asked["group"], resource, asked["namespace"])
        return {**body, "status": {"allowed": allowed}}

    def create_job(self, body: Any) -> Any:
        if wrong := problems("TrainJob", body):
            raise Refused(422, "; ".join(wrong))
        for words in self.policies:
            raise Refused(403, words)
        name = body["metadata"]["name"]
        if name in self.jobs:
            raise Refused(409, f'trainjobs.trainer.kubeflow.org "{name}" already exists')
        runtime = self.runtimes.get(body["spec"]["runtimeRef"]["name"])
        if runtime is None:
            # a webhook's refusal is a 403 (controller-runtime, admission.Denied)
            why = "spec.RuntimeRef: Invalid value: must be an existing runtime"
            webhook = 'admission webhook "validator.trainjob.trainer.kubeflow.org"'
            raise Refused(403, f"{webhook} denied the request: {why}")
        if wrong := list(pod_problems(template_of(runtime, body))):
            raise Refused(422, "; ".join(wrong))
        made = copy.deepcopy(body)
        made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        made["status"] = {}
        owners = {o["uid"] for o in made["metadata"].get("ownerReferences", [])}
        if not owners & {w["metadata"]["uid"] for w in self.workflows.values()}:
            raise Refused(422, "the owner is gone, it would be collected at once")
        self.created.append(name)
        self.jobs[name] = Job(self, made, runtime)
        return copy.deepcopy(made)

    def secrets_as_objects(self) -> dict[str, Any]:
        """Secrets by name, with their values."""
        objects: dict[str, Any] = {}
        for name, key in (pair for pair in self.secrets if len(pair) == 2):
            secret = objects.setdefault(name, {"metadata": {"name": name}, "data": {}})
            value = self.secrets[name, key].encode()
            secret["data"][key] = base64.b64encode(value).decode()
        return objects

    def create_secret(self, body: Any) -> Any:
        name = body["metadata"]["name"]
        if name in {key[0] for key in self.secrets}:
            raise Refused(409, f'secrets "{name}" already exists')
        (owner,) = body["metadata"]["ownerReferences"]
        job = self.jobs.get(owner["name"])
        if (
            job is None
            or {k: job.object[k] for k in ("apiVersion", "kind")}
            | {k: job.object["metadata"][k] for k in ("name", "uid")}
            != owner
        ):
            raise Refused(422, "the owner is gone, it would be collected at once")
        for key, value in body["stringData"].items():
            self.secrets[name, key] = value
        self.owned[owner["uid"]] = name
        return body


class Handler(BaseHTTPRequestHandler):
    """A request: in trouble, refused, or carried out."""

    disable_nagle_algorithm = True
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_one("GET")

    def do_POST(self) -> None:
        self.handle_one("POST")

    def do_PUT(self) -> None:
        self.handle_one("PUT")

    def do_DELETE(self) -> None:
        self.handle_one("DELETE")

    def handle_one(self, method: str) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        asked = f"{method} {self.path}"
        self.server.cluster.requests.append(asked)
        trouble = self.trouble(asked)
        trouble.reached.set()
        if trouble.hold == "before":
            trouble.go.wait(60)
        status, answer = trouble.status, {"message": "trouble"}
        if not status:
            status, answer = self.carried_out(method, body)
        if trouble.hold == "after":
            trouble.go.wait(60)
        if trouble.lose:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif status:
            self.reply(status, answer)

    def carried_out(self, method: str, body: Any) -> tuple[int, Any]:
        """Status and answer; status 0 if it was answered already."""
        cluster = self.server.cluster
        user = cluster.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        try:
            if user is None:
                raise Refused(401, "Unauthorized")
            if urlsplit(self.path).path.endswith("/log"):
                self.send_log(user)
                return 0, None
            status, answer = cluster.answer(method, self.path, body, user)
            if "as=PartialObjectMetadata" in self.headers.get("Accept", ""):
                metadata = answer.get("metadata", {})
                return status, {"kind": "PartialObjectMetadata", "metadata": metadata}
            if method == "GET" and "/secrets/" in self.path:
                cluster.secrets_read.append(self.path)
            return status, answer
        except Refused as refused:
            return refused.status, {"kind": "Status", "message": str(refused)}

    def trouble(self, asked: str) -> Trouble:
        cluster = self.server.cluster
        with cluster.lock:
            for one in cluster.troubles:
                if one.times > 0 and re.search(one.what, asked):
                    one.times -= 1
                    return one
        return Trouble("")

    def reply(self, status: int, answer: Any) -> None:
        content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def send_log(self, user: str) -> None:
        cluster, parts = self.server.cluster, urlsplit(self.path)
        match = _PATH.fullmatch(parts.path)
        assert match is not None
        place = {key: value or "" for key, value in match.groupdict().items()}
        cluster.authorize("GET", place, user)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if query["container"] != "node" or place["name"] not in cluster.pods:
            raise Refused(404, "no such container")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            for line in lines_of(cluster, place["name"], query):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    """Threads die with the test."""

    daemon_threads = True

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        super().__init__(("127.0.0.1", 0), Handler)


def lines_of(cluster: FakeCluster, pod: str, query: dict[str, str]) -> Any:
    """Lines of a pod's log, as they come if `follow` is asked."""
    follow = query.get("follow") == "true"

    def stamped() -> Any:
        at = 0
        while True:
            phase = cluster.pods.get(pod, {}).get("status", {}).get("phase", "gone")
            path = cluster.logs[pod]
            content = path.read_bytes()[at:] if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            yield from whole.splitlines(keepends=True)
            at += len(whole)
            if not follow or (phase != "Running" and not whole):
                return
            time.sleep(0.02)

    lines = (line for line in stamped() if line.decode() >= query.get("sinceTime", "").rstrip("Z"))
    if "tailLines" in query:
        whole = list(lines)
        lines = iter(whole[len(whole) - min(len(whole), int(query["tailLines"])) :])
    if query.get("timestamps") != "true":
        lines = (line.partition(b" ")[2] for line in lines)
    elif cluster.log_offset_hours:
        lines = (_by_clock(line, cluster.log_offset_hours) for line in lines)
    if follow and cluster.longest_log is not None:
        cluster.longest_log *= 2
        lines = _breaking_off(lines, cluster.longest_log)
    return lines


def _by_clock(line: bytes, hours: int) -> bytes:
    """A line with its time as a machine of another time zone writes it (cri-client/pkg/logs)."""
    time_of_line, space, text = line.partition(b" ")
    zone = datetime.timezone(datetime.timedelta(hours=hours))
    moment = datetime.datetime.fromisoformat(time_of_line.decode()).astimezone(zone)
    return moment.isoformat().encode() + space + text


def _breaking_off(lines: Any, most: int) -> Any:
    for i, line in enumerate(lines):
        if i == most:
            raise BrokenPipeError
        yield line
