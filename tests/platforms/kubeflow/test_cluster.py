"""Speaking to an API server: certificates, tokens that rotate, and how long one tries."""

import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.errors import StepError
from rekindle.http import Stopped
from rekindle.platforms.kubeflow import cluster as cluster_module
from rekindle.platforms.kubeflow.cluster import ApiServer, Conflict
from tests.servers.kubeflow.kubernetes import ACCOUNT, FakeCluster, Trouble

PODS = "/api/v1/namespaces/kubeflow/pods"


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path / "cluster") as fake:
        fake.start_run("run")
        yield fake


def test_a_token_that_rotates_is_read_anew(fake: FakeCluster) -> None:
    cluster = ApiServer.in_cluster(fake.account, fake.url)
    assert cluster.get(PODS) == {"kind": "List", "items": []}
    fake.tokens = {"token-2": ACCOUNT}
    rotating = threading.Timer(0.3, (fake.account / "token").write_text, ["token-2\n"])
    rotating.start()
    assert cluster.get(PODS) == {"kind": "List", "items": []}


def test_a_token_that_stays_wrong_ends_in_words(fake: FakeCluster) -> None:
    cluster = ApiServer(fake.url, "nonsense", patience_seconds=0.5)
    with pytest.raises(StepError, match="does not answer: HTTP 401: Unauthorized") as caught:
        cluster.get(PODS)
    assert caught.value.problems[0].where == f"GET {fake.url}{PODS}"


def test_patience_ends(fake: FakeCluster) -> None:
    fake.troubles.append(Trouble("pods", times=1_000, status=503))
    began = time.monotonic()
    with pytest.raises(StepError, match="503"):
        ApiServer.in_cluster(fake.account, fake.url, patience_seconds=1.0).get(PODS)
    assert time.monotonic() - began < 10
    assert 2 < len(fake.requests) < 20


def test_waiting_is_interrupted(fake: FakeCluster) -> None:
    fake.troubles.append(Trouble("pods", times=1_000, status=503))
    stopping = threading.Event()
    cluster = ApiServer.in_cluster(fake.account, fake.url, stopping=stopping)
    stopping.set()
    with pytest.raises(Stopped):
        cluster.get(PODS)


def test_what_there_is_already_and_what_is_newer(fake: FakeCluster) -> None:
    admin = ApiServer(fake.url, "admin")
    jobs = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/kubeflow/trainjobs"
    owner = fake.workflows["run"]
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": "a",
            "ownerReferences": [
                {
                    "apiVersion": owner["apiVersion"],
                    "kind": "Workflow",
                    "name": "run",
                    "uid": owner["metadata"]["uid"],
                }
            ],
        },
        "spec": {
            "runtimeRef": {"name": "rekindle"},
            "trainer": {"command": ["sleep"], "args": ["60"], "numNodes": 1, "numProcPerNode": 1},
        },
    }
    made = admin.create(jobs, job)
    with pytest.raises(Conflict):
        admin.create(jobs, job)
    assert admin.delete(f"{jobs}/a", "another") is False
    assert admin.get(f"{jobs}/a") is not None
    assert admin.delete(f"{jobs}/a", made["metadata"]["uid"]) is True
    with pytest.raises(StepError, match=r'unknown field "TrainJob\.spec\.podSpecOverrides"'):
        admin.create(jobs, {**job, "spec": {**job["spec"], "podSpecOverrides": []}})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_the_server_is_who_its_certificate_says(fake: FakeCluster, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    fake.server.socket = context.wrap_socket(fake.server.socket, server_side=True)
    url = fake.url.replace("http://", "https://")
    shutil.copy(certificate, fake.account / "ca.crt")
    assert ApiServer.in_cluster(fake.account, url).get(PODS) == {"kind": "List", "items": []}
    assert ApiServer(url, "admin", certificate.read_text()).get(PODS) is not None
    with pytest.raises(StepError, match="CERTIFICATE_VERIFY_FAILED"):
        ApiServer(url, "admin", patience_seconds=0.5).get(PODS)


def test_a_kubeconfig_that_is_named_goes_before_the_account_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kubectl has it; and an account without a token is none."""
    account = tmp_path / "account"
    account.mkdir()
    monkeypatch.setattr(cluster_module, "ACCOUNT", account)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "users: [{name: u, user: {token: t}}]\n"
        "contexts: [{name: c, context: {cluster: k, user: u}}]\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    assert ApiServer.configured(1.0).server == "http://127.0.0.1:1"
    (account / "token").write_text("of the pod")
    assert ApiServer.configured(1.0).server == "http://127.0.0.1:1"
    monkeypatch.delenv("KUBECONFIG")
    assert ApiServer.configured(1.0).server == cluster_module.IN_CLUSTER
