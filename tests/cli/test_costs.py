"""`rekindle runs --costs`: dollars of runs on platforms, worked out by hand from the prices in the home."""

from __future__ import annotations

import json

import jsonschema
import pytest

from rekindle.records import ArtifactRecord, RunRecord, StepRecord, Submission
from tests.docs.blocks import ROOT
from tests.report.homes import training
from tests.support.cli import rekindle

PRICES = """
prices:
  - {machine: p4d.24xlarge, region: us-east-1, on_demand: 20, spot: 8, source: ours, as_of: 2026-11-01}
  - {machine: ml.p4d.24xlarge, region: us-east-1, on_demand: 30, source: ours, as_of: 2026-11-01}
  - {machine: a2-highgpu-1g, region: us-central1, on_demand: 4, spot: 1, source: ours, as_of: 2026-11-01}
"""


def step(name, hours, **fields):
    return StepRecord(**{"name": name, "status": "succeeded", "seconds": hours * 3600} | fields)


def run(home, run_id, platform, region, started_at, machines, steps, spot=("finetune",)):
    sent = Submission(definition="d", token="t", id="x", machines=machines, spot=spot)
    record = RunRecord(
        run_id=run_id,
        name=run_id[:1],
        platform=platform,
        status="succeeded",
        started_at=started_at,
        spec={"platforms": {platform: {"region": region}}},
        submission=sent,
        steps=tuple(steps),
    )
    record.write(home / "runs" / run_id / "run.json")


@pytest.fixture
def home(tmp_path):
    (tmp_path / "prices.yaml").write_text(PRICES)
    big, small = ("ml.p4d.24xlarge", 2), ("ml.t3.medium", 1)
    kept = training("reviews", "text_classification", 100, 1_000, 10_000)
    (tmp_path / "model").mkdir()
    kept.model_copy(update={"train_seconds": 7200.0}).write(tmp_path / "model" / "training.json")
    model = {"model": ArtifactRecord(uri=str(tmp_path / "model"), metadata={"record": "training"})}
    run(
        tmp_path,
        "a-1",
        "sagemaker",
        "us-east-1",
        "2026-10-30T00:00:00",
        {"finetune": big, "ingest": small},
        [
            step(
                "finetune",
                5.0,
                attempts=3,
                on_demand_seconds=14400,
                billed_seconds=3600,
                artifacts=model,
            ),
            step("ingest", 1.0),
        ],
    )
    run(
        tmp_path,
        "b-1",
        "vertex",
        "us-central1",
        "2026-11-02T00:00:00",
        {"finetune": ("a2-highgpu-1g", 4), "score": ("a2-highgpu-1g", 1)},
        [
            step("finetune", 7.0, attempts=1, machine_seconds=7200),
            step("score", 0.5),
            step("ingest", 9.0, cached=True),
        ],
    )
    run(
        tmp_path,
        "b-2",
        "vertex",
        "us-central1",
        "2026-11-20T00:00:00",
        {"finetune": ("a2-highgpu-1g", 1)},
        [step("finetune", 3.0, status="failed")],
        spot=(),
    )
    here = RunRecord(
        run_id="c", name="c", platform="local", status="failed", started_at="2026-11-21"
    )
    here.write(tmp_path / "runs" / "c" / "run.json")
    return tmp_path


def test_what_was_paid_and_saved_is_right_to_the_cent(home):
    said = json.loads(rekindle("runs", "--costs", "--json", "--home", home).stdout)
    jsonschema.validate(said, json.loads((ROOT / "configs/schemas/costs.json").read_text()))
    newest, middle, oldest = said["runs"]
    # two machines; AWS bills 1 h of 4 h each; a machine without a price is in the hours only
    assert (oldest["hours"], oldest["usd"], oldest["saved_usd"]) == (2 * 4 + 1, 2 * 30, 2 * 3 * 30)
    # its steps took 2 h of the 4 h: the other half of each machine's time, and of the money, is lost
    assert (oldest["lost_hours"], oldest["lost_usd"]) == (2 * 2, 30)
    assert (oldest["billed"], oldest["unpriced"]) == (["finetune"], ["ingest"])
    assert oldest["interruptions"] == 2
    # estimated: 4 machines of 2 h at 1 in place of 4, half an hour at 4
    assert (middle["hours"], middle["usd"], middle["saved_usd"]) == (8.5, 8 + 2, 24)
    assert (newest["usd"], newest["saved_usd"], newest["billed"]) == (12, 0, [])
    assert (middle["lost_usd"], newest["lost_usd"]) == (0, 12), "what failed left nothing"
    november, october = said["months"]
    assert (november["month"], november["runs"], november["usd"]) == ("2026-11", 2, 22)
    assert (october["usd"], october["saved_usd"], october["interruptions"]) == (60, 180, 2)
    only = json.loads(rekindle("runs", "--costs", "--name", "b", "--json", "--home", home).stdout)
    assert [row["run_id"] for row in only["runs"]] == ["b-2", "b-1"]


def test_people_see_runs_then_months_and_what_is_estimated(home):
    lines = rekindle("runs", "--costs", "--home", home).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "run",
        "b-2",
        "b-1",
        "a-1",
        "2026-11,",
        "2026-10,",
    ]
    assert lines[1].endswith("estimated")
    assert "$60.00" in lines[3]
    assert lines[3].endswith("billed seconds, without ingest: no price")
    assert "2026-11, 2 runs" in lines[4]


def test_steps_of_no_machine_and_no_time_cost_nothing_and_stopped_ones_are_lost(tmp_path):
    (tmp_path / "prices.yaml").write_text(PRICES)
    steps = [
        step("condition", 0.1, status="failed"),
        step("finetune", 2.0, billed_seconds=0),
        step("score", 2.0, status="cancelled"),
    ]
    machines = dict.fromkeys(("finetune", "score"), ("ml.p4d.24xlarge", 1))
    run(tmp_path, "a-1", "sagemaker", "us-east-1", "2026-10-30T00:00:00", machines, steps)
    (found,) = json.loads(rekindle("runs", "--costs", "--json", "--home", tmp_path).stdout)["runs"]
    assert (found["hours"], found["usd"]) == (2, 60)
    assert (found["lost_hours"], found["lost_usd"]) == (2, 60)


@pytest.mark.parametrize("words", [["--limit", "1"], ["--status", "failed"], ["--sort", "metric"]])
def test_costs_sum_up_all_runs_and_say_so(home, words):
    done = rekindle("runs", "--costs", *words, "--home", home, check=False)
    assert done.returncode == 2
    assert "--costs sums up all runs" in done.stderr


def test_a_home_without_such_runs_costs_nothing(tmp_path):
    said = rekindle("runs", "--costs", "--home", tmp_path).stdout
    assert said == "no run on a platform is known\n"
