"""A home that an earlier version, or this one, left is opened: its runs, its cache, and gc."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rekindle.app.runs import all_runs
from rekindle.cli.main import invoke
from tests.homes.make import HOMES, RUNS, arguments
from tests.platforms.local.runs import run

VERSIONS = sorted(path.name for path in HOMES.iterdir() if (path / "runs").is_dir())


@pytest.fixture(params=VERSIONS)
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(HOMES / request.param, tmp_path / "home"))


def test_its_runs_are_listed_shown_and_reported(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["runs", "--json", f"--home={home}"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["run_id"] for row in rows] == [*RUNS][::-1]
    assert invoke(["status", "--json", f"--home={home}"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["run_id"], record["status"]) == ("digits-3", "succeeded")
    assert str(home) in json.dumps(record)
    assert "/home/ada" not in json.dumps({**record, "home": ""})
    assert invoke(["report", "digits-1", f"--home={home}"]) == 0
    assert (home / "runs/digits-1/card.html").is_file()
    capsys.readouterr()
    assert invoke(["logs", "digits-1", "--step", "make", f"--home={home}"]) == 0


def test_its_results_come_from_the_cache_or_a_sentence_says_why_not(home: Path) -> None:
    record = run("chain", home, arguments(home, "abd"))
    assert record.number == len(RUNS) + 1
    for step in record.steps:
        assert step.cached or "changed" in step.reason, step.reason


def test_old_runs_are_removed_from_it(home: Path) -> None:
    words = ["gc", "--keep-runs=1", "--older-than=0d", "--yes", f"--home={home}"]
    assert invoke(words) == 0
    assert [record.run_id for record in all_runs(home)] == ["digits-3"]
    artifacts = {path.name for path in home.glob("artifacts/*/*")}
    text = (home / "runs/digits-3/run.json").read_text()
    assert {path.stem for path in home.glob("cache/*.json")} == {
        step.cache_key for step in all_runs(home)[0].steps
    }
    assert len(artifacts) == 2, "what count made is parameters, which its entry holds"
    assert len([name for name in artifacts if name in text]) == 1, "the output of make"
