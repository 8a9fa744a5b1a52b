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
import zlib
from collections.abc import Iterator, Mapping
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
_STATES = {
    "running": "RUNNING",
    "succeeded": "SUCCEEDED",
    "failed": "FAILED",
    "skipped": "SKIPPED",
    "cancelled": "FAILED",
}


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
    ) -> None:
        spec["defaultPipelineRoot"] = root or f"{folder}/store"
        spec["defaultPipelineRoot"] = root or f"{folder}/store"
        self.folder, self.id, self.cluster, self.environment = folder, id, cluster, environment
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
        self.spec = spec
        self.state, self.ended, self.terminating = "RUNNING", "", False
        self.go()

    def go(self) -> None:
        """Run what has not succeeded."""
        self.state, self.ended, self.terminating = "RUNNING", "", False
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
        self.state = "CANCELED" if self.terminating else "FAILED" if code else "SUCCEEDED"

    def terminate(self) -> None:
        """As the API server does it: the Workflow gets a deadline, and every pod a SIGTERM."""
        if self.process.poll() is None:
            self.terminating = True
            if self.cluster:
                self.cluster.terminate_run(self.name)
            self.process.send_signal(signal.SIGINT)

    def record(self) -> RunRecord | None:
        try:
            return RunRecord.read(self.folder / "home" / "runs" / "run" / "run.json")
        except FileNotFoundError:
            return None

    def details(self) -> list[dict[str, Any]]:
        """The nodes, as `run_details.task_details` has them."""
        record = self.record()
        return [*self.nodes(record.steps)] if record else []

    def nodes(self, steps: tuple[StepRecord, ...]) -> Iterator[dict[str, Any]]:
        begun = [step for step in steps if step.status != "pending"]
        yield self.node(
            "root", "DAG", self.name, self.state, None, [f"{s.name}-driver" for s in begun]
        )
        for step in begun:
            name = step.name.rpartition("/")[2]
            task, driver = step.name, f"{step.name}-driver"
            yield self.node(driver, "driver", f"{name}-driver", "SUCCEEDED", step, [task])
            state = _STATES[step.status]
            children = [] if step.status == "skipped" else [f"{task}-executor"]
            yield self.node(task, "task", name, state, step, children)
            if children:
                of_pod = "SKIPPED" if step.cached else state
                yield self.node(children[0], "system-container-impl", "executor", of_pod, step, [])

    def node(
        self,
        key: str,
        template: str,
        shown: str,
        state: str,
        step: StepRecord | None,
        children: list[str],
    ) -> dict[str, Any]:
        begin = step.started_at if step and step.started_at else _ZERO
        end = _ZERO
        if step and step.started_at and step.seconds is not None and state != "RUNNING":
            began = datetime.datetime.fromisoformat(step.started_at)
            end = (began + datetime.timedelta(seconds=step.seconds)).isoformat()
        return {
            "run_id": self.id,
            "task_id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.id}{key}")),
            "display_name": shown,
            "pod_name": f"{self.name}-{template}-{_number(key)}",
            "state": state,
            "create_time": begin,
            "start_time": begin,
            "end_time": end,
            "child_tasks": [{"pod_name": f"{self.name}-{_number(child)}"} for child in children],
        }

    def log(self, pod: str) -> str | None:
        """What a pod printed; None where there is no such pod."""
        record = self.record()
        for step in record.steps if record else ():
            if pod.endswith(f"-{_number(f'{step.name}-executor')}") and Path(step.log).is_file():
                return Path(step.log).read_text(errors="replace")
        return None


def _number(key: str) -> int:
    """What Argo's ids end with."""
    return zlib.crc32(key.encode())


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
