"""Quotas and limit ranges against what the nodes of a job ask for, as Kubernetes counts it.

The first case is recorded: trainjob-quota.json, where one of two nodes never started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.platforms.checks import PlatformCheck, answered
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.quota_checks import NodeDemand, demand_of, quota
from rekindle.platforms.kubeflow.section import KubeflowSpec
from tests.servers.kubeflow.kubernetes import FakeCluster

RECORDED = Path(__file__).parent / "recorded" / "trainjob-quota.json"
GPU = "nvidia.com/gpu"
TWO_NODES = NodeDemand("train", 2, {"cpu": "4", "memory": "8Gi", GPU: "1"}, {GPU: "1"})
BARE = NodeDemand("train", 2, {}, {})

CASES: dict[str, tuple[NodeDemand, dict[str, str], dict[str, str], str, str]] = {
    "room": (TWO_NODES, {f"requests.{GPU}": "2"}, {}, "ok", "has room for the nodes"),
    "too few GPUs": (
        TWO_NODES,
        {f"requests.{GPU}": "1"},
        {},
        "problem",
        "has 1 of requests.nvidia.com/gpu, and the nodes of `train` ask for 2",
    ),
    "GPUs that others use": (
        TWO_NODES,
        {f"requests.{GPU}": "4"},
        {f"requests.{GPU}": "3"},
        "ok",
        "`train` waits while others use 3 of 4 requests.nvidia.com/gpu (team)",
    ),
    "memory in other units": (
        TWO_NODES,
        {"requests.memory": "16G"},
        {},
        "problem",
        "has 16G of requests.memory, and the nodes of `train` ask for 17179869184",
    ),
    "cpu in thousandths": (TWO_NODES, {"cpu": "8000m"}, {}, "ok", "has room"),
    "pods": (TWO_NODES, {"pods": "1"}, {}, "problem", "has 1 of pods"),
    "limits that nodes do not have": (
        TWO_NODES,
        {"limits.memory": "64Gi"},
        {},
        "problem",
        "takes no pod without limits.memory",
    ),
    "requests that nodes do not have": (
        BARE,
        {"cpu": "64"},
        {},
        "problem",
        "takes no pod without cpu, and the nodes of `train` have none",
    ),
    "jobs": (TWO_NODES, {"count/jobs.batch": "0"}, {}, "problem", "has 0 of count/jobs.batch"),
    "trainings": (
        TWO_NODES,
        {"count/trainjobs.trainer.kubeflow.org": "3"},
        {"count/trainjobs.trainer.kubeflow.org": "3"},
        "ok",
        "`train` waits while others use 3 of 3",
    ),
    "what is no machine": (TWO_NODES, {"services": "0", "count/jobs.batch": "5"}, {}, "ok", "room"),
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path / "cluster") as cluster:
        yield cluster


def verdict(cluster: FakeCluster, demand: NodeDemand) -> tuple[str, str]:
    api = ApiServer(cluster.url, "admin", patience_seconds=3.0)
    check = PlatformCheck("quota", "", lambda: quota(KubeflowSpec(), api, [demand]))
    (result,) = answered([check])
    return result.state, result.said


@pytest.mark.parametrize("case", CASES)
def test_a_quota_is_counted_as_kubernetes_counts_it(case: str, cluster: FakeCluster) -> None:
    demand, hard, used, state, said = CASES[case]
    spec: dict[str, Any] = {"hard": hard}
    cluster.quotas["team"] = {
        "metadata": {"name": "team"},
        "spec": spec,
        "status": {"hard": hard, "used": used},
    }
    assert (verdict(cluster, demand)[0], said in verdict(cluster, demand)[1]) == (state, True), (
        verdict(cluster, demand)
    )
    spec["scopes"] = ["BestEffort"]  # of which nodes may not be
    assert verdict(cluster, demand)[0] == "ok"


def test_the_job_that_was_recorded_is_found_to_wait_for_ever(cluster: FakeCluster) -> None:
    job = json.loads(RECORDED.read_text())["recorded"]["trainjob"]
    cluster.quotas["proof"] = {
        "metadata": {"name": "proof"},
        "spec": {"hard": {f"requests.{GPU}": "1"}},
        "status": {},
    }
    demand = demand_of("train", job["spec"]["trainer"])
    state, said = verdict(cluster, demand)
    assert state == "problem"
    assert "the quota proof has 1 of requests.nvidia.com/gpu" in said


def test_a_limit_range_bounds_one_node_and_gives_defaults(cluster: FakeCluster) -> None:
    cluster.objects["limitranges"]["team"] = {
        "metadata": {"name": "team"},
        "spec": {"limits": [{"type": "Container", "max": {"memory": "4Gi"}}]},
    }
    state, said = verdict(cluster, TWO_NODES)
    assert state == "problem"
    assert "lets a container have 4Gi of memory, and a node of `train` asks for 8Gi" in said
    cluster.quotas["team"] = {"metadata": {"name": "team"}, "spec": {"hard": {"cpu": "64"}}}
    assert verdict(cluster, BARE)[0] == "problem", "it has no defaults"
    (limit,) = cluster.objects["limitranges"]["team"]["spec"]["limits"]
    limit["defaultRequest"] = {"cpu": "1"}
    assert verdict(cluster, BARE)[0] == "ok"
    limit |= {"max": {}, "min": {"cpu": "6"}}
    state, said = verdict(cluster, TWO_NODES)
    assert state == "problem"
    assert "wants at least 6 of cpu in a container, and a node of `train` asks for 4" in said
