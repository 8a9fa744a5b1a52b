"""What the suite shares: its options, the commands of rekindle as child processes, a look into the cluster, and
recordings of what the services answered."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from rekindle.errors import RekindleError
from rekindle.platforms.kubeflow.client import connected
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.job import jobs_path, pods_of, state_of
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.records import RunRecord

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs" / "digits.yaml"
# of a launcher that is told to end, and of nodes that see that their run is over
JOB_OUTLIVES_SECONDS = 120
_WORKFLOW = "workflows.argoproj.io/workflow"
_NODE_NAME = "workflows.argoproj.io/node-name"
_OF_MACHINES = {"nodeName": "machine", "hostIP": "192.0.2.1", "podIP": "192.0.2.2"}
_LEFT_OUT = {"managedFields", "hostIPs", "podIPs", "pipeline_spec"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the environment says about the cluster; README.md lists it."""

    host: str
    image: str
    namespace: str
    service_account: str
    artifact_root: str
    pipeline_root: str
    tracking_uri: str
    gateway: str
    token: str
    folder: Path
    hold_seconds: int
    """How long the steps that are disturbed take when they are not."""

    @classmethod
    def from_environment(cls) -> Options:
        def read(name: str, default: str = "") -> str:
            return os.environ.get(f"KUBEFLOW_{name}") or default

        return cls(
            host=read("HOST"),
            image=read("IMAGE"),
            namespace=read("NAMESPACE", "kubeflow"),
            service_account=read("SERVICE_ACCOUNT", "pipeline-runner"),
            artifact_root=read("ARTIFACT_ROOT", "minio://mlpipeline/rekindle-suite"),
            pipeline_root=read("PIPELINE_ROOT"),
            tracking_uri=read("TRACKING_URI"),
            gateway=read("GATEWAY"),
            token="env:KFP_TOKEN" if os.environ.get("KFP_TOKEN") else "",
            folder=Path(read("RECORDINGS", str(ROOT / "build" / "kubeflow"))),
            hold_seconds=int(read("HOLD_SECONDS", "90")),
        )

    @property
    def place(self) -> dict[str, Any]:
        """The section `platforms.kubeflow`, without what is empty."""
        names = [field.name for field in dataclasses.fields(self)]
        values = {n: getattr(self, n) for n in names if n in KubeflowSpec.model_fields}
        return {name: value for name, value in values.items() if value}


class Suite:
    """One test's view: commands with a home of their own, and the cluster as kubectl sees it."""

    def __init__(self, options: Options, home: Path, name: str) -> None:
        self.options, self.home, self.name = options, home, name
        self.place = KubeflowSpec(**options.place)
        self.api = ApiServer.configured(patience_seconds=30.0)

    # commands

    def ended(self, *words: object) -> subprocess.CompletedProcess[str]:
        """A command that has ended, however."""
        command = [str(Path(sys.executable).with_name("rekindle")), *map(str, words)]
        return subprocess.run(
            [*command, "--home", str(self.home)], capture_output=True, text=True, cwd=self.home
        )

    def rekindle(self, *words: object) -> str:
        """What a command prints on stdout; it has to succeed."""
        done = self.ended(*words)
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def refusal(self, config: Path) -> str:
        """Why the config is refused for Kubeflow; "" where it compiles."""
        done = self.ended("compile", config, "--platform", "kubeflow")
        assert done.returncode in (0, 2), done.stderr
        return (done.stderr.strip().splitlines() or [""])[0] if done.returncode else ""

    def settings(self, values: Mapping[str, Any]) -> list[str]:
        """Options `--set` of a config: where the cluster is, and `values`."""
        place = {f"platforms.kubeflow.{name}": value for name, value in self.options.place.items()}
        return [w for name, value in (place | values).items() for w in ("--set", f"{name}={value}")]

    def config(self, text: str, arguments: Mapping[str, Any], **place: Any) -> Path:
        """A config of a compiled pipeline, whose steps run in the suite's image."""
        pipeline = self.home / "pipeline.yaml"
        image = self.options.image or "python:3.11"
        pipeline.write_text(re.sub(r"(?m)^( +image: ).*$", rf"\g<1>{image}", text))
        document = {
            "name": "rekindle-suite",
            "pipeline": str(pipeline),
            "arguments": dict(arguments),
            "platforms": {"kubeflow": {**self.options.place, **place}},
        }
        config = self.home / "config.yaml"
        config.write_text(yaml.safe_dump(document))
        return config

    def submit(self, config: Path, *words: str) -> str:
        """Submit without waiting; the name of the run."""
        command = ("submit", config, "--platform", "kubeflow", "--yes", "--json", *words)
        return str(json.loads(self.rekindle(*command))["run_id"])

    def status(self, run: str) -> str:
        return str(json.loads(self.rekindle("status", run, "--json"))["status"])

    def step(self, run: str, name: str) -> Any:
        """A step as `status` has it."""
        steps = json.loads(self.rekindle("status", run, "--json"))["steps"]
        (step,) = [step for step in steps if step["name"] == name]
        return step

    def log(self, run: str, step: str) -> str:
        """What the step has printed; "" where it has not begun."""
        return self.ended("logs", run, "--step", step, "--raw").stdout

    def wait_for_end(self, run: str, seconds: float = 1800) -> str:
        """The status that the run ended with."""
        until(lambda: self.status(run) != "running", f"the end of {run}", seconds)
        return self.status(run)

    # the cluster

    def kfp(self, path: str) -> bytes:
        """What KFP's API answers at a path."""
        with connected(self.place) as server:
            return server.get(path)

    def id_of(self, run: str) -> str:
        """What KFP calls the run."""
        submission = RunRecord.read(self.home / "runs" / run / "run.json").submission
        assert submission is not None
        return submission.id

    def workflow(self, run: str) -> Any:
        answer = json.loads(self.kfp(f"/apis/v1beta1/runs/{self.id_of(run)}"))
        return json.loads(answer["pipeline_runtime"].get("workflow_manifest") or "{}")

    def listed(self, path: str, **query: str) -> list[Any]:
        return list((self.api.get(path, **query) or {}).get("items", ()))

    def jobs(self, run: str) -> list[Any]:
        """TrainJobs of the run, whether they have ended or not."""
        name = self.workflow(run).get("metadata", {}).get("name")
        jobs = self.listed(jobs_path(self.options.namespace))
        return [job for job in jobs if name in [o["name"] for o in _owners(job)]]

    def active_jobs(self, run: str) -> list[Any]:
        return [job for job in self.jobs(run) if state_of(job) == "active"]

    def nodes(self, job: Any) -> list[Any]:
        """The pods of a TrainJob that run, by rank."""
        pods = pods_of(self.api, self.options.namespace, job["metadata"]["name"])
        return sorted(
            (pod for pod in pods if pod["status"].get("phase") == "Running"),
            key=lambda pod: pod["metadata"]["name"],
        )

    def training(self, run: str, nodes: int = 2, seconds: float = 900) -> Any:
        """The TrainJob of the run, once all its nodes run."""

        def all_run() -> bool:
            return any(len(self.nodes(job)) == nodes for job in self.active_jobs(run))

        until(all_run, f"{nodes} nodes of {run}", seconds)
        (job,) = self.active_jobs(run)
        return job

    def launchers(self, run: str) -> list[Any]:
        """Pods of Argo's for the step `hold` of the run that have begun and not ended."""
        workflow = self.workflow(run)["metadata"]["name"]
        path = f"/api/v1/namespaces/{self.options.namespace}/pods"
        pods = self.listed(path, labelSelector=f"{_WORKFLOW}={workflow}")
        names = [pod["metadata"].get("annotations", {}).get(_NODE_NAME, "") for pod in pods]
        return [
            pod
            for pod, name in zip(pods, names, strict=True)
            if ".hold" in name
            and ".executor" in name
            and pod["status"].get("phase") == "Running"
            and not pod["metadata"].get("deletionTimestamp")
        ]

    def kill(self, pod: Any) -> None:
        """Delete a pod without a grace period, as `kubectl delete --force` does."""
        path = f"/api/v1/namespaces/{self.options.namespace}/pods/{pod['metadata']['name']}"
        self.api.answer("DELETE", path, {"gracePeriodSeconds": "0"})

    def fail(self, pod: Any) -> None:
        """Have the kubelet kill a pod, which is Failed then: by a deadline that is over.

        A container that the kernel kills for its memory leaves its pod so, too."""
        path = f"/api/v1/namespaces/{self.options.namespace}/pods/{pod['metadata']['name']}"
        newest = self.api.get(path)
        assert newest is not None, f"no pod {path}"
        newest["spec"]["activeDeadlineSeconds"] = 1
        newest["metadata"].pop("resourceVersion", None)  # whatever else has changed meanwhile
        self.api.answer("PUT", path, {}, newest)

    def no_job_is_left(self, run: str) -> None:
        """Fail unless all TrainJobs of an ended run end in two minutes, and their nodes."""

        def all_ended() -> bool:
            return not self.active_jobs(run) and not any(map(self.nodes, self.jobs(run)))

        until(all_ended, f"the end of all TrainJobs of {run}", JOB_OUTLIVES_SECONDS)

    # recordings

    def runs(self) -> list[str]:
        return sorted(path.parent.name for path in self.home.glob("runs/*/run.json"))

    def record(self, run: str, moment: str = "") -> None:
        """Leave what the services say of a run, in the form of tests/platforms/kubeflow/recorded."""
        name = "-".join(filter(None, [self.name, moment]))
        id = self.id_of(run)
        workflow = self.workflow(run)
        kept = {key: workflow.get("metadata", {}).get(key) for key in ("name", "annotations")}
        nodes = workflow.get("status", {}).get("nodes", {})
        status = {"nodes": nodes, "phase": workflow.get("status", {}).get("phase")}
        facts = {"situation": name.replace("-", " "), "versions": self.versions()}
        found = {
            "run": json.loads(self.kfp(f"/apis/v2beta1/runs/{id}")),
            "workflow": {"metadata": kept, "status": status},
            "logs": list(self._logs(id, workflow)),
        }
        self._write(name, {**facts, **found})
        for job in self.jobs(run):
            self._write(
                f"{name}-{job['metadata']['name']}",
                {**facts, "recorded": self._objects(job), "events": self._events(job)},
            )

    def versions(self) -> dict[str, str]:
        health = json.loads(self.kfp("/apis/v2beta1/healthz"))
        kubernetes = self.api.get("/version") or {}
        return {
            "kfp": str(health.get("tag_name", "")),
            "kubernetes": str(kubernetes.get("gitVersion", "")).removeprefix("v"),
            "recorded": time.strftime("%Y-%m-%d", time.gmtime()),
        }

    def pod_logs(self, run: str) -> list[str]:
        """What all pods of the run's steps printed, also those of one step in a loop."""
        return [log["body"] for log in self._logs(self.id_of(run), self.workflow(run))]

    def _logs(self, id: str, workflow: Any) -> Iterator[dict[str, Any]]:
        for node in workflow.get("status", {}).get("nodes", {}).values():
            if node["type"] != "Pod" or ".executor" not in node["name"]:
                continue
            # Argo's name of the pod: the Workflow's, the template's, and the node's number
            number = node["id"].rpartition("-")[2]
            pod = f"{workflow['metadata']['name']}-{node['templateName']}-{number}"
            path = f"/apis/v1alpha1/runs/{id}/nodes/{pod}/log"
            body = self.kfp(path).decode("utf-8", errors="replace")
            yield {"GET": path, "status": 200, "body": body}

    def _objects(self, job: Any) -> dict[str, Any]:
        name, namespace = job["metadata"]["name"], self.options.namespace
        jobset = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets/{name}"
        batch = f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}-node-0"
        return {
            "trainjob": job,
            "jobset": self._if_allowed(jobset),
            "job": self._if_allowed(batch),
            "pods": pods_of(self.api, namespace, name),
        }

    def _if_allowed(self, path: str) -> Any:
        try:
            return self.api.get(path)
        except RekindleError:  # a user may see less than an administrator
            return None

    def _events(self, job: Any) -> list[Any]:
        events = self.listed(f"/api/v1/namespaces/{self.options.namespace}/events")
        name = job["metadata"]["name"]
        return [e for e in events if e["involvedObject"].get("name", "").startswith(name)]

    def _write(self, name: str, recording: Any) -> None:
        self.options.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(without_machines(recording), indent=1, sort_keys=True)
        for host in self._hosts():
            text = text.replace(host, "host.example.com")
        (self.options.folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")

    def _hosts(self) -> set[str]:
        """Names that say whose cluster this is."""
        hosts = {urlsplit(self.options.host).netloc, urlsplit(self.api.server).netloc}
        registry, slash, _ = self.options.image.partition("/")
        if slash and re.search(r"[.:]", registry):
            hosts.add(registry)
        return hosts - {""}


def without_machines(value: Any) -> Any:
    """An answer without names and addresses of machines, and without what is long and never read."""
    if isinstance(value, list):
        return [without_machines(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _OF_MACHINES.get(key, without_machines(item))
        for key, item in value.items()
        if key not in _LEFT_OUT
    }


def until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait for a condition that is asked of the cluster."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(1.0)


def _owners(job: Any) -> list[Any]:
    return list(job["metadata"].get("ownerReferences", ()))
