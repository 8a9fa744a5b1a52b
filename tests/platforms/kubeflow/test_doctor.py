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

from rekindle.platforms import reads
from rekindle.platforms.asking import Question, answered
from rekindle.platforms.kubeflow.doctor import checks
from rekindle.platforms.kubeflow.server import anonymously
from rekindle.spec.places import KubeflowSpec
from tests.servers.kfp_rest import TOKEN, Server, serving
from tests.servers.kubernetes import ACCOUNT, NODES, FakeCluster
from tests.servers.tls_hosts import Answer, Asked, Hosts
from tests.servers.troubles import Fault


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
    role, binding, *of_nodes = yaml.safe_load_all(done.stdout)
    assert [document["kind"] for document in of_nodes] == ["ServiceAccount", "Role", "RoleBinding"]
    assert {tuple(rule["resources"]) for rule in role["rules"]} == {
        ("trainjobs",), ("secrets",), ("pods",), ("pods/log",), ("workflows",),
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
    trainjobs, _, pods, *_ = cluster.rules[ACCOUNT]
    trainjobs["verbs"].remove("delete")
    trainjobs["verbs"].remove("create")
    cluster.rules[ACCOUNT].remove(pods)
    cluster.rules[NODES].clear()
    done = doctor(cluster, tmp_path, "--json")
    assert done.returncode == 2
    problems = json.loads(done.stdout)["errors"]
    assert [problem["what"] for problem in problems] == [
        "the cluster has no ClusterTrainingRuntime rekindle",
        "system:serviceaccount:kubeflow:pipeline-runner may not create, delete trainjobs",
        "system:serviceaccount:kubeflow:pipeline-runner may not get, list pods",
        "system:serviceaccount:kubeflow:rekindle-node may not get workflows",
    ]
    assert all("kubectl apply -f" in problem["fix"] for problem in problems)


def test_the_config_says_which_account_runtime_and_namespace(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    section = {
        "namespace": "team-a", "service_account": "default-editor", "runtime": "ours",
        "node_account": "trainers",
    }  # fmt: skip
    config = {"name": "c", "pipeline": "p.py:p", "platforms": {"kubeflow": section}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    cluster.runtimes["ours"] = {"metadata": {"name": "ours"}, "spec": {"mlPolicy": {"jax": {}}}}
    done = doctor(cluster, tmp_path, "c.yaml")
    assert done.returncode == 2
    documents = list(yaml.safe_load_all(done.stdout))
    assert {document["metadata"]["namespace"] for document in documents} == {"team-a"}
    assert [document["subjects"] for document in documents if "subjects" in document] == [
        [{"kind": "ServiceAccount", "name": name, "namespace": "team-a"}]
        for name in ("default-editor", "trainers")
    ]
    assert [d["metadata"]["name"] for d in documents if d["kind"] == "ServiceAccount"] == [
        "trainers"
    ]
    assert "system:serviceaccount:team-a:trainers may not get workflows" in done.stderr
    assert "its mlPolicy is not torch" in done.stderr
    assert "it has no failurePolicy" in done.stderr
    assert "system:serviceaccount:team-a:default-editor may not" in done.stderr
    assert "10 problems" in done.stderr, "there is no p.py either, and no host"


def test_what_one_may_not_ask_is_no_problem(cluster: FakeCluster, tmp_path: Path) -> None:
    done = doctor(cluster, tmp_path, token="token-1")
    assert done.returncode == 0, done.stderr
    assert "not asked runtime: the API server refuses with HTTP 403" in done.stderr
    assert "kubeflow is ready, but for 7 that could not be asked" in done.stderr


def test_a_login_that_is_over_is_a_problem(cluster: FakeCluster, tmp_path: Path) -> None:
    done = doctor(cluster, tmp_path, token="nobody's")
    assert done.returncode == 2
    assert "problem   cluster: " in done.stderr
    assert "not asked runtime, the account may (6): the login failed" in done.stderr


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, KubeflowSpec]]:
    made = Server()
    monkeypatch.setenv("KFP_TOKEN", TOKEN)
    monkeypatch.setattr(reads, "_PAUSE_SECONDS", 0.0)
    with serving(made) as url:
        yield made, KubeflowSpec(host=url, token="env:KFP_TOKEN")


def test_the_api_is_asked_before_a_submission(server: tuple[Server, KubeflowSpec]) -> None:
    made, place = server
    (found,) = checks(place, None, early=True)
    assert (found.name, found.state, found.said) == ("API", "ok", f"{place.host}, for one user")
    assert made.calls == {"GET healthz": 1, "GET experiments": 1}


WRONG: dict[str, tuple[dict[str, str], int | None, str]] = {
    "a token that is not good": ({"KFP_TOKEN": "old"}, None, "the token is not known there"),
    "a token without rights": ({}, 403, "the token has no right there"),
    "a token that is not set": ({"KFP_TOKEN": ""}, None, "the environment has no `KFP_TOKEN`"),
    "another server": ({}, 404, "is not the API of Kubeflow Pipelines"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_the_api_is_said_with_its_fix(
    case: str, server: tuple[Server, KubeflowSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, status, says = WRONG[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made, place = server
    made.faults = [Fault("GET healthz", status)] if status else []
    (found,) = checks(place, None, early=True)
    assert found.state == "problem"
    assert says in found.said
    assert found.fix


def test_a_server_that_is_away_is_no_problem_of_the_config(
    server: tuple[Server, KubeflowSpec],
) -> None:
    made, place = server
    made.faults = [Fault("GET healthz", 503), Fault("GET healthz", 503)]
    (found,) = checks(place, None, early=True)
    assert (found.state, found.said) == ("not asked", "HTTP 503: as the test wants it")


@pytest.mark.parametrize(
    ("name", "state"),
    [("open/train:1", "ok"), ("open/none:1", "problem"), ("closed/train:1", "not asked")],
)
def test_an_image_is_looked_for_where_a_registry_answers_anybody(
    name: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the token that registries hand out to anybody."""

    def answer(asked: Asked) -> Answer:
        if asked.path == "/token":
            assert asked.query == {"service": "here", "scope": asked.query["scope"]}
            return Answer(200, {"token": "anybody's"})
        if asked.path.startswith("/v2/closed/"):
            return Answer(401, {"errors": [{"code": "UNAUTHORIZED", "message": "log in"}]})
        if asked.headers.get("authorization") != "Bearer anybody's":
            scope = "repository:open/train:pull"
            realm = (
                f'Bearer realm="https://registry.example.com/token",service="here",scope="{scope}"'
            )
            return Answer(401, None, {"WWW-Authenticate": realm})
        if asked.path != "/v2/open/train/manifests/1":
            return Answer(404)
        return Answer(200, None, {"Docker-Content-Digest": "sha256:1234"})

    with Hosts(tmp_path, ("registry.example.com",), answer) as hosts:
        for variable, value in hosts.environment.items():
            monkeypatch.setenv(variable, value)
        wanted = reads.image(f"registry.example.com/{name}")
        assert wanted
        (found,) = answered([Question("image", "", lambda: anonymously(wanted))])
    assert found.state == state, found
    if state == "ok":
        assert found.said == "open/train 1 is sha256:1234 now; better name that digest"


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
