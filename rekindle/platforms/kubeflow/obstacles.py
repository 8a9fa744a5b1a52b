"""What keeps the nodes of a TrainJob from starting, or from being replaced.

Trainer reports none of it: a job whose pods no quota has room for, whose account is
missing or whose image cannot be pulled has no condition, for ever. Events of its JobSet,
Job and pods say why, and so do the pods themselves. Recorded from Kubernetes 1.36.2,
Trainer 2.3.0 and JobSet 0.12.0: trainjob-quota, -no-account, -invalid-pod and -lost-node
in tests/platforms/kubeflow/recorded.

A launcher writes it into its log, and `rekindle status` reads it there: it sees KFP's API
alone, and no events."""

import dataclasses
import datetime as dt
import logging
import re
import time
from collections.abc import Iterator, Sequence

from rekindle.errors import StepError
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.job import pods_of
from rekindle.platforms.kubeflow.settings import NODE
from rekindle.protojson import Json

log = logging.getLogger(__name__)

_LOOK_EVERY_POLLS = 6  # half a minute
_FOR_GOOD_POLLS = 120  # ten minutes: an account may be created, an image pushed
_LOOKS_WITHOUT_PODS = 3  # a restart takes its pods away for some seconds, too
# of events; the others are steps on the way. FailedScheduling is said by the pod, too, and
# no longer once it has a machine
_REASONS = ("FailedCreate", "JobCreationFailed", "FailedMount")
# of a container that waits. One more, CreateContainerConfigError, is usual for some seconds:
# nodes wait for the Secret that the launcher creates behind their job
_WAITING_FOR_GOOD = ("InvalidImageName", "ErrImagePull", "ImagePullBackOff")
# what no patience cures, by the words of the API server
_FOR_GOOD = re.compile(
    r"is invalid:|error looking up service account|InvalidImageName|violates PodSecurity"
    # a webhook's (Kyverno, Gatekeeper), and a ValidatingAdmissionPolicy's
    r"|denied (the )?request"
)
# lines of a launcher's log: they name the job, lest they be taken for what a node prints
_WAITING = "TrainJob %s, waiting: %s"
_ALL_RUN = "TrainJob %s: all nodes run"
_WAITING_LINE = re.compile(r"TrainJob \S+, waiting: (.+)")
# what it waited for is past: they run, or it is another attempt
_GOES_ON_LINE = re.compile(r"TrainJob \S+(: all nodes run| created| failed: .*)")
# the last part of a pod's name is another one in each try
_POD = re.compile(r'(pods "[^"]*-node-0-\d+-)[a-z0-9]*"')


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why a node does not start, or is not replaced."""

    text: str
    """In the cluster's words."""
    is_for_good: bool
    """Whether it stays until the config, the cluster or the job is changed."""


class StartWatch:
    """Looks now and then at the nodes of a TrainJob that runs, and says what keeps them from
    starting, each thing once."""

    def __init__(self, cluster: ApiServer, namespace: str, poll_seconds: float) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.every_seconds = _LOOK_EVERY_POLLS * poll_seconds
        self.patience_seconds = _FOR_GOOD_POLLS * poll_seconds
        self.next_look = 0.0
        self.job = ""
        self.said = set[str]()
        self.for_good_since: float | None = None
        self.looks_without_pods = 0

    def look(self, job: Json) -> None:
        """Log what is new since the last look; StepError where something that no patience
        cures has lasted."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + self.every_seconds
        name = job["metadata"]["name"]
        if name != self.job:  # another attempt, which may wait for the same
            self.job = name
            self._forget()
        pods = pods_of(self.cluster, self.namespace, name)
        if len(_at_work(pods)) == job["spec"]["trainer"]["numNodes"]:
            self._all_run()
            return
        utc_now = dt.datetime.now(dt.UTC)
        found = obstacles(self.cluster, self.namespace, name, pods, utc_now)
        self.looks_without_pods = 0 if pods else self.looks_without_pods + 1
        if not found and self.looks_without_pods >= _LOOKS_WITHOUT_PODS:
            found = (without_pods(job),)
        for obstacle in found:
            if obstacle.text not in self.said:
                self.said.add(obstacle.text)
                log.warning(_WAITING, name, " ".join(obstacle.text.split()))
        for_good = [obstacle.text for obstacle in found if obstacle.is_for_good]
        if not for_good:
            self.for_good_since = None
        elif self.for_good_since is None:
            self.for_good_since = now
        elif now - self.for_good_since > self.patience_seconds:
            raise StepError(
                f"the nodes of TrainJob {name} cannot start: {for_good[0]}",
                where=f"trainjob {self.namespace}/{name}",
                fix="change what it says; the job was deleted",
            )

    def _all_run(self) -> None:
        if self.said:
            log.info(_ALL_RUN, self.job)
        self._forget()

    def _forget(self) -> None:
        self.said.clear()
        self.for_good_since = None
        self.looks_without_pods = 0


def waits_for(log_of_launcher: str) -> str:
    """What a launcher that wrote this log waits for; "" where its nodes run, as far as it
    says."""
    obstacle = ""
    for line in log_of_launcher.splitlines():
        waiting = _WAITING_LINE.fullmatch(line)
        if waiting:
            obstacle = waiting[1]
        elif _GOES_ON_LINE.fullmatch(line):
            obstacle = ""
    return obstacle


def _at_work(pods: Sequence[Json]) -> list[Json]:
    """Those whose node runs, or has ended, and that are not being deleted."""
    started = ("Running", "Succeeded", "Failed")
    return [
        pod
        for pod in pods
        if pod["status"].get("phase") in started and not pod["metadata"].get("deletionTimestamp")
    ]


def obstacles(
    cluster: ApiServer, namespace: str, job: str, pods: Sequence[Json], now: dt.datetime
) -> tuple[Obstacle, ...]:
    """The obstacles of a TrainJob with these pods, each once."""
    found = [*_of_pods(pods, now), *_of_events(cluster, namespace, job, pods)]
    return tuple(dict.fromkeys(found))


def without_pods(job: Json) -> Obstacle:
    """Why a TrainJob of which no event says anything has no pods (trainjob-suspended)."""
    if job["spec"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        whose = f"the queue {queue} admits it" if queue else "its suspend is set to false"
        return Obstacle(f"the job is suspended until {whose}", False)
    return Obstacle(
        "no controller makes pods of the job: see whether those of Kubeflow Trainer and JobSet "
        "run (kubectl get pods -A)",
        False,
    )


def _of_pods(pods: Sequence[Json], now: dt.datetime) -> Iterator[Obstacle]:
    for pod in pods:
        status = pod.get("status") or {}
        for condition in status.get("conditions") or ():
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                yield Obstacle(f"no machine has room for a node: {condition['message']}", False)
        for container in status.get("containerStatuses") or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            if container["name"] == NODE and waiting.get("reason") in _WAITING_FOR_GOOD:
                text = f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
                yield Obstacle(text, True)
        if _is_lost(pod, now):
            machine = (pod.get("spec") or {}).get("nodeName", "its machine")
            yield Obstacle(
                f"the machine {machine} does not answer, and its node cannot be ended: the job "
                f"waits until it does, or until `kubectl delete node {machine}`",
                False,
            )


def _is_lost(pod: Json, now: dt.datetime) -> bool:
    """Whether a pod should have ended by now, and has not."""
    deletion = pod["metadata"].get("deletionTimestamp")  # the end of its grace period
    if not deletion or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return False
    return dt.datetime.fromisoformat(deletion) < now


def _of_events(
    cluster: ApiServer, namespace: str, job: str, pods: Sequence[Json]
) -> Iterator[Obstacle]:
    """What events say of the job's objects, as far as this account may read them."""
    names = {job, f"{job}-{NODE}-0", *(pod["metadata"]["name"] for pod in pods)}
    try:
        path = f"/api/v1/namespaces/{namespace}/events"
        answer = cluster.get(path, fieldSelector="type=Warning") or {}
    except StepError:  # a Role of an older rbac.yaml does not allow it
        return
    for event in answer.get("items") or ():
        is_ours = (event.get("involvedObject") or {}).get("name") in names
        if is_ours and event.get("reason") in _REASONS:
            message = _POD.sub(r'\1..."', str(event.get("message") or ""))
            yield Obstacle(message, bool(_FOR_GOOD.search(message)))
