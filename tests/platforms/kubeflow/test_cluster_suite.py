"""The suite for real clusters (tests/kubeflow_cluster) passes on the services that tests play, and fails where they
are broken on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.platforms.kubeflow.launching import until
from tests.servers.kubeflow.kubernetes import ADMIN, FakeCluster
from tests.servers.kubeflow.rest import TOKEN, Server, serving
from tests.servers.kubeflow.trainer import Job
from tests.support.kubeconfig import write_kubeconfig
from tests.support.moto import KEYS
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.registry import mlflow as mlflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
# What the services that tests play can do: they do not replace launchers, and know no deadlines of jobs.
ON_FAKES = (
    "test_training.py::test_nodes_that_were_killed_are_replaced",
    "test_training.py::test_a_cancelled_run_leaves_no_job_and_is_resumed",
    "test_training.py::test_a_launcher_whose_container_is_killed_leaves_no_job_behind_its_run",
    "test_obstacles.py",
    "test_rights.py",
    "test_pipelines.py::test_values_on_the_cluster_are_those_of_a_run_here[same-named tuple]",
    "test_pipelines.py::test_values_on_the_cluster_are_those_of_a_run_here[same-loop over structs]",
    "test_pipelines.py::test_values_on_the_cluster_are_those_of_a_run_here[typed-fields_into_texts]",
    "test_pipelines.py::test_values_on_the_cluster_are_those_of_a_run_here[typed-wrong_kinds]",
    "test_pipelines.py::test_values_on_the_cluster_are_those_of_a_run_here[backend-branches]",
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with FakeCluster(tmp_path / "cluster") as cluster:
        played = Server(tmp_path / "workflows", cluster, {"PYTHONPATH": str(ROOT)})
        with serving(played) as url:
            played.url = url
            yield played
            for workflow in played.workflows.values():
                workflow.terminate()


def run_suite(
    server: Server, folder: Path, *tests: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The suite in a process of its own, as `make test-kubeflow` starts it."""
    assert server.cluster is not None
    (token,) = [t for t, user in server.cluster.tokens.items() if user == ADMIN]
    environment = {
        **os.environ,
        "KUBECONFIG": str(write_kubeconfig(folder, server.cluster.url, token)),
        "KFP_TOKEN": TOKEN,
        "KUBEFLOW_HOST": server.url,
        "KUBEFLOW_IMAGE": f"registry.example.com/train@sha256:{'0' * 64}",
        "KUBEFLOW_HOLD_SECONDS": "10",
        "KUBEFLOW_RECORDINGS": str(folder / "recordings"),
        **variables,
    }
    words = [f"tests/kubeflow_cluster/{test}" for test in tests]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_the_suite_passes_on_the_services_that_tests_play(server: Server, tmp_path: Path) -> None:
    done = run_suite(server, tmp_path, *ON_FAKES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout
    recordings = {p.stem: json.loads(p.read_text()) for p in tmp_path.glob("recordings/*.json")}
    cancelled = recordings["a-cancelled-run-leaves-no-job-and-is-resumed-cancelled"]
    assert cancelled["run"]["state_history"][-2:] == [{"state": "CANCELING"}, {"state": "FAILED"}]
    assert cancelled["logs"][0]["body"].count("holds")
    waiting = [r for name, r in recordings.items() if "quota" in name and "recorded" in r]
    assert any("exceeded quota" in event["message"] for r in waiting for event in r["events"])
    assert "registry.example.com" not in json.dumps(recordings)


def test_digits_lose_a_node_and_are_deployed(
    server: Server,
    aws: str,
    s3: Any,
    mlflow: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = {
        "AWS_ENDPOINT_URL": aws,
        "AWS_ACCESS_KEY_ID": KEYS["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": KEYS["aws_secret_access_key"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
    }
    for name, value in store.items():  # for the containers that the cluster plays itself
        monkeypatch.setenv(name, value)
    assert server.cluster is not None
    server.cluster.environment |= store
    server.environment = {**server.environment, **store}
    done = run_suite(
        server,
        tmp_path,
        "test_training.py::test_digits_on_two_nodes_lose_one_resume_and_are_promoted",
        "test_schedules_and_endpoints.py::test_an_endpoint_proves_itself_by_rows_and_is_deleted",
        KUBEFLOW_ARTIFACT_ROOT="s3://lake/suite",
        KUBEFLOW_PIPELINE_ROOT="s3://lake/pipelines",
        KUBEFLOW_TRACKING_URI=mlflow,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_schedule_is_waited_for(server: Server, tmp_path: Path) -> None:
    def start_what_is_due() -> None:
        until(lambda: bool(server.recurring), "a schedule", 240)
        server.start(next(iter(server.recurring)))

    threading.Thread(target=start_what_is_due, daemon=True).start()
    test = "test_schedules_and_endpoints.py::test_a_schedule_starts_a_run_and_is_deleted"
    done = run_suite(server, tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert server.recurring == {}


def test_the_suite_fails_where_a_node_is_not_replaced(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Job.__init__

    def without_restarts(self: Job, *words: object) -> None:
        made(self, *words)  # type: ignore[arg-type]
        self.most_restarts = 0

    monkeypatch.setattr(Job, "__init__", without_restarts)
    done = run_suite(server, tmp_path, ON_FAKES[0])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the TrainJob ended with its node" in done.stdout


def test_the_suite_skips_with_the_reason_without_a_cluster() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KUBEFLOW_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/kubeflow_cluster"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "no cluster: make test-kubeflow" in done.stdout
    assert "passed" not in done.stdout
