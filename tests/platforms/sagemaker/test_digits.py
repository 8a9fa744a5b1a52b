"""The shipped pipelines on SageMaker, from `submit --wait` to the card: two hosts train, lose their spot machines once,
resume from the artifact root, pass the gate, and the model is registered twice over; and the step that
deploys it has an endpoint answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.cli.main import invoke
from rekindle.records import RunRecord
from rekindle.report.collect import collect
from tests.servers import impatient
from tests.servers.aws import account as aws_account
from tests.servers.aws import hosting
from tests.servers.aws.hosting import Hosting
from tests.servers.aws.rest import Account
from tests.servers.aws.sagemaker import Pipelines
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.otherwise import OTHERWISE, skip_without, words_of
from tests.support.registry import mlflow as mlflow
from tests.support.sagemaker_compile import IMAGE, PLACE
from tests.support.sagemaker_watch import account as account

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]


def objects(service: Pipelines, prefix: str) -> list[str]:
    pages = service.s3.get_paginator("list_objects_v2").paginate(Bucket="lake", Prefix=prefix)
    return [item["Key"] for page in pages for item in page.get("Contents", [])]


def test_two_spot_hosts_train_are_taken_away_resume_and_promote(
    service: Pipelines,
    account: Account,
    mlflow: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {
        **{f"platforms.sagemaker.{name}": value for name, value in PLACE.items()},
        "register.tracking_uri": mlflow,
        "resources.nodes": 2,
        "resources.spot": "true",
        "train.checkpoint": "{every: 40}",
    }
    words = words_of(settings)
    committed = re.compile(r"rekindle/checkpoints/.*manifest\.json")
    service.taken_away["finetune"] = lambda: any(
        committed.fullmatch(key) for key in objects(service, "rekindle/checkpoints/")
    )
    home = ["--home", str(tmp_path / "home")]
    asked = ["submit", str(ROOT / "configs" / "digits.yaml"), "--platform", "sagemaker", "--yes"]
    assert invoke([*asked, "--wait", "--json", *words, *home]) == 0, capsys.readouterr().out
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["gate"]["promoted"]) == ("succeeded", True)
    assert (summary["model"]["name"], summary["model"]["version"]) == ("digits", "1")
    assert summary["metrics"]["accuracy"] > 0.9

    ((run,), (execution,)) = account.runs.values(), [r.execution for r in account.runs.values()]
    assert run.status == "Succeeded"
    trained = execution.jobs["finetune"]
    assert trained.statuses == ["Interrupted", "Completed"]
    resumed = r"resumed from the checkpoint of step \d+ of 600 on 2 ranks"
    assert re.search(resumed, trained.log), trained.log[-4000:]
    assert "network: GLOO_SOCKET_IFNAME=lo" in trained.log
    assert invoke(["logs", "--step", "finetune", *home]) == 0
    assert re.search(rf"\[algo-1\] .*{resumed}", capsys.readouterr().out)
    assert invoke(["runs", "--costs", "--json", *home]) == 0
    (cost,) = json.loads(capsys.readouterr().out)["runs"]
    said = account.describe_training(trained.name)
    seconds, billed = said["TrainingTimeInSeconds"], said["BillableTimeInSeconds"]
    ran = RunRecord.read(tmp_path / "home" / "runs" / summary["run_id"] / "run.json")
    step, kept = ran.step("finetune"), collect(ran, history=False).training.train_seconds
    assert (step.on_demand_seconds, step.billed_seconds) == (seconds, billed)
    assert billed < seconds
    assert 0 < kept < seconds, "two attempts took longer than the steps that the model has"
    assert cost["lost_hours"] == pytest.approx(2 * (seconds - kept) / 3600)
    assert (cost["billed"], cost["interruptions"]) == (["finetune", "score"], 1)
    assert invoke(["status", "--json", *home]) == 0
    record = json.loads(capsys.readouterr().out)
    (step,) = [one for one in record["steps"] if one["name"] == "finetune"]
    assert (step["attempts"], step["reason"]) == (2, "its spot machines were taken away 1 x")
    card = Path(summary["card"]).read_text()
    assert "Champion" in card or "champion" in card
    assert "finetune" in card
    result: dict[str, Any] = execution.result("register", service.s3)
    assert result["parameters"]["promote"] is True
    assert execution.conditions == {"if-condition-1": True}
    code = (
        "import json, sys; from mlflow import MlflowClient; c = MlflowClient(sys.argv[1]);"
        "print(json.dumps(dict(c.get_registered_model('digits').aliases)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, mlflow], capture_output=True, text=True, check=True
    )
    assert json.loads(told.stdout.splitlines()[-1]) == {"champion": "1"}


def test_two_hosts_read_and_encode_the_months_of_a_store(
    service: Pipelines,
    account: Account,
    mlflow: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pieces and shards go through the artifact root; the next window reads one month more."""
    months: dict[str, str] = {}
    for line in (ROOT / "configs" / "data" / "reviews.jsonl").read_text().splitlines():
        month = json.loads(line)["month"]
        months[month] = months.get(month, "") + line + "\n"
    for month, text in months.items():
        service.s3.put_object(Bucket="lake", Key=f"source/{month}.jsonl", Body=text.encode())
    first, second = sorted(months)[-2:]
    settings = {
        **{f"platforms.sagemaker.{name}": value for name, value in PLACE.items()},
        "register.tracking_uri": mlflow,
        "data.source": "s3://lake/source/{window:%Y-%m}.jsonl",
        "data.nodes": 2,
        "data.workers": 1,
        "train.epochs": 1,
        "evaluate.floor": "{accuracy: 0.1}",
    }
    home = ["--home", str(tmp_path / "home")]
    asked = ["submit", str(ROOT / "configs" / "reviews.yaml"), "--platform", "sagemaker", "--yes"]
    told = []
    for end in (first, second):
        settings["data.window"] = f"{{size: 6 months, every: 1 month, end: {end}}}"
        assert invoke([*asked, "--wait", *words_of(settings), *home]) == 0, capsys.readouterr()
        execution = list(account.runs.values())[-1].execution
        log = execution.jobs["ingest"].log
        assert log.count("6 pieces of the source") == 2, log[-3000:]  # each host says so
        told.append(re.findall(r"6 pieces of the source, (\d) of them new", log))
        assert "shards, " in execution.jobs["shard"].log
    assert told == [["6", "6"], ["1", "1"]]
    assert len([key for key in objects(service, "rekindle/pieces/") if "train.arrow" in key]) == 7


@pytest.mark.parametrize("how", OTHERWISE)
def test_two_hosts_train_by_deepspeed_or_under_mpirun_and_promote(
    how: str,
    service: Pipelines,
    account: Account,
    mlflow: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    skip_without(how)
    settings = {
        **{f"platforms.sagemaker.{name}": value for name, value in PLACE.items()},
        "register.tracking_uri": mlflow,
        "register.model_name": f"digits-{how}",
        "resources.nodes": 2,
        **OTHERWISE[how],
    }
    home = ["--home", str(tmp_path / "home")]
    asked = [
        "submit",
        str(ROOT / "configs" / "digits.yaml"),
        "--platform",
        "sagemaker",
        "--yes",
        "--wait",
        "--json",
    ]
    assert invoke([*asked, *words_of(settings), *home]) == 0, capsys.readouterr().out
    summary = json.loads(capsys.readouterr().out)
    assert summary["gate"]["promoted"] is True, summary["gate"] | summary["metrics"]
    assert summary["metrics"]["accuracy"] > 0.9
    (execution,) = [run.execution for run in account.runs.values()]
    log = execution.jobs["finetune"].log
    assert "600 steps from the start on 2 ranks" in log
    assert (", by deepspeed" in log) == (how == "deepspeed")
    card = Path(summary["card"]).read_text()
    assert ("ZeRO stage" in card) == (how == "deepspeed")


def test_what_passes_its_gate_is_deployed_by_the_last_step_and_answers(
    aws: str,
    s3: Any,
    mlflow: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {
        **{f"platforms.sagemaker.{name}": value for name, value in PLACE.items()},
        "register.tracking_uri": mlflow,
        "register.model_name": "digits-deployed",
        "deploy.after_promotion": "true",
    }
    (tmp_path / "jobs").mkdir()
    driver = impatient.installed(tmp_path / "driver")
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_ENDPOINT_URL_S3": aws}
    pipelines = Pipelines(s3, tmp_path / "jobs", {})
    account, around = Hosting(s3, pipelines), aws_account.Facts()
    around.images[IMAGE.partition("/")[2].partition("@")[0]] = [IMAGE.partition("@")[2]]
    services = ("SAGEMAKER", "SAGEMAKER_RUNTIME", "CLOUDWATCH", "CLOUDWATCH_LOGS")
    with hosting.serving(account) as url, aws_account.serving(around) as questions:
        keys |= {f"AWS_ENDPOINT_URL_{service}": url for service in services}
        for name, value in {**keys, "AWS_ENDPOINT_URL": questions}.items():
            monkeypatch.setenv(name, value)
        pipelines.environment = {
            **keys,
            "AWS_ENDPOINT_URL": aws,
            "AWS_DEFAULT_REGION": "us-east-1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{driver}",
        }
        home = ["--home", str(tmp_path / "home")]
        asked = ["submit", str(ROOT / "configs" / "digits.yaml"), "--platform", "sagemaker"]
        words = ["--yes", "--wait", "--json", *words_of(settings), *home]
        assert invoke([*asked, *words]) == 0, capsys.readouterr().out
        assert json.loads(capsys.readouterr().out)["gate"]["promoted"] is True
        (run,) = account.runs.values()
        (job,) = [job for name, job in run.execution.jobs.items() if name.endswith("deploy")]
        states = re.findall(r'"state":"(\w+)"', job.log)
        assert states == ["create", "smoke", "live", "settled"]
        (staged,) = [
            key
            for key in objects(pipelines, "rekindle/deployments/digits-deployed/v1-")
            if key.endswith("evidence.json")
        ]
        evidence = s3.get_object(Bucket="lake", Key=staged)["Body"].read()
        (row, *_) = json.loads(evidence)["smoke"]["rows"]
        import boto3

        answer = boto3.client("sagemaker-runtime", PLACE["region"]).invoke_endpoint(
            EndpointName="digits-deployed",
            ContentType="application/json",
            Body=json.dumps({"instances": [{"image": row["content"]}]}),
        )
        assert json.loads(answer["Body"].read())["predictions"] == [row["answer"]]
        assert answer["InvokedProductionVariant"].startswith("digits-deployed-v1-")
