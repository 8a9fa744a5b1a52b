"""Which node made a job fail, and what is left of the logs, as real Kubernetes, Trainer and JobSet
were recorded to leave it. Where nodes of other exit codes are needed, the recorded pods get them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.job import failure
from tests.servers.kubeflow.kubernetes import FakeCluster

RECORDED = Path(__file__).with_name("recorded")
Ends = Mapping[int, tuple[int, str, str]]  # exit code, second and reason, by rank


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path) as cluster:
        yield cluster


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"trainjob-{name}.json").read_text())["recorded"]


def said(cluster: FakeCluster, job: Any, pods: list[Any], last_lines: str = "") -> str:
    """The failure as the launcher prints it, of a cluster that has these pods."""
    for pod in pods:
        name = pod["metadata"]["name"]
        rank = pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
        cluster.pods[name] = pod
        cluster.logs[name] = cluster.folder / f"{name}.log"
        cluster.logs[name].write_text(f"2026-11-29T19:11:01Z the words of node {rank}\n")
    return str(failure(ApiServer(cluster.url, "token-1"), "kubeflow", job, last_lines))


def with_ends(ends: Ends) -> tuple[Any, list[Any]]:
    """The recorded job of this many failed nodes."""
    found = recorded("137-then-peer-1-at-once")
    pods = []
    for rank, (code, second, reason) in ends.items():
        pod = copy.deepcopy(found["pods"][0])
        pod["metadata"]["name"] = f"train-node-0-{rank}-abcde"
        pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = str(rank)
        ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        ended |= {"exitCode": code, "finishedAt": f"2026-11-29T19:11:{second}Z", "reason": reason}
        pods.append(pod)
    found["trainjob"]["spec"]["trainer"]["numNodes"] = len(pods)
    return found["trainjob"], pods


def test_the_node_that_failed_is_named_and_what_becomes_of_the_log_of_the_other(
    cluster: FakeCluster,
) -> None:
    found = recorded("exit-1")
    text = said(cluster, found["trainjob"], found["pods"], "what node 0 printed")
    assert "; node 1 ended with exit code 1; " in text
    sentence = "the log of the other node is deleted with its pod, but for what this step printed of node 0"
    assert sentence in text
    assert "the last lines of node 1:\n  | the words of node 1" in text
    assert "what node 0 printed" not in text


def test_a_job_that_restarted_too_often_names_its_last_failure(cluster: FakeCluster) -> None:
    found = recorded("max-restarts")
    text = said(cluster, found["trainjob"], found["pods"])
    assert "reaching max number of restarts" in text
    assert "; node 1 ended with exit code 75; the log of the other node is deleted" in text
    assert "of node 0" not in text, "nothing of it was followed"


def test_without_any_pod_it_is_the_log_that_was_followed(cluster: FakeCluster) -> None:
    found = recorded("exit-1")
    text = said(cluster, found["trainjob"], [], "what node 0 printed")
    assert "the logs of all 2 nodes are deleted with their pods, but for what this step" in text
    assert "the last lines of node 0:\n  | what node 0 printed" in text


def test_a_log_that_cannot_be_read_is_not_replaced_by_another_node_without_a_word(
    cluster: FakeCluster,
) -> None:
    found = recorded("exit-1")
    found["pods"][0]["status"]["containerStatuses"][0]["name"] = "node"
    server = ApiServer(cluster.url, "token-1")
    (pod,) = found["pods"]
    cluster.pods[pod["metadata"]["name"]] = pod
    cluster.logs[pod["metadata"]["name"]] = cluster.folder / "none.log"
    text = str(failure(server, "kubeflow", found["trainjob"], "what node 0 printed"))
    assert "node 1 ended with exit code 1" in text
    assert "the last lines of node 0:\n  | what node 0 printed" in text


CASES: dict[str, tuple[Ends, str, int]] = {
    "an error of its own, and a peer that was killed in the same second": (
        {0: (137, "56", "Error"), 1: (1, "56", "Error")},
        "node 1 (exit code 1) is the likely cause, by exit code and time; node 0 (exit code 137) failed, too",
        1,
    ),
    "an error of its own, told some seconds later than what it did to a peer": (
        {0: (75, "56", "Error"), 1: (1, "58", "Error")},
        "node 1 (exit code 1) is the likely cause, by exit code and time; node 0 (exit code 75) failed, too",
        1,
    ),
    "the kernel killed one for its memory": (
        {0: (143, "56", "Error"), 1: (75, "56", "Error"), 2: (137, "56", "OOMKilled")},
        "node 2 (exit code 137, killed for its memory) is the likely cause, by exit code and time; "
        "node 0 (exit code 143), node 1 (exit code 75) failed, too",
        2,
    ),
    "one was killed, others lost it": (
        {0: (75, "56", "Error"), 1: (137, "56", "Error")},
        "node 1 (exit code 137) is the likely cause, by exit code and time; node 0 (exit code 75) failed, too",
        1,
    ),
    "both with an error of their own, a second apart": (
        {0: (1, "57", "Error"), 1: (2, "56", "Error")},
        "node 1 (exit code 2) is the likely cause, by exit code and time; node 0 (exit code 1) failed, too",
        1,
    ),
    "both with an error of their own in one second": (
        {0: (1, "56", "Error"), 1: (1, "56", "Error")},
        "node 0 (exit code 1), node 1 (exit code 1) failed within the same second: which was first is not known",
        0,
    ),
    "all lost their peers in one second": (
        {0: (75, "56", "Error"), 1: (75, "56", "Error")},
        "node 0 (exit code 75), node 1 (exit code 75) failed within the same second: which was first is not known",
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_of_several_nodes_the_likely_cause_is_named_as_far_as_it_is_known(
    case: str, cluster: FakeCluster
) -> None:
    ends, sentence, rank = CASES[case]
    text = said(cluster, *with_ends(ends))
    assert f"; {sentence}\n" in text
    assert "deleted with" not in text, "the logs of all nodes are there"
    assert f"the last lines of node {rank}:\n  | the words of node {rank}" in text


def test_as_recorded_a_killed_node_and_a_peer_that_failed_at_once(cluster: FakeCluster) -> None:
    found = recorded("137-then-peer-1-at-once")
    text = said(cluster, found["trainjob"], found["pods"])
    assert (
        "; node 1 (exit code 1) is the likely cause, by exit code and time; node 0 (exit code 137) failed, too\n"
        in text
    )
