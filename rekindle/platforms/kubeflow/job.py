"""A TrainJob in the cluster: how it stands, its pods, what they say.

Trainer reports `Complete` and `Failed` as conditions; pods are found by the labels that JobSet and
Job put on them. When the JobSet restarts, pods are replaced and their logs are gone, so the process
that follows node rank 0 keeps the last lines."""

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

from rekindle.errors import StepError
from rekindle.launch.events import error_in_log
from rekindle.platforms.kubeflow.cluster import Cluster
from rekindle.platforms.kubeflow.settings import NODE
from rekindle.platforms.kubeflow.trainjob import ATTEMPT, IDENTITY, STEP, digest_of

State = Literal["active", "complete", "failed", "going"]
_LAST_LINES = 30
_INDEX = "batch.kubernetes.io/job-completion-index"


def jobs_path(namespace: str, name: str = "") -> str:
    """TrainJobs in the API, or one of them."""
    base = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs"
    return f"{base}/{name}" if name else base


def attempts(cluster: Cluster, namespace: str, identity: str) -> dict[int, dict[str, Any]]:
    """The TrainJobs that there are for a step of a run, by their number, in order."""
    query = f"{STEP}={digest_of(identity)}"
    answer = cluster.get(jobs_path(namespace), labelSelector=query) or {"items": []}
    mine = [job for job in answer["items"] if is_for(job, identity)]
    return dict(sorted((int(job["metadata"]["labels"][ATTEMPT]), job) for job in mine))


def is_for(job: Mapping[str, Any], identity: str) -> bool:
    """Whether it is for that step of that run."""
    return bool(job["metadata"].get("annotations", {}).get(IDENTITY) == identity)


def state_of(job: Mapping[str, Any]) -> State:
    """Where the job stands; `going` while it is being deleted."""
    if job["metadata"].get("deletionTimestamp"):
        return "going"
    if _condition(job, "Complete"):
        return "complete"
    return "failed" if _condition(job, "Failed") else "active"


def _condition(job: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    conditions = job.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind and c["status"] == "True"), None)


def pods_of(cluster: Cluster, namespace: str, job: str) -> list[dict[str, Any]]:
    """The pods of its nodes, the newest first."""
    selector = f"jobset.sigs.k8s.io/jobset-name={job},jobset.sigs.k8s.io/replicatedjob-name={NODE}"
    answer = cluster.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
    pods: list[dict[str, Any]] = (answer or {}).get("items", [])
    return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)


def rank_of(pod: Mapping[str, Any]) -> int:
    """The node rank that a pod has."""
    metadata = pod["metadata"]
    both = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    return int(both.get(_INDEX, -1))


def failure(cluster: Cluster, namespace: str, job: Mapping[str, Any], heard: str) -> StepError:
    """Why the job failed: the last words of the pod that failed first, or else `heard`."""
    name = job["metadata"]["name"]
    told = _condition(job, "Failed") or {}
    what = f"TrainJob {name} failed: {told.get('message') or told.get('reason') or 'no reason'}"
    where = f"trainjob {namespace}/{name}"
    if failed := [pod for pod in pods_of(cluster, namespace, name) if _ended(pod).get("exitCode")]:
        pod = min(failed, key=lambda pod: str(_ended(pod).get("finishedAt", "")))
        pod_name, code = pod["metadata"]["name"], _ended(pod)["exitCode"]
        what += f"; node {rank_of(pod)} ended with exit code {code}"
        where = f"pod {namespace}/{pod_name}"
        path = f"/api/v1/namespaces/{namespace}/pods/{pod_name}/log"
        with contextlib.suppress(OSError):
            heard = "\n".join(cluster.lines(path, container=NODE, tailLines="200")) or heard
    kind, message = error_in_log(heard)
    said = f"{kind}: {message}" if kind else message
    lines = [line for line in heard.splitlines() if line.strip()][-_LAST_LINES:]
    quoted = "\n".join(f"  | {line}" for line in lines)
    return StepError("\n".join(filter(None, [what, said, quoted])), where=where)


def _ended(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    statuses = pod.get("status", {}).get("containerStatuses", [])
    state: Mapping[str, Any] = next((s["state"] for s in statuses if s["name"] == NODE), {})
    return dict(state.get("terminated", {}))


class Follower:
    """Copies what node rank 0 says to our own output, from pod to pod, in a thread of its own."""

    def __init__(self, cluster: Cluster, namespace: str, job: str, poll_seconds: float) -> None:
        self.cluster, self.namespace, self.job = cluster, namespace, job
        self.poll_seconds = poll_seconds
        self.heard: collections.deque[str] = collections.deque(maxlen=200)
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.thread.start()

    def finish(self, patience_seconds: float) -> str:
        """Hear the rest, and say what the last lines were."""
        self.ending.set()
        self.thread.join(patience_seconds)
        return "\n".join(self.heard)

    def follow(self) -> None:
        done, since = "", ""
        while True:
            last = self.ending.is_set()  # asked before looking: one look comes after the end
            pod, whole = self.pod(), True
            if pod is not None and pod["metadata"]["uid"] != done:
                since, whole = self.copy(pod["metadata"]["name"], since)
                if whole and pod["status"].get("phase") in ("Succeeded", "Failed"):
                    done, since = pod["metadata"]["uid"], ""
            if last and whole:
                return
            time.sleep(self.poll_seconds)

    def pod(self) -> dict[str, Any] | None:
        """The newest pod of node rank 0 that has begun; None as well if the cluster cannot say."""
        try:
            pods = pods_of(self.cluster, self.namespace, self.job)
        except Exception:  # noqa: BLE001 - the log is a comfort; the status decides
            return None
        begun = ("Running", "Succeeded", "Failed")
        mine = [p for p in pods if rank_of(p) == 0 and p.get("status", {}).get("phase") in begun]
        return mine[0] if mine else None

    def copy(self, pod: str, since: str) -> tuple[str, bool]:
        """Copy what was said after `since`, a time as Kubernetes writes it; the time of the last
        line, and whether that was the end and not only that of the connection."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        query = {"container": NODE, "follow": "true", "timestamps": "true"}
        if since:
            query["sinceTime"] = since.partition(".")[0].rstrip("Z") + "Z"  # whole seconds only
        try:
            for line in self.cluster.lines(path, **query):
                at, _, text = line.partition(" ")
                if not since or at.rstrip("Z") > since.rstrip("Z"):
                    since = at
                    self.heard.append(text)
                    sys.stdout.write(f"{text}\n")
                    sys.stdout.flush()
        except OSError:
            return since, False
        return since, True
