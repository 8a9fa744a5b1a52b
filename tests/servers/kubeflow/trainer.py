"""What Kubeflow Trainer v2.3 and JobSet make of a TrainJob: a real process a node, PET_* as the torch
plugin sets them, restarts by the failurePolicy and podFailurePolicy of the runtime."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.platforms.kubeflow.trainjob import packed, unpacked
from tests.ports import free_port
from tests.servers.kubeflow.pods import mount, template_of, variable

if TYPE_CHECKING:
    from tests.servers.kubeflow.kubernetes import FakeCluster

ROOT = Path(__file__).parents[3]
BATCH_SECONDS = 1.0
JOBSET = "jobset.sigs.k8s.io/jobset-name"
INDEX = "batch.kubernetes.io/job-completion-index"


def labels(thing: Any) -> dict[str, str]:
    return dict(thing["metadata"].get("labels", {}))


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def stamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


class Job:
    """A TrainJob and its JobSet: a process a node, watched by a thread."""

    def __init__(self, cluster: FakeCluster, made: dict[str, Any], runtime: dict[str, Any]) -> None:
        self.cluster, self.object = cluster, made
        self.template = template_of(runtime, made)
        self.name = made["metadata"]["name"]
        template = runtime["spec"]["template"]["spec"]
        job = template["replicatedJobs"][0]["template"]["spec"]
        self.most_restarts = template["failurePolicy"]["maxRestarts"]
        self.final = {
            code
            for rule in job["podFailurePolicy"]["rules"]
            for code in rule["onExitCodes"]["values"]
        }
        self.condition = ""
        self.restarts = 0
        self.lost = set[str]()  # pods whose machine is gone
        self.ended = threading.Event()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Delete it: SIGTERM, a grace period, SIGKILL."""
        self.ended.set()
        self.signal_all(signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        self.signal_all(signal.SIGKILL)
        self.thread.join(10)

    def exceed_deadline(self) -> None:
        """Its activeDeadlineSeconds are over: the job has failed at once, and nodes are only told
        to end (recorded: trainjob-deadline)."""
        self.conclude("Failed", "DeadlineExceeded", "TrainJob exceeded its active deadline")
        self.ended.set()
        self.signal_all(signal.SIGTERM)

    def signal_all(self, number: int) -> None:
        for process in list(self.processes):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def run(self) -> None:
        while True:
            judged = self.attempt()
            if self.ended.is_set():
                self.remove_pods()
                break
            # words as recorded: trainjob-complete, -exit-1, -max-restarts
            if not judged:
                self.conclude("Complete", "AllJobsCompleted", "jobset completed successfully")
                break
            failed_job = f"(first failed job: {self.name}-node-0)"
            if judged & self.final:
                message = f"applying FailJobSet failure policy action {failed_job}"
                self.conclude("Failed", "FailJobSetFailurePolicyAction", message)
                break
            if self.restarts >= self.most_restarts:
                message = f"jobset failed due to reaching max number of restarts {failed_job}"
                self.conclude("Failed", "ReachedMaxRestarts", message)
                break
            self.restarts += 1

    def conclude(self, kind: str, reason: str, message: str) -> None:
        condition = {
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": message,
            "lastTransitionTime": now(),
        }
        with self.cluster.lock:
            self.object["status"]["conditions"] = [condition]
            self.condition = kind

    def attempt(self) -> set[int]:
        """One life of all nodes: the exit codes that the job is judged by, none where all
        succeeded. Those are the ones within a second of the first, by which the Job controller
        collects ends (recorded: trainjob-137-then-peer-1-at-once, -later); after that the others
        are told to end, and their pods go with their logs (recorded: trainjob-exit-1)."""
        trainer = self.object["spec"]["trainer"]
        self.wait_for_secret(trainer)
        self.wait_for_room(trainer)
        port = free_port()
        with self.cluster.lock:
            for name in [
                n for n, p in self.cluster.pods.items() if labels(p).get(JOBSET) == self.name
            ]:
                del self.cluster.pods[name]
            if self.ended.is_set():
                return set()
            names = [
                f"{self.name}-node-0-{rank}-{uuid.uuid4().hex[:5]}"
                for rank in range(trainer["numNodes"])
            ]
            self.processes = [self.start(rank, name, port) for rank, name in enumerate(names)]
        codes: dict[int, int] = {}
        first_failure: float | None = None
        judged: set[int] | None = None
        while len(codes) < len(names):
            for rank, process in enumerate(self.processes):
                if names[rank] in self.lost:
                    continue  # its machine is gone, and with it how it ended
                if rank not in codes and (code := process.poll()) is not None:
                    codes[rank] = code if code >= 0 else 128 - code
                    if judged is None:
                        self.finish(names[rank], codes[rank])
                    else:
                        with self.cluster.lock:
                            self.cluster.pods.pop(names[rank], None)
                    if codes[rank] and first_failure is None:
                        first_failure = time.monotonic()
            batch_is_over = first_failure and time.monotonic() - first_failure > BATCH_SECONDS
            if batch_is_over and judged is None:
                judged = set(codes.values()) - {0}
                self.signal_all(signal.SIGTERM)
            time.sleep(0.01)
        return set(codes.values()) - {0} if judged is None else judged

    def wait_for_secret(self, trainer: Any) -> None:
        """As the kubelet does (CreateContainerConfigError): nodes begin once theirs is there."""
        own = f"{self.name}-"
        wanted = [
            (one["valueFrom"]["secretKeyRef"]["name"], one["valueFrom"]["secretKeyRef"]["key"])
            for one in trainer.get("env", [])
            if one.get("valueFrom", {}).get("secretKeyRef", {}).get("name", "").startswith(own)
        ]
        while not self.ended.is_set() and not all(key in self.cluster.secrets for key in wanted):
            self.ended.wait(0.02)

    def wait_for_room(self, trainer: Any) -> None:
        """Pods are refused without a word in the job: events say why, in the words recorded as
        trainjob-quota and -no-account."""
        while not self.ended.is_set():
            if self.cluster.controllers_are_down:
                self.ended.wait(0.1)
                continue
            pod = f"{self.name}-node-0-0-"
            account = self.template["spec"].get("serviceAccountName", "default")
            quota = self.cluster.quota
            if self.cluster.quotas and "nvidia.com/gpu" in str(trainer.get("resourcesPerNode")):
                quota = 0
            if account not in self.cluster.accounts:
                why = (
                    f"error looking up service account kubeflow/{account}: "
                    f'serviceaccount "{account}" not found'
                )
            elif quota is not None and quota < trainer["numNodes"]:
                pod += uuid.uuid4().hex[:5]
                why = "exceeded quota: proof, requested: pods=1, used: pods=1, limited: pods=1"
            else:
                return
            message = f'Error creating: pods "{pod}" is forbidden: {why}'
            self.cluster.warn("Job", f"{self.name}-node-0", "FailedCreate", message)
            self.ended.wait(0.1)

    def remove_pods(self) -> None:
        with self.cluster.lock:
            pods = self.cluster.pods
            for name in [
                name for name, pod in pods.items() if labels(pod).get(JOBSET) == self.name
            ]:
                del pods[name]

    def finish(self, pod: str, code: int) -> None:
        with self.cluster.lock:
            status = self.cluster.pods.get(pod, {}).get("status", {})
            status["phase"] = "Failed" if code else "Succeeded"
            ended = {"exitCode": code, "finishedAt": now(), "startedAt": now()}
            status["containerStatuses"] = [{"name": "node", "state": {"terminated": ended}}]

    def start(self, rank: int, pod: str, port: int) -> subprocess.Popen[bytes]:
        trainer = self.object["spec"]["trainer"]
        folder = self.cluster.folder / "pods" / pod
        (folder / "tmp").mkdir(parents=True)
        log = folder / "log.txt"
        self.cluster.logs[pod] = log
        said = self.template.get("metadata", {})
        made = self.cluster.pods[pod] = {
            "metadata": {
                "name": pod,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": stamp(),
                "namespace": "kubeflow",
                "labels": {
                    **said.get("labels", {}),
                    JOBSET: self.name,
                    "jobset.sigs.k8s.io/replicatedjob-name": "node",
                    INDEX: str(rank),
                },
                "annotations": {
                    **said.get("annotations", {}),
                    "jobset.sigs.k8s.io/restart-attempt": str(self.restarts),
                },
            },
            "spec": {**self.template["spec"], "nodeName": f"machine-{rank}"},
            "status": {"phase": "Running"},
        }
        mount(made, folder / "root", self.cluster.folder / "claims", self.cluster.secrets)
        (node,) = made["spec"]["containers"]
        found = {one["name"]: variable(one, made, self.cluster.secrets) for one in node["env"]}
        env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            **self.cluster.environment,
            "RESTARTS": str(self.restarts),
            "POD_ROOT": str(folder / "root"),
            **{name: value for name, value in found.items() if value is not None},
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        args = trainer["args"]
        if trainer["command"][-1] == "rekindle.platforms.kubeflow.node":  # its account's token
            task = unpacked(args)
            account = self.cluster.accounts[
                self.template["spec"].get("serviceAccountName", "default")
            ]
            args = packed({**task, "leash": {**task["leash"], "account": str(account)}})
        words = [_expanded(word, env) for word in (*trainer["command"], *args)]
        return subprocess.Popen(
            [sys.executable, "-c", _STAMPS, str(log), *words],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


# The container runtime: runs the words, stamps every line they say, hands signals on, exits as they.
_STAMPS = """
import datetime, signal, subprocess, sys
child = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
signal.signal(signal.SIGTERM, lambda n, _: child.send_signal(n))
with open(sys.argv[1], "ab", buffering=0) as log:
    for line in child.stdout:
        at = datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z")
        log.write(at.encode() + b" " + line.rstrip(b"\\n") + b"\\n")
code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
"""


def _expanded(word: str, env: dict[str, str]) -> str:
    """As Kubernetes expands `$(NAME)` in commands and arguments."""
    word = re.sub(r"(?<!\$)\$\((\w+)\)", lambda m: env.get(m[1], m[0]), word)
    return word.replace("$$(", "$(")
