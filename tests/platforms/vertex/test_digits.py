"""The shipped pipelines on Vertex AI, from `submit --wait` to the card: two nodes train, lose a spot
machine, resume from the artifact root, pass the gate, and the model is registered; and the step that
deploys it has an endpoint answer."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.aiplatform_v1", reason="the service's protos are a developer's")

import google.auth
from google.auth.transport.requests import AuthorizedSession

from rekindle.cli.main import invoke
from rekindle.records import Evidence, RunRecord
from rekindle.report.collect import collect
from tests.platforms.vertex.conftest import can_mount
from tests.platforms.vertex.project import found as found_by
from tests.platforms.vertex.project import project as project
from tests.servers import impatient
from tests.servers.google.endpoints import Endpoints
from tests.servers.google.gcs_driver import installed
from tests.servers.google.pipeline import Pipelines
from tests.servers.google.rest import PARENT, PROJECT, REGION, Project
from tests.servers.google.vertex import ROOT, Vertex
from tests.support.registry import mlflow as mlflow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_mount(), reason="this machine lets us mount no /gcs"),
]
PLACE = {
    "project": PROJECT,
    "region": REGION,
    "artifact_root": "gs://lake/rekindle",
    "service_account": f"steps@{PROJECT}.iam.gserviceaccount.com",
    "image": "europe-docker.pkg.dev/forge/r/train@sha256:" + "0" * 64,
}

SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]


class Service(Vertex):
    """With a driver for gs:// in the image."""

    def environment(self) -> dict[str, str]:
        found = super().environment()
        driver = str(self.folder.parent / "driver")
        return {**found, "PYTHONPATH": f"{ROOT}:{driver}", "OMP_NUM_THREADS": "1"}


def take_a_machine(service: Vertex, over: threading.Event) -> None:
    """As soon as there is a checkpoint."""
    checkpoints = service.folder / "lake" / "rekindle" / "checkpoints"
    while not over.wait(0.02):
        if any(checkpoints.rglob("manifest.json")):
            next(iter(service.jobs.values())).take_away(1)
            return


PRICES = f"""
prices:
  - {{machine: e2-standard-4, region: {PLACE["region"]}, on_demand: 10, spot: 2, source: ours, as_of: 2026-11-01}}
"""


def test_two_spot_nodes_train_lose_a_machine_resume_and_promote(
    project: Project, mlflow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(tmp_path / "driver")
    (tmp_path / "gcs" / "lake").mkdir(parents=True)
    settings = {
        **{f"platforms.vertex.{name}": value for name, value in PLACE.items()},
        "register.tracking_uri": mlflow,
        "resources.nodes": 2,
        "resources.spot": "true",
        "train.checkpoint": "{every: 40}",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    home = ["--home", str(tmp_path / "home")]
    asked = ["submit", str(ROOT / "configs" / "digits.yaml"), "--platform", "vertex", "--yes"]
    with Service(tmp_path / "gcs") as service:
        Pipelines(project, service, {"REKINDLE_POLL_SECONDS": "0.2"})
        over = threading.Event()
        threading.Thread(target=take_a_machine, args=(service, over), daemon=True).start()
        code = invoke([*asked, "--wait", "--json", *words, *home])
        over.set()
        printed = capsys.readouterr()
        lines = [entry["textPayload"] for entry in project.entries + project.more_entries()]
        assert code == 0, f"{printed}\n{''.join(lines)[-8_000:]}"
        summary = json.loads(printed.out)
        assert (summary["status"], summary["gate"]["promoted"]) == ("succeeded", True)
        assert (summary["model"]["name"], summary["model"]["version"]) == ("digits", "1")
        assert summary["metrics"]["accuracy"] > 0.9
        states = [job.state for job in service.jobs.values()]
        assert states == ["FAILED", "SUCCEEDED", "SUCCEEDED"], "the fine-tune twice, and score"

        assert invoke(["logs", "--step", "finetune", *home]) == 0
        told = capsys.readouterr().out
        assert re.search(r"^attempt 2 is \d+$", told, re.MULTILINE)
        resumed = r"resumed from the checkpoint of step \d+ of 600 on 2 ranks"
        assert re.search(rf"^\[node 0\] .*{resumed}", told, re.MULTILINE), told[-4000:]
        assert invoke(["status", "--json", *home]) == 0
        record = json.loads(capsys.readouterr().out)
        assert {step["name"]: step["status"] for step in record["steps"]} == dict.fromkeys(
            (
                "fingerprint",
                "ingest",
                "shard",
                "finetune",
                "score",
                "evaluate",
                "register",
                "condition-1/promote",
            ),
            "succeeded",
        )
        (trained,) = (step for step in record["steps"] if step["name"] == "finetune")
        lost = "lost its spot machines or failed 1 x before"
        assert (trained["attempts"], trained["reason"]) == (2, lost)
        protos = [job.proto for job in service.jobs.values()]
        first, second, score = ((p.end_time - p.start_time).total_seconds() for p in protos)
        assert trained["machine_seconds"] == pytest.approx(first + second)
        ran = RunRecord.read(tmp_path / "home" / "runs" / summary["run_id"] / "run.json")
        kept = collect(ran, history=False).training.train_seconds
        assert 0 < kept < first + second
        (tmp_path / "home" / "prices.yaml").write_text(PRICES)
        assert invoke(["runs", "--costs", "--json", *home]) == 0
        (cost,) = json.loads(capsys.readouterr().out)["runs"]
        # of two machines each, at 2 dollars an hour in place of 10; other steps name no machine
        assert cost["lost_usd"] == pytest.approx(2 * (first + second - kept) * 2 / 3600, abs=0.005)
        paid = 2 * (first + second + score) * 2 / 3600
        assert cost["usd"] == pytest.approx(paid, abs=0.005)
        assert (cost["interruptions"], cost["saved_usd"]) == (1, pytest.approx(4 * paid, abs=0.005))
        assert "finetune" in Path(summary["card"]).read_text()
        assert project.refused == []


def test_what_passes_its_gate_is_deployed_by_the_last_step_and_answers(
    mlflow: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    impatient.installed(installed(tmp_path / "driver"))
    (tmp_path / "gcs" / "lake").mkdir(parents=True)
    settings = {
        **{f"platforms.vertex.{name}": value for name, value in PLACE.items()},
        "register.tracking_uri": mlflow,
        "register.model_name": "digits-deployed",
        "deploy.after_promotion": "true",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    home = ["--home", str(tmp_path / "home")]
    asked = ["submit", str(ROOT / "configs" / "digits.yaml"), "--platform", "vertex", "--yes"]
    project = Endpoints(tmp_path / "gcs")
    with Service(tmp_path / "gcs") as service, found_by(project, tmp_path, monkeypatch) as how:
        Pipelines(project, service, how)
        code = invoke([*asked, "--wait", "--json", *words, *home])
        printed = capsys.readouterr()
        lines = [entry["textPayload"] for entry in project.entries + project.more_entries()]
        assert code == 0, f"{printed}\n{''.join(lines)[-8_000:]}"
        assert json.loads(printed.out)["gate"]["promoted"] is True
        assert invoke(["logs", "--step", "condition-1/deploy", *home]) == 0
        states = re.findall(r'"state":"(\w+)"', capsys.readouterr().out)
        assert states == ["create", "smoke", "live", "settled"]
        (evidence,) = (tmp_path / "gcs/lake/rekindle/deployments/digits-deployed").glob("v1-*/e*")
        (row, *_) = Evidence.read(evidence).smoke.rows
        client = AuthorizedSession(google.auth.default(scopes=SCOPES)[0])
        url = f"https://{REGION}-aiplatform.googleapis.com/v1/{PARENT}/endpoints/digits-deployed"
        answer = client.post(f"{url}:predict", json={"instances": [{"image": row.content}]}).json()
        assert answer["predictions"] == [row.answer]
        assert answer["deployedModelId"].startswith("1")
