"""Every TrainJob that was recorded, as a launcher sees it: how it stands, what keeps its nodes from
starting, and why it failed. The recordings lie beside the checkout; a part of them is here, too."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.job import failure, living_pods, pods_of, state_of
from rekindle.platforms.kubeflow.obstacles import obstacles, without_pods
from tests.servers.kubeflow.kubernetes import FakeCluster

FACTS = Path(__file__).parents[4] / "shared" / "facts" / "kubeflow-recorded"
NOW = dt.datetime(2026, 11, 29, 20, tzinfo=dt.UTC)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a launcher makes of a job."""

    state: str
    waits: str = ""
    """What its nodes wait for, in part; "" for nothing."""
    living: int = 0
    """Pods that have not ended."""
    why: str = ""
    """Of a job that failed: why, in part."""


EXPECTED: dict[str, Seen] = {
    "137-then-peer-1-at-once": Seen(
        "failed", why="FailJobSet failure policy action (first failed job: "
    ),
    "137-then-peer-1-later": Seen("active", living=2),
    "complete": Seen("complete"),
    "deadline": Seen("failed", why="TrainJob exceeded its active deadline"),
    "evicted": Seen("active", living=2),
    "exit-1": Seen("failed", why="ended with exit code 1"),
    "invalid-pod": Seen("active", waits="must be less than or equal to c"),
    "lost-node": Seen("active", waits="the machine node1 does not answer", living=1),
    "lost-node-gone": Seen("active", waits="no machine has room for a node: 0/1", living=2),
    "max-restarts": Seen("failed", why="reaching max number of restarts"),
    "no-account": Seen("active", waits='serviceaccount "absent" not found'),
    "peer-1-then-137": Seen("active", living=2),
    "quota": Seen("active", waits="exceeded quota: proof", living=1),
    "recreated": Seen("active", waits="does not answer", living=4),
    "restarted": Seen("active", living=2),
    "resumed": Seen("active", waits="no machine has room for a node: 0/2", living=2),
    "running": Seen("active", living=2),
    "suspended": Seen("active", waits="the job is suspended until"),
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path) as cluster:
        yield cluster


def recorded_jobs() -> dict[str, Any]:
    """The recordings of whole jobs, by what happened."""
    if not FACTS.is_dir():
        pytest.skip(f"the recordings are not there: {FACTS.name}")
    recordings = {}
    for file in sorted(FACTS.glob("trainjob-*.json")):
        recording = json.loads(file.read_text())
        if "trainjob" in recording["recorded"]:
            recordings[file.stem.removeprefix("trainjob-")] = recording
    return recordings


def test_each_recording_has_its_row() -> None:
    assert recorded_jobs().keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_job_is_seen_as_it_was(name: str, cluster: FakeCluster) -> None:
    recording = recorded_jobs()[name]
    job = recording["recorded"]["trainjob"]
    pods = recording["recorded"]["pods"]
    for pod in pods if isinstance(pods, list) else pods["items"]:
        cluster.pods[pod["metadata"]["name"]] = pod
    for kind, of, severity, reason, message in (event[1:] for event in recording["events"]):
        if severity == "Warning":
            cluster.warn(kind, of, reason, message)
    server = ApiServer(cluster.url, "token-1")
    job_name = job["metadata"]["name"]
    job_pods = pods_of(server, "kubeflow", job_name)
    found = list(obstacles(server, "kubeflow", job_name, job_pods, NOW))
    if job["spec"].get("suspend"):
        found.append(without_pods(job))
    seen = EXPECTED[name]
    assert state_of(job) == seen.state
    assert len(living_pods(server, "kubeflow", [job_name])) == seen.living
    if state_of(job) == "failed":
        assert seen.why in str(failure(server, "kubeflow", job, ""))
    else:
        assert [seen.waits in obstacle.text for obstacle in found] == [True] * bool(seen.waits)
