"""`rekindle doctor --platform kubeflow` against the fake cluster: everything that is missing, each
with its fix, and nothing when all is there."""

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from rekindle.ir.compile import compile_function
from rekindle.ir.distribution import Distribution
from rekindle.ir.read.pipeline import read
from rekindle.platforms import reads
from rekindle.platforms.checks import Needs, PlatformCheck, answered, run_checks
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.doctor import checks, image, permissions
from rekindle.platforms.kubeflow.section import KubeflowSpec
from tests.platforms.local.runs import module
from tests.servers.kubeflow.kubernetes import FakeCluster
from tests.servers.kubeflow.rest import TOKEN, Server, serving
from tests.servers.tls_hosts import Answer, Asked, Hosts
from tests.servers.troubles import Fault
from tests.support.kubeconfig import doctor


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.mark.slow
def test_a_cluster_that_has_all_is_ready_and_the_permissions_are_printed(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    done = doctor(cluster.url, tmp_path)
    assert done.returncode == 0, done.stderr
    role, binding, *of_nodes = yaml.safe_load_all(done.stdout)
    kinds = ["ServiceAccount", "Role", "RoleBinding", "Role"]
    assert [document["kind"] for document in of_nodes] == kinds
    assert {tuple(rule["resources"]) for rule in role["rules"]} == {
        ("trainjobs",),
        ("secrets",),
        ("pods",),
        ("pods/log",),
        ("events",),
        ("workflows",),
    }
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "pipeline-runner", "namespace": "kubeflow"}
    ]
    assert "kubeflow is ready" in done.stderr
    assert json.loads(doctor(cluster.url, tmp_path, "--json").stdout)["platform"] == "kubeflow"


@pytest.mark.slow
def test_a_runtime_that_is_missing_is_named_with_its_fix(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    del cluster.runtimes["rekindle"]
    done = doctor(cluster.url, tmp_path, "--json")
    assert done.returncode == 2
    (problem,) = json.loads(done.stdout)["errors"]
    assert problem["what"] == "the cluster has no ClusterTrainingRuntime rekindle"
    assert problem["where"] == "clustertrainingruntime rekindle"
    assert "kubectl apply -f" in problem["fix"]


@pytest.mark.slow
def test_a_cluster_without_the_trainer_is_told_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path / "empty")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:  # to which nothing is known
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        done = doctor(url, tmp_path, "--json")
        server.shutdown()
    assert done.returncode == 2
    by_text = {error["what"]: error for error in json.loads(done.stdout)["errors"]}
    assert any("has no Secret mlpipeline-minio-artifact" in text for text in by_text)
    problem = by_text["the cluster has no Kubeflow Trainer v2"]
    assert problem["where"] == url
    assert problem["fix"].startswith("install Kubeflow Trainer v2.3: kubectl apply")


@pytest.mark.slow
def test_the_config_says_which_account_runtime_and_namespace(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    section = {
        "namespace": "team-a",
        "service_account": "default-editor",
        "runtime": "ours",
        "node_account": "trainers",
    }
    config = {"name": "c", "pipeline": "p.py:p", "platforms": {"kubeflow": section}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    done = doctor(cluster.url, tmp_path, "c.yaml")
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
    assert "the cluster has no ClusterTrainingRuntime ours" in done.stderr
    assert "the cluster has no namespace team-a" in done.stderr
    assert "default-editor may not create trainjobs" in done.stderr
    assert "p.py" in done.stderr, "there is none"


def test_steps_that_deploy_get_the_role_for_it_only_where_the_config_deploys_in_one() -> None:
    place = KubeflowSpec(namespace="team-a", service_account="default-editor")
    bindings = {
        in_steps: [
            (found["roleRef"]["name"], found["subjects"][0]["name"], found["metadata"]["namespace"])
            for found in yaml.safe_load_all(permissions(place, Needs(deploys_in_steps=in_steps)))
            if found["kind"] == "RoleBinding"
        ]
        for in_steps in (False, True)
    }
    assert bindings[True] == [*bindings[False], ("rekindle-deployer", "default-editor", "team-a")]


@pytest.mark.slow
def test_what_one_may_not_ask_is_no_problem(cluster: FakeCluster, tmp_path: Path) -> None:
    done = doctor(cluster.url, tmp_path, token="token-1")
    assert done.returncode == 0, done.stderr
    assert "not asked runtime: the API server refuses with HTTP 403" in done.stderr
    assert "kubeflow is ready, but for 7 that could not be asked" in done.stderr


@pytest.mark.slow
def test_a_login_that_is_over_is_a_problem(cluster: FakeCluster, tmp_path: Path) -> None:
    done = doctor(cluster.url, tmp_path, token="unknown")
    assert done.returncode == 2
    assert "problem   cluster: " in done.stderr
    assert "not asked accounts, retries, rights, runtime, store, quota, mesh: the login failed" in (
        done.stderr
    )


def test_a_server_that_is_away_is_no_problem_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("KFP_TOKEN", TOKEN)
    made = Server()
    made.faults = [Fault("GET healthz", 503), Fault("GET healthz", 503)]
    with serving(made) as url:
        place = KubeflowSpec(host=url, token="env:KFP_TOKEN")
        (found,) = run_checks(checks(place, None, Needs()), early=True)
    assert (found.state, found.said) == ("not asked", "HTTP 503: as the test wants it")


@pytest.mark.parametrize(
    ("server", "config", "state"),
    [
        ("2.17.0", "2.17", "ok"),
        ("2.18.0", "2.17.0", "ok"),
        ("2.16.1", "2.17.0", "problem"),
        ("2.16.1", "2.16.0", "ok"),
        ("unknown", "2.17.0", "ok"),
    ],
)
def test_a_server_that_is_older_than_the_config_says_is_a_problem(
    server: str, config: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_TOKEN", TOKEN)
    made = Server()
    made.version = server
    with serving(made) as url:
        place = KubeflowSpec(host=url, token="env:KFP_TOKEN", version=config)
        (found,) = run_checks(checks(place, None, Needs()), early=True)
    assert found.state == state
    if state == "problem":
        assert found.where == "platforms.kubeflow.version"
        assert found.fix == f"set platforms.kubeflow.version: {server}"


@pytest.mark.parametrize(
    ("nodes", "more"),
    [(1, ["store"]), (2, ["rights", "runtime", "store", "quota", "mesh"])],
)
def test_only_distributed_steps_need_the_trainer(nodes: int, more: list[str]) -> None:
    text = compile_function(module("behaviour").chain)
    graph, place = read(text), KubeflowSpec(artifact_root="/mnt/r", image="train:1")
    if nodes > 1:
        graph = graph.spread(graph.steps()[0].path, Distribution(nodes=nodes))
    made = compile(text, graph, {"folder": "x", "text": "a"}, place)
    names = [question.name for question in checks(place, made, Needs())]
    assert names == ["cluster", "accounts", "retries", *more]


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
        (wanted,) = reads.images([f"registry.example.com/{name}"])
        (found,) = answered([PlatformCheck("image", "", lambda: image(KubeflowSpec(), wanted))])
    assert found.state == state, found
    if state == "ok":
        assert found.said == "open/train 1 is sha256:1234 now; better name that digest"


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_told_so(cluster: FakeCluster, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "none"
    done = subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", "doctor", "--platform", "kubeflow"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
    )
    assert done.returncode == 2
    assert "no cluster is configured" in done.stderr
    assert "kubectl config use-context" in done.stderr
