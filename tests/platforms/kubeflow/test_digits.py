"""The shipped pipelines on Kubeflow, from `submit --wait` to the card: two nodes of a TrainJob train,
one is taken away, all resume from the artifact root, pass the gate, and the model is registered; and
the step that deploys it has it answer in the cluster."""

from __future__ import annotations

import datetime
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.cli.main import invoke
from rekindle.platforms.checks import Needs
from rekindle.platforms.kubeflow import doctor
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.records import RunRecord
from rekindle.report.collect import collect
from tests.platforms.kubeflow.launching import until
from tests.servers.kubeflow.kubernetes import FakeCluster
from tests.servers.kubeflow.rest import TOKEN, Server, serving
from tests.servers.kubeflow.trainer import Job
from tests.support.kubeconfig import write_kubeconfig
from tests.support.moto import KEYS
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.otherwise import OTHERWISE, skip_without, words_of
from tests.support.registry import mlflow as mlflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def server(aws: str, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An API server with a cluster behind it; the store has what its pods need to say who they
    are."""
    environment = {
        "AWS_ENDPOINT_URL": aws,
        "AWS_ACCESS_KEY_ID": KEYS["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": KEYS["aws_secret_access_key"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    for name, value in {**environment, "KFP_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    with FakeCluster(tmp_path / "cluster") as cluster:
        cluster.environment = environment
        made = Server(tmp_path / "workflows", cluster, environment)
        with serving(made) as url:
            made.url = url
            yield made
            for workflow in made.workflows.values():
                workflow.terminate()


def take_one_away(cluster: FakeCluster, s3: Any) -> None:
    """As soon as a checkpoint is there: SIGTERM to the second node, as of a spot machine."""

    def committed() -> bool:
        listed = s3.list_objects_v2(Bucket="lake", Prefix="kubeflow/checkpoints/")
        return any(item["Key"].endswith("manifest.json") for item in listed.get("Contents", ()))

    until(committed, "a checkpoint", 240)
    (job,) = cluster.jobs.values()
    assert isinstance(job, Job)
    os.kill(job.processes[1].pid, 15)


def place(server: Server, mlflow: str) -> dict[str, Any]:
    return {
        "platforms.kubeflow.host": server.url,
        "platforms.kubeflow.token": "env:KFP_TOKEN",
        "platforms.kubeflow.image": "registry.example.com/train@sha256:" + "0" * 64,
        "platforms.kubeflow.artifact_root": "s3://lake/kubeflow",
        "platforms.kubeflow.pipeline_root": "s3://lake/pipelines",
        "register.tracking_uri": mlflow,
        "resources.nodes": 2,
    }


def seconds_of(task: Any) -> float:
    ends = (datetime.datetime.fromisoformat(task[name]) for name in ("end_time", "start_time"))
    last, first = ends
    return (last - first).total_seconds()


def test_two_nodes_train_lose_one_resume_and_promote(
    server: Server, s3: Any, mlflow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of({**place(server, mlflow), "train.checkpoint": "{every: 40}"})
    home = ["--home", str(tmp_path / "home")]
    cluster = server.cluster
    assert cluster is not None
    taking = threading.Thread(target=take_one_away, args=(cluster, s3), daemon=True)
    taking.start()
    asked = ["submit", str(ROOT / "configs" / "digits.yaml"), "--platform", "kubeflow", "--yes"]
    assert invoke([*asked, "--wait", "--json", *words, *home]) == 0
    taking.join(1)
    assert not taking.is_alive()
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["gate"]["promoted"]) == ("succeeded", True)
    assert (summary["model"]["name"], summary["model"]["version"]) == ("digits", "1")
    assert summary["metrics"]["accuracy"] > 0.9
    assert [job.restarts for job in cluster.jobs.values()] == [1, 0], "of fine-tune and of score"
    assert invoke(["logs", "--step", "finetune", *home]) == 0
    resumed = r"resumed from the checkpoint of step \d+ of 600 on 2 ranks"
    assert re.search(resumed, capsys.readouterr().out)
    assert "finetune" in Path(summary["card"]).read_text()
    assert invoke(["runs", "--costs", "--json", *home]) == 0
    (cost,) = json.loads(capsys.readouterr().out)["runs"]
    ran = RunRecord.read(tmp_path / "home" / "runs" / summary["run_id"] / "run.json")
    ((run,), sent) = server.runs.values(), ran.submission
    assert sent is not None
    machines = {name.rpartition("/")[2]: count for name, (_, count) in sent.machines.items()}
    took = {
        name: seconds_of(one) * machines[name]
        for one in server.shown(run)["run_details"]["task_details"]
        if (name := one["display_name"]) in machines
    }
    assert took["finetune"] > 0
    assert cost["hours"] == pytest.approx(sum(took.values()) / 3600, abs=1e-9)
    trained = collect(ran, history=False).training
    assert trained is not None
    assert trained.train_seconds is not None
    lost = took["finetune"] - 2 * trained.train_seconds
    assert cost["lost_hours"] == pytest.approx(lost / 3600, abs=1e-9)
    assert 0 < lost < took["finetune"]
    assert [line for line in server.refused if "not found" not in line] == []


@pytest.mark.parametrize("how", OTHERWISE)
def test_two_nodes_train_by_deepspeed_or_under_mpirun_and_promote(
    how: str,
    server: Server,
    s3: Any,
    mlflow: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    skip_without(how)
    settings = {**place(server, mlflow), "register.model_name": f"digits-{how}", **OTHERWISE[how]}
    home = ["--home", str(tmp_path / "home")]
    asked = [
        "submit",
        str(ROOT / "configs" / "digits.yaml"),
        "--platform",
        "kubeflow",
        "--yes",
        "--wait",
        "--json",
    ]
    assert invoke([*asked, *words_of(settings), *home]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["gate"]["promoted"] is True, summary["gate"]
    assert summary["metrics"]["accuracy"] > 0.9
    assert invoke(["logs", "--step", "finetune", *home]) == 0
    log = capsys.readouterr().out
    assert "600 steps from the start on 2 ranks" in log
    assert (", by deepspeed" in log) == (how == "deepspeed")
    assert ("ZeRO stage" in Path(summary["card"]).read_text()) == (how == "deepspeed")


def test_what_passes_its_gate_is_deployed_by_the_last_step_and_answers(
    server: Server,
    s3: Any,
    mlflow: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = server.cluster
    assert cluster is not None
    cluster.served.steps_a_look = 5
    cluster.grant(doctor.permissions(KubeflowSpec(), Needs(deploys_in_steps=True)))
    steps = str(write_kubeconfig(tmp_path / "of-steps", cluster.url, "token-1"))
    server.environment |= {"KUBECONFIG": steps}
    mine = str(write_kubeconfig(tmp_path / "mine", cluster.url, "deployer"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", mine)
    settings = {
        **place(server, mlflow),
        "register.model_name": "digits-deployed",
        "resources.nodes": 1,
        "platforms.kubeflow.gateway": "infra/public",
        "deploy.after_promotion": "true",
        "deploy.min_requests": 1,
        "deploy.step_minutes": 0,
    }
    config, home = str(ROOT / "configs" / "digits.yaml"), ["--home", str(tmp_path / "home")]
    words = [config, "--platform", "kubeflow", *words_of(settings), *home]
    assert invoke(["submit", *words, "--yes", "--wait", "--json"]) == 0, capsys.readouterr()
    assert json.loads(capsys.readouterr().out)["gate"]["promoted"] is True
    assert invoke(["logs", "--step", "deploy", *home]) == 0
    states = re.findall(r'"state":"(\w+)"', capsys.readouterr().out)
    assert states == ["create", "smoke", "live", "settled"]
    assert invoke(["deploy", "status", "latest", "--platform", "kubeflow", *home, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["1"].items() >= {"state": "ready", "share": 100, "errors": 0}.items()
    assert found["address"] == "/kubeflow/digits-deployed of the Gateway infra/public"
    (staged,) = s3.list_objects_v2(
        Bucket="lake", Prefix="kubeflow/deployments/digits-deployed/v1-", Delimiter="/"
    )["CommonPrefixes"]
    evidence = s3.get_object(Bucket="lake", Key=f"{staged['Prefix']}evidence.json")["Body"].read()
    (row, *_) = json.loads(evidence)["smoke"]["rows"]
    path = "/api/v1/namespaces/kubeflow/services/http:digits-deployed:80/proxy/predict"
    body = {"instances": [{"image": row["content"]}]}
    answer = ApiServer(cluster.url, "deployer").answer("POST", path, {}, body)
    assert answer["predictions"] == [row["answer"]]
