"""`rekindle doctor --platform kubeflow` against the fake cluster: everything that is missing, each
with its fix, and nothing when all is there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.servers.kubernetes import FakeCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path / "cluster") as cluster:
        yield cluster


def doctor(
    cluster: FakeCluster, folder: Path, *words: str, token: str = "admin"
) -> subprocess.CompletedProcess[str]:
    """The verb in a process of its own, with a kubeconfig that leads to the cluster."""
    kubeconfig = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    return subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", "doctor", "--platform", "kubeflow", *words],
        cwd=folder, capture_output=True, text=True,
        env={**os.environ, "KUBECONFIG": str(folder / "kubeconfig")},
    )  # fmt: skip


def test_a_cluster_that_has_all_is_ready_and_the_permissions_are_printed(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    done = doctor(cluster, tmp_path)
    assert done.returncode == 0, done.stderr
    role, binding = yaml.safe_load_all(done.stdout)
    assert {tuple(rule["resources"]) for rule in role["rules"]} == {
        ("trainjobs",), ("pods",), ("pods/log",), ("workflows",),
    }  # fmt: skip
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "pipeline-runner", "namespace": "kubeflow"}
    ]
    assert "kubeflow is ready" in done.stderr
    assert json.loads(doctor(cluster, tmp_path, "--json").stdout)["platform"] == "kubeflow"


def test_everything_that_is_missing_is_named_with_its_fix(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    del cluster.runtimes["rekindle"]
    trainjobs, pods, *_ = cluster.rules
    trainjobs["verbs"].remove("delete")
    trainjobs["verbs"].remove("create")
    cluster.rules.remove(pods)
    done = doctor(cluster, tmp_path, "--json")
    assert done.returncode == 2
    problems = json.loads(done.stdout)["errors"]
    assert [problem["what"] for problem in problems] == [
        "the cluster has no ClusterTrainingRuntime rekindle",
        "system:serviceaccount:kubeflow:pipeline-runner may not create, delete trainjobs",
        "system:serviceaccount:kubeflow:pipeline-runner may not get, list pods",
    ]
    assert all("kubectl apply -f" in problem["fix"] for problem in problems)


def test_the_config_says_which_account_runtime_and_namespace(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    section = {"namespace": "team-a", "service_account": "default-editor", "runtime": "ours"}
    config = {"name": "c", "pipeline": "p.py:p", "platforms": {"kubeflow": section}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    cluster.runtimes["ours"] = {"metadata": {"name": "ours"}, "spec": {"mlPolicy": {"jax": {}}}}
    done = doctor(cluster, tmp_path, "c.yaml")
    assert done.returncode == 2
    role, binding = yaml.safe_load_all(done.stdout)
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "team-a"
    assert binding["subjects"][0] == {
        "kind": "ServiceAccount", "name": "default-editor", "namespace": "team-a",
    }  # fmt: skip
    assert "its mlPolicy is not torch" in done.stderr
    assert "it has no failurePolicy" in done.stderr
    assert "system:serviceaccount:team-a:default-editor may not" in done.stderr
    assert "7 problems" in done.stderr, "there is no p.py either"


def test_who_may_not_ask_is_told_so(cluster: FakeCluster, tmp_path: Path) -> None:
    done = doctor(cluster, tmp_path, token="token-1")
    assert done.returncode == 2
    assert "refuses with 403" in done.stderr


def test_a_cluster_that_is_not_there_is_told_so(cluster: FakeCluster, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "none"
    done = subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", "doctor", "--platform", "kubeflow"],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "no cluster is configured" in done.stderr
    assert "kubectl config use-context" in done.stderr
