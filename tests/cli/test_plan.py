"""`rekindle plan`: what is printed, its JSON, its exit code, and what it does not touch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from rekindle.cli.main import invoke

ROOT = Path(__file__).parents[2]
SEVEN = str(ROOT / "configs" / "plan" / "7b-spot.yaml")
SCHEMA = json.loads((ROOT / "configs" / "schemas" / "planned.json").read_text())


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.glob(".rekindle")) == [], "a plan writes nothing"


def test_a_plan_is_told_in_the_order_in_which_people_ask(capsys):
    assert invoke(["plan", SEVEN]) == 0
    said = capsys.readouterr().out.splitlines()
    words = [line.split()[0] for line in said[1:] if not line.startswith(" ")]
    order = [
        "machines",
        "layout",
        "memory",
        "step",
        "training",
        "on",
        "spot",
        "or",
        "not",
        "advice",
        "if",
        "note",
    ]
    assert list(dict.fromkeys(words)) == order
    assert "1 x p4de.24xlarge (8 x A100-80GB each) in us-east-1, $27.45 an hour" in said[1]
    assert any("candidates weighed" in line for line in said)


def test_the_same_as_json_with_every_rejected_layout(capsys):
    assert invoke(["plan", SEVEN, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    jsonschema.validate(said, SCHEMA)
    assert said["chosen"]["degrees"] == {"dp": 1, "shard": 8, "tp": 1, "pp": 1, "cp": 1}
    assert said["spot"]["usd"][0] < said["on_demand_usd"][1]
    assert len(said["rejected"]) > 40
    assert said["errors"] == []


def test_limits_that_cannot_be_kept_are_exit_code_2(capsys):
    assert invoke(["plan", SEVEN, "--set", "resources.deadline_hours=10", "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["where"] == "resources.deadline_hours"
    assert invoke(["plan", SEVEN, "--set", "resources.budget_usd=100"]) == 2
    assert (
        "refused    training costs about $1,124; resources.budget_usd is $100"
        in capsys.readouterr().out
    )


def test_ones_own_prices_count_and_a_wrong_file_is_named(tmp_path, capsys):
    own = tmp_path / "own.yaml"
    row = "{machine: p4de.24xlarge, region: eu-west-1, on_demand: 1.5, source: a contract, as_of: 2026-11-23}"
    own.write_text(f"prices:\n  - {row}\n")
    assert invoke(["plan", SEVEN, "--prices", str(own), "--region", "eu-west-1"]) == 0
    assert "in eu-west-1, $1.50 an hour" in capsys.readouterr().out
    own.write_text(f"prices:\n  - {row.replace('1.5', '-1')}\n")
    assert invoke(["plan", SEVEN, "--prices", str(own)]) == 2
    assert "own.yaml:2" in capsys.readouterr().err


def test_a_network_of_images_is_refused_by_name(capsys):
    assert invoke(["plan", str(ROOT / "configs" / "digits.yaml")]) == 2
    assert "does not know what the task `image_classification` computes" in capsys.readouterr().err


@pytest.mark.slow
def test_planning_imports_nothing_that_trains():
    code = (
        "import sys; from rekindle.cli.main import invoke; "
        f"assert invoke(['plan', {SEVEN!r}]) == 0; "
        "print([m for m in ('torch', 'transformers', 'kfp', 'mlflow', 'boto3', 'google.auth', 'azure.ai') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
