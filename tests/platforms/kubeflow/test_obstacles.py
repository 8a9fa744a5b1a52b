"""What keeps nodes from starting, as real Kubernetes, Trainer and JobSet were recorded to say it."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.job import pods_of
from rekindle.platforms.kubeflow.obstacles import Obstacle, obstacles, without_pods
from tests.servers.kubeflow.kubernetes import FakeCluster

RECORDED = Path(__file__).with_name("recorded")
NOW = dt.datetime(2026, 11, 29, 20, tzinfo=dt.UTC)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path) as cluster:
        yield cluster


def load(name: str, cluster: FakeCluster) -> str:
    """Give a cluster the pods and events that were recorded; the name of the job."""
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    for pod in listed(recorded["recorded"]["pods"]):
        cluster.pods[pod["metadata"]["name"]] = pod
    for number, (_, kind, of, severity, reason, message) in enumerate(recorded["events"]):
        cluster.events[str(number)] = {
            "metadata": {"name": str(number)},
            "involvedObject": {"kind": kind, "name": of},
            "type": severity,
            "reason": reason,
            "message": message,
        }
    return str(recorded["recorded"]["trainjob"]["metadata"]["name"])


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else list(value.get("items", []))


def found_in(name: str, cluster: FakeCluster) -> tuple[Obstacle, ...]:
    job = load(name, cluster)
    server = ApiServer(cluster.url, "token-1")
    return obstacles(server, "kubeflow", job, pods_of(server, "kubeflow", job), NOW)


def test_a_quota_is_named_once_and_may_be_freed(cluster: FakeCluster) -> None:
    (obstacle,) = found_in("trainjob-quota", cluster)
    assert '-node-0-1-..." is forbidden: exceeded quota: proof' in obstacle.text
    assert not obstacle.is_for_good


def test_a_missing_account_is_named_and_stays(cluster: FakeCluster) -> None:
    (obstacle,) = found_in("trainjob-no-account", cluster)
    assert 'serviceaccount "absent" not found' in obstacle.text
    assert obstacle.is_for_good


def test_a_pod_that_no_api_server_takes_is_named_and_stays(cluster: FakeCluster) -> None:
    (obstacle,) = found_in("trainjob-invalid-pod", cluster)
    assert "must be less than or equal to c" in obstacle.text
    assert obstacle.is_for_good


def test_a_machine_that_is_gone_is_named(cluster: FakeCluster) -> None:
    (obstacle,) = found_in("trainjob-lost-node", cluster)
    assert obstacle.text.startswith("the machine node1 does not answer")
    assert "kubectl delete node node1" in obstacle.text


@pytest.mark.parametrize("name", ["trainjob-running"])
def test_a_job_that_runs_has_none(name: str, cluster: FakeCluster) -> None:
    assert found_in(name, cluster) == ()


def test_pods_say_what_no_machine_has_room_for_and_what_cannot_be_pulled(
    cluster: FakeCluster,
) -> None:
    """In the words of Kubernetes' scheduler and kubelet, which were not recorded."""
    job = load("trainjob-running", cluster)
    first, second = cluster.pods.values()
    full = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    first["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": full}],
    }
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "a:1"'}
    second["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "node", "state": {"waiting": waiting}}],
    }
    server = ApiServer(cluster.url, "token-1")
    found = obstacles(server, "kubeflow", job, pods_of(server, "kubeflow", job), NOW)
    assert {(obstacle.text, obstacle.is_for_good) for obstacle in found} == {
        (f"no machine has room for a node: {full}", False),
        ('ImagePullBackOff: Back-off pulling image "a:1"', True),
    }


@pytest.mark.parametrize(
    "message",
    [
        'Error creating: admission webhook "validation.gatekeeper.sh" denied the request: [x] no',
        "Error creating: pods \"t-node-0-0-ab12c\" is forbidden: ValidatingAdmissionPolicy 'p' "
        "with binding 'b' denied request: no",
        'Error creating: pods "t-node-0-0-ab12c" is forbidden: violates PodSecurity "restricted:'
        'latest": runAsNonRoot != true',
    ],
)
def test_what_a_policy_refuses_stays(message: str, cluster: FakeCluster) -> None:
    cluster.warn("Job", "t-node-0", "FailedCreate", message)
    (obstacle,) = obstacles(ApiServer(cluster.url, "token-1"), "kubeflow", "t", [], NOW)
    assert obstacle.is_for_good


def test_a_job_that_a_queue_holds_says_which() -> None:
    """The job as recorded while it is suspended (trainjob-suspended of the facts)."""
    job: dict[str, Any] = {"metadata": {"labels": {}}, "spec": {"suspend": True}}
    assert "until its suspend is set to false" in without_pods(job).text
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    assert without_pods(job).text == "the job is suspended until the queue gpus admits it"
    job["spec"]["suspend"] = False
    assert "no controller makes pods" in without_pods(job).text
