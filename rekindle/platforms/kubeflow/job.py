"""A TrainJob in the cluster: how it stands, its pods, what they say.

Trainer reports `Complete` and `Failed` as conditions; pods are found by the labels that
JobSet and Job put on them. When the JobSet restarts, pods are replaced and their logs are
gone, so the process that follows node rank 0 keeps the last lines."""

import collections
import contextlib
import dataclasses
import datetime
import sys
import threading
import time
from collections.abc import Iterator, Sequence, Set
from typing import Literal

from rekindle.errors import StepError
from rekindle.launch.events import error_in_log
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.settings import NODE
from rekindle.platforms.kubeflow.trainjob import ATTEMPT, IDENTITY, STEP, digest_of
from rekindle.protojson import Json

State = Literal["active", "complete", "failed", "going"]
_LAST_LINES = 30
_KEPT_LINES = 200  # far more than the end of a traceback has
_MOST_NAMED = 4  # nodes in a sentence
_PLACES_AMONG_CAUSES = {137: 1, 75: 2, 143: 2}  # of exit codes; 0 for all others
_INDEX = "batch.kubernetes.io/job-completion-index"


def jobs_path(namespace: str, name: str = "") -> str:
    """TrainJobs in the API, or one of them."""
    base = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs"
    return f"{base}/{name}" if name else base


def attempts(cluster: ApiServer, namespace: str, identity: str) -> dict[int, Json]:
    """The TrainJobs that there are for a step of a run, by their number, in order."""
    selector = f"{STEP}={digest_of(identity)}"
    answer = cluster.get(jobs_path(namespace), labelSelector=selector) or {"items": []}
    by_number = {}
    for job in answer["items"]:
        if is_for(job, identity):  # the label is a short hash, which two may share
            by_number[int(job["metadata"]["labels"][ATTEMPT])] = job
    return {number: by_number[number] for number in sorted(by_number)}


def is_for(job: Json, identity: str) -> bool:
    """Whether it is for that step of that run."""
    return bool(job["metadata"].get("annotations", {}).get(IDENTITY) == identity)


def state_of(job: Json) -> State:
    """Where the job stands; `going` while it is being deleted."""
    if job["metadata"].get("deletionTimestamp"):
        return "going"
    if _condition(job, "Complete"):
        return "complete"
    if _condition(job, "Failed"):
        return "failed"
    return "active"


def _condition(job: Json, kind: str) -> Json | None:
    """The condition of this type, if it is true."""
    conditions: list[Json] = job.get("status", {}).get("conditions", [])
    for condition in conditions:
        if condition["type"] == kind and condition["status"] == "True":
            return condition
    return None


def pods_of(cluster: ApiServer, namespace: str, job: str) -> list[Json]:
    """The pods of its nodes, the newest first."""
    selector = f"jobset.sigs.k8s.io/jobset-name={job},jobset.sigs.k8s.io/replicatedjob-name={NODE}"
    answer = cluster.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
    pods: list[Json] = (answer or {}).get("items", [])
    return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)


def living_pods(cluster: ApiServer, namespace: str, jobs: Sequence[str]) -> list[Json]:
    """The pods of the nodes of these jobs that have not ended; a job may have been deleted."""
    pods = []
    for job in jobs:
        for pod in pods_of(cluster, namespace, job):
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                pods.append(pod)
    return pods


def rank_of(pod: Json) -> int:
    """The node rank that a pod has; -1 where it has none."""
    metadata = pod["metadata"]
    # Kubernetes writes the index as an annotation, and since 1.28 as a label
    labels = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    return int(labels.get(_INDEX, -1))


def failure(cluster: ApiServer, namespace: str, job: Json, last_lines: str) -> StepError:
    """Why the job failed, with the end of the log of the node that made it fail, or else
    `last_lines`, which are node rank 0's.

    The Job controller deletes pods that have not failed themselves, and their logs with
    them; a pod that is left has failed (trainjob-exit-1, -max-restarts as recorded)."""
    name = job["metadata"]["name"]
    condition = _condition(job, "Failed") or {}
    reason = condition.get("message") or condition.get("reason") or "no reason"
    sentences = [f"TrainJob {name} failed: {reason}"]
    where = f"trainjob {namespace}/{name}"
    ends = _ends_of(pods_of(cluster, namespace, name))
    log = last_lines
    rank_of_log = 0
    if ends:
        culprits = _first_to_fail(ends)
        culprit = culprits[0]
        sentences.append(_how_they_ended(culprits, ends))
        where = f"pod {namespace}/{culprit.pod}"
        own_lines = _last_lines_of(cluster, namespace, culprit.pod)
        if own_lines:
            log = own_lines
            rank_of_log = culprit.rank
    failed_ranks = {end.rank for end in ends}
    sentences += _of_logs_that_go(job, failed_ranks, has_lines_of_leader=bool(last_lines))
    kind, message = error_in_log(log)
    error = f"{kind}: {message}" if kind else message
    quoted_lines = [f"  | {line}" for line in log.splitlines() if line.strip()][-_LAST_LINES:]
    if quoted_lines:
        quoted_lines.insert(0, f"the last lines of node {rank_of_log}:")
    paragraphs = ["; ".join(sentences), error, "\n".join(quoted_lines)]
    return StepError("\n".join(filter(None, paragraphs)), where=where)


@dataclasses.dataclass(frozen=True)
class _NodeEnd:
    """How the pod of a node failed."""

    rank: int
    pod: str
    exit_code: int
    is_out_of_memory: bool
    finished_at: str
    """In whole seconds, as Kubernetes writes it."""

    @property
    def place_among_causes(self) -> int:
        """0 where the node failed of itself, 1 where it was killed, 2 where it ended because
        of others: they were lost (75), or it was told to end (143).

        A node whose step ends with 1 or 2 ends seconds later than it fails (node.py), so the
        exit code says more of the cause than the time."""
        if self.is_out_of_memory:
            return 0
        return _PLACES_AMONG_CAUSES.get(self.exit_code, 0)

    def __str__(self) -> str:
        if self.is_out_of_memory:
            return f"node {self.rank} (exit code {self.exit_code}, killed for its memory)"
        return f"node {self.rank} (exit code {self.exit_code})"


def _ends_of(pods: Sequence[Json]) -> list[_NodeEnd]:
    """The failed nodes among these pods, by rank."""
    ends = []
    for pod in pods:
        termination = _termination(pod)
        if termination.get("exitCode"):
            end = _NodeEnd(
                rank=rank_of(pod),
                pod=pod["metadata"]["name"],
                exit_code=termination["exitCode"],
                is_out_of_memory=termination.get("reason") == "OOMKilled",
                finished_at=str(termination.get("finishedAt", "")),
            )
            ends.append(end)
    return sorted(ends, key=lambda end: end.rank)


def _first_to_fail(ends: Sequence[_NodeEnd]) -> list[_NodeEnd]:
    """The node whose failure made the others end, as far as codes and times tell; several
    where they do not."""
    first_place = min(end.place_among_causes for end in ends)
    causes = [end for end in ends if end.place_among_causes == first_place]
    first_second = min(end.finished_at for end in causes)
    return [end for end in causes if end.finished_at == first_second]


def _how_they_ended(culprits: Sequence[_NodeEnd], ends: Sequence[_NodeEnd]) -> str:
    if len(ends) == 1:
        (end,) = ends
        suffix = ", killed for its memory" if end.is_out_of_memory else ""
        return f"node {end.rank} ended with exit code {end.exit_code}{suffix}"
    sentence = f"{culprits[0]} is the likely cause, by exit code and time"
    if len(culprits) > 1:
        names = ", ".join(map(str, culprits[:_MOST_NAMED]))
        sentence = f"{names} failed within the same second: which was first is not known"
    others = [end for end in ends if end not in culprits]
    if others:
        names = ", ".join(map(str, others[:_MOST_NAMED]))
        sentence = f"{sentence}; {names} failed, too"
    return sentence


def _of_logs_that_go(
    job: Json, failed_ranks: Set[int], *, has_lines_of_leader: bool
) -> Iterator[str]:
    """What becomes of the logs of nodes that have not failed themselves."""
    count = job["spec"]["trainer"]["numNodes"] - len(failed_ranks)
    if count <= 0:
        return
    which = "the other node" if failed_ranks else "the node"
    sentence = f"the log of {which} is deleted with its pod"
    if count > 1:
        which = f"the other {count} nodes" if failed_ranks else f"all {count} nodes"
        sentence = f"the logs of {which} are deleted with their pods"
    if 0 not in failed_ranks and has_lines_of_leader:
        sentence = f"{sentence}, but for what this step printed of node 0"
    yield sentence


def _last_lines_of(cluster: ApiServer, namespace: str, pod: str) -> str:
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
    with contextlib.suppress(OSError):
        return "\n".join(cluster.lines(path, container=NODE, tailLines=str(_KEPT_LINES)))
    return ""


def _termination(pod: Json) -> Json:
    """How the node's container ended; empty while it runs."""
    for status in pod.get("status", {}).get("containerStatuses", []):
        if status["name"] == NODE:
            return dict(status["state"].get("terminated", {}))
    return {}


class Follower:
    """Copies what node rank 0 prints to our own output, from pod to pod, in a thread of
    its own."""

    def __init__(self, cluster: ApiServer, namespace: str, job: str, poll_seconds: float) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.job = job
        self.poll_seconds = poll_seconds
        self.lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def finish(self, patience_seconds: float) -> str:
        """Copy what is still to come, and return the last lines."""
        self.ending.set()
        self.thread.join(patience_seconds)
        return "\n".join(self.lines)

    def _follow(self) -> None:
        copied_uid = ""  # of the pod whose log is here whole
        since = ""
        while True:
            is_last = self.ending.is_set()  # asked before looking: one look comes after the end
            is_whole = True
            pod = self._pod()
            if pod is not None and pod["metadata"]["uid"] != copied_uid:
                since, is_whole = self._copy(pod["metadata"]["name"], since)
                if is_whole and pod["status"].get("phase") in ("Succeeded", "Failed"):
                    copied_uid = pod["metadata"]["uid"]
                    since = ""
            if is_last and is_whole:
                return
            time.sleep(self.poll_seconds)

    def _pod(self) -> Json | None:
        """The newest pod of node rank 0 that has begun; None as well if the cluster
        cannot say."""
        try:
            pods = pods_of(self.cluster, self.namespace, self.job)
        except Exception:  # noqa: BLE001 - the log is a comfort; the status decides
            return None
        for pod in pods:
            phase = pod.get("status", {}).get("phase")
            if rank_of(pod) == 0 and phase in ("Running", "Succeeded", "Failed"):
                return pod
        return None

    def _copy(self, pod: str, since: str) -> tuple[str, bool]:
        """Copy the lines after `since`, a time as Kubernetes writes it. Returns the time
        of the last line, and whether the log ended there and not only the connection."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        query = {"container": NODE, "follow": "true", "timestamps": "true"}
        if since:
            query["sinceTime"] = _in_whole_seconds(since)
        try:
            for line in self.cluster.lines(path, **query):
                time_of_line, _, text = line.partition(" ")
                # `sinceTime` is cut to seconds: lines of that second come once more
                if not since or time_of_line.rstrip("Z") > since.rstrip("Z"):
                    since = time_of_line
                    self.lines.append(text)
                    sys.stdout.write(f"{text}\n")
                    sys.stdout.flush()
        except OSError:
            return since, False
        return since, True


def _in_whole_seconds(time: str) -> str:
    """A time of a log as `sinceTime` takes it; kubelets write theirs with the offset of
    their machine (cri-client/pkg/logs)."""
    moment = datetime.datetime.fromisoformat(time).astimezone(datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
