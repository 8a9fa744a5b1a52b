"""What runs a pipeline behind the API of Kubeflow Pipelines: every task a process, as a run on this
machine has them; launchers of distributed steps find a cluster that is played (kubernetes.py).

`Workflow` starts it as a child, so that it can be stopped, and shows it as the API server shows
Argo's nodes. Artifacts are copied to the pipeline's root when their step is done.

    python -m tests.servers.kubeflow.argo FOLDER       what the child does with FOLDER/spec.yaml"""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import yaml

from rekindle.errors import RekindleError
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow.compile import LAUNCHER
from rekindle.platforms.local import execute
from rekindle.platforms.local.step import StepSettings
from rekindle.records import RunRecord, StepRecord
from tests.servers.kubeflow.kubernetes import FakeCluster

ROOT = Path(__file__).parents[3]
_ZERO = "0001-01-01T00:00:00Z"  # Go's, of what has not ended
_PHASES = {
    "pending": "Pending",
    "running": "Running",
    "succeeded": "Succeeded",
    "failed": "Failed",
    "skipped": "Skipped",
    "cancelled": "Failed",
}
# of a run's state; the API's conversion knows no Omitted, and leaves out what it does not know
_STATES = {
    "Pending": "PENDING",
    "Running": "RUNNING",
    "Succeeded": "SUCCEEDED",
    "Failed": "FAILED",
    "Skipped": "SKIPPED",
}
_OF_STATE = {"RUNNING": "Running", "CANCELING": "Running", "SUCCEEDED": "Succeeded"}


class Workflow:
    """One run: its processes, and its nodes."""

    def __init__(
        self,
        folder: Path,
        id: str,
        spec: Any,
        root: str,
        cluster: FakeCluster | None,
        environment: Mapping[str, str],
        wraps: bool = True,
    ) -> None:
        """`wraps`: each node is in one that tries again, as the defaults of KFP 2.17 have it. They
        try what vanished, and nothing that failed (OnError): here every end is a failure."""
        spec["defaultPipelineRoot"] = root or f"{folder}/store"
        self.folder, self.id, self.cluster, self.environment = folder, id, cluster, environment
        self.wraps = wraps
        self.name = f"{spec['pipelineInfo']['name']}-{id[:5]}"
        self.launchers: dict[str, dict[str, Any]] = {}  # by step
        folder.mkdir(parents=True)
        if cluster:
            cluster.start_run(self.name)
            for name, executor in spec["deploymentSpec"]["executors"].items():
                container = executor.get("container", {})
                if container.get("command") == list(LAUNCHER):
                    flags = [
                        "--server",
                        cluster.url,
                        "--account",
                        str(cluster.account),
                        "--poll",
                        "0.1",
                    ]
                    container["args"] = [*flags, *container["args"]]
                    self.launchers[name.removeprefix("exec-")] = container
        if wraps:
            for dag in (spec["root"], *spec["components"].values()):
                for task in dag.get("dag", {}).get("tasks", {}).values():
                    task.pop("retryPolicy", None)
        self.spec = spec
        self.history: list[str] = []
        self.has_expired = False
        self.go()

    def go(self) -> None:
        """Run what has not succeeded."""
        self.state, self.ended, self.terminating = "RUNNING", "", False
        self.history += ["PENDING", "RUNNING"]
        if self.has_expired:
            self.has_expired = False
            if self.cluster:  # another one of that name, with a uid of its own
                self.cluster.start_run(self.name)
        if self.cluster:
            self.cluster.retry_run(self.name)
        for step, container in self.launchers.items() if self.cluster else ():
            pod = self.cluster.start_pod(self.name, f"root.{step}.executor")
            container["env"] = [{"name": "KFP_POD_NAME", "value": pod}]
        (self.folder / "spec.yaml").write_text(yaml.safe_dump(self.spec))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.kubeflow.argo", str(self.folder), self.id],
            env={**os.environ, **self.environment, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "log").open("a"),
        )
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        code = self.process.wait()
        self.ended = datetime.datetime.now(datetime.UTC).isoformat()
        # of what was terminated, too, Argo says that it failed, and KFP stores that
        self.state = "FAILED" if code or self.terminating else "SUCCEEDED"
        self.history.append(self.state)
        if self.cluster:
            self.cluster.end_run(self.name, _OF_STATE.get(self.state, "Failed"))

    def terminate(self) -> None:
        """As the API server does it: the Workflow gets a deadline, and every pod a SIGTERM."""
        if self.process.poll() is None:
            self.terminating, self.state = True, "CANCELING"
            self.history.append(self.state)
            if self.cluster:
                self.cluster.terminate_run(self.name)
            self.process.send_signal(signal.SIGINT)

    def record(self) -> RunRecord | None:
        try:
            return RunRecord.read(self.folder / "home" / "runs" / "run" / "run.json")
        except FileNotFoundError:
            return None

    def manifest(self) -> dict[str, Any]:
        """The Workflow, as Argo keeps it and the API server stores it."""
        record = self.record()
        status = {"nodes": self.nodes(record.steps if record else ())}
        return {"metadata": {"name": self.name}, "status": status}

    def details(self) -> list[dict[str, Any]]:
        """The nodes, as `run_details.task_details` has them: without ids, and without pods."""
        return [
            {
                "run_id": self.id,
                "task_id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.id}{node['name']}")),
                "display_name": node["displayName"],
                "create_time": node["startedAt"],
                "start_time": node["startedAt"],
                "end_time": node["finishedAt"],
                "child_tasks": [{"pod_name": child} for child in node["children"]],
                **({"state": _STATES[node["phase"]]} if node["phase"] in _STATES else {}),
            }
            for node in self.manifest()["status"]["nodes"].values()
        ]

    def nodes(self, steps: tuple[StepRecord, ...]) -> dict[str, dict[str, Any]]:
        """The nodes by id, of what has begun."""
        nodes: dict[str, dict[str, Any]] = {}
        phase = _OF_STATE.get(self.state, "Failed")
        inside = self.add(nodes, self.name, "DAG", "entrypoint", phase, None)
        self.add(nodes, f"{inside}.root", "DAG", "root", phase, None)
        for step in steps:
            if step.status == "pending":
                continue
            for inside in self.around(step):
                self.add(nodes, inside, "DAG", "comp", phase, None)
            self.add_step(nodes, self.whole_name(step), step)
        return nodes

    def around(self, step: StepRecord) -> list[str]:
        """The names of the nested pipelines and turns that a step is in."""
        tried = "(0)" if self.wraps else ""
        name = f"{self.name}{tried}.root{tried}"
        names = []
        for part in step.name.split("/")[:-1]:
            turn = f"iteration-iterations({part}:{part})"
            for each in (turn, "iteration-item") if part.isdigit() else (part,):
                names.append(f"{name}.{each}")
                name = f"{name}.{each}{tried}"
        return names

    def whole_name(self, step: StepRecord) -> str:
        """The name of a step's node."""
        tried = "(0)" if self.wraps else ""
        inside = [f"{self.name}{tried}.root", *self.around(step)][-1]
        return f"{inside}{tried}.{step.name.rpartition('/')[2]}"

    def add_step(self, nodes: dict[str, dict[str, Any]], name: str, step: StepRecord) -> None:
        """The nodes of a step: its driver, itself, and its pods."""
        phase = _PHASES[step.status]
        if step.status == "skipped" and "failed" in step.reason:
            phase = "Omitted"
        if phase in ("Skipped", "Omitted"):
            self.put(nodes, name, "Skipped", "system-container-executor", phase, step)
            return
        self.add(nodes, f"{name}-driver", "Pod", "system-container-driver", "Succeeded", step)
        inside = self.add(nodes, name, "DAG", "system-container-executor", phase, step)
        executor = f"{inside}.executor"
        if step.cached:
            self.put(nodes, executor, "Skipped", "system-container-impl", "Skipped", step)
            return
        self.add(nodes, executor, "Pod", "system-container-impl", phase, step, step.attempts)

    def add(
        self,
        nodes: dict[str, dict[str, Any]],
        name: str,
        kind: str,
        template: str,
        phase: str,
        step: StepRecord | None,
        tries: int = 1,
    ) -> str:
        """A node, and around it one that tries again; returns the name of the last try."""
        if not self.wraps and tries <= 1:
            self.put(nodes, name, kind, template, phase, step)
            return name
        last = max(tries, 1) - 1
        names = [f"{name}({number})" for number in range(last + 1)]
        self.put(nodes, name, "Retry", template, phase, step, names)
        for number, each in enumerate(names):
            self.put(nodes, each, kind, template, phase if number == last else "Failed", step)
        return names[-1]

    def put(
        self,
        nodes: dict[str, dict[str, Any]],
        name: str,
        kind: str,
        template: str,
        phase: str,
        step: StepRecord | None,
        children: Sequence[str] = (),
    ) -> None:
        begin = end = _ZERO
        if step and step.started_at:
            began = datetime.datetime.fromisoformat(step.started_at)
            begin = _whole_seconds(began)
            if step.seconds is not None and phase != "Running":
                end = _whole_seconds(began + datetime.timedelta(seconds=step.seconds))
        failed = kind in ("Pod", "Retry") and phase == "Failed" and ".executor" in name
        nodes[self.node_id(name)] = {
            "id": self.node_id(name),
            "name": name,
            "displayName": name.rpartition(".")[2],
            "type": kind,
            "templateName": template,
            "phase": phase,
            "startedAt": begin,
            "finishedAt": end,
            "children": [self.node_id(child) for child in children],
            **({"message": "main: Error (exit code 1)"} if failed else {}),
        }

    def node_id(self, name: str) -> str:
        """Argo's: a hash of the name; the Workflow's own for its first node."""
        return self.name if name == self.name else f"{self.name}-{_hash(name)}"

    def expire(self) -> None:
        """Its time to live is over, an hour after its end (ttlStrategy in KFP's defaults): it is
        gone with its pods; KFP has what was last reported of it."""
        assert self.ended
        self.has_expired = True
        if self.cluster:
            self.cluster.delete_run(self.name)

    def log(self, pod: str) -> str | None:
        """What a pod printed; None where there is no such pod."""
        if self.has_expired:
            return None
        record = self.record()
        for step in record.steps if record else ():
            pods = dict[str, dict[str, Any]]()
            self.add_step(pods, self.whole_name(step), step)
            names = [
                f"{self.name}-{node['templateName']}-{_hash(node['name'])}"
                for node in pods.values()
                if node["type"] == "Pod" and "executor" in node["displayName"]
            ]
            if pod in names and Path(step.log).is_file():
                return Path(step.log).read_text(errors="replace")
        return None


def _whole_seconds(moment: datetime.datetime) -> str:
    """As Kubernetes writes times."""
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _hash(name: str) -> int:
    """FNV-1a in 32 bits, of which Argo makes its ids."""
    number = 0x811C9DC5
    for byte in name.encode():
        number = (number ^ byte) * 0x01000193 & 0xFFFFFFFF
    return number


def main(folder: str, id: str) -> int:
    """Run the pipeline to its end."""
    spec = yaml.safe_load((Path(folder) / "spec.yaml").read_text())
    graph = read((Path(folder) / "spec.yaml").read_text())
    root = (
        f"{spec.get('defaultPipelineRoot', f'{folder}/store')}/{spec['pipelineInfo']['name']}/{id}"
    )
    kept = set[str]()

    def keep(record: RunRecord) -> None:
        for step in record.steps:
            if step.status == "succeeded" and not step.cached and step.name not in kept:
                kept.add(step.name)
                for name, artifact in step.artifacts.items():
                    _copied(
                        artifact.uri, f"{root}/{step.name.rpartition('/')[2]}/{uuid.uuid4()}/{name}"
                    )

    record = RunRecord(
        run_id="run",
        name="run",
        platform="local",
        status="running",
        started_at=datetime.datetime.now(datetime.UTC).isoformat(),
    )
    try:
        execute.execute(
            graph,
            {},
            StepSettings(env=os.environ, source_hash="image", grace_seconds=20),
            home=Path(folder) / "home",
            record=record,
            on_change=keep,
        )
    except RekindleError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _copied(place: str, uri: str) -> None:
    store, path = fsspec.core.url_to_fs(uri)
    if Path(place).exists():
        store.makedirs(path.rpartition("/")[0], exist_ok=True)
        store.put(place, path, recursive=Path(place).is_dir())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
