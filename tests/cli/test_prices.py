"""`rekindle prices`: the book as people and programs see it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from rekindle.cli.main import invoke
from rekindle.outputs import Prices


def today() -> datetime.date:
    """Now, and not when this module was imported: tests may run past midnight."""
    return datetime.datetime.now(datetime.UTC).date()


def test_the_book_is_shown_with_its_ages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    ages = {"g5.xlarge": 3, "g6.xlarge": 31}
    rows = [
        f"- {{machine: {name}, region: eu-west-3, on_demand: 2, spot: 1, source: ours, "
        f"as_of: {today() - datetime.timedelta(days=days)}}}"
        for name, days in ages.items()
    ]
    own = tmp_path / "own.yaml"
    own.write_text("prices:\n" + "\n".join(rows))
    assert invoke(["prices", "--region", "eu-west-3", "--prices", str(own)]) == 0
    shown = capsys.readouterr()
    assert [line.split() for line in shown.out.splitlines()] == [
        ["machine", "GPUs", "region", "on", "demand", "$/h", "spot", "$/h", "days", "ago", "note"],
        ["g5.xlarge", "1", "A10G", "eu-west-3", "2.0000", "1.0000", "3"],
        ["g6.xlarge", "1", "L4", "eu-west-3", "2.0000", "1.0000", "31", "old"],
    ]  # fmt: skip
    assert "of more than 30 days ago" in shown.err


def test_a_region_without_prices_is_told_with_those_that_have_some(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["prices", "--region", "eu-nowhere-9"]) == 2
    said = capsys.readouterr()
    assert "no price of these" in said.err
    assert ", eastus, eastus2, " in said.err
    assert not said.out


def test_the_book_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["prices", "--cloud", "aws", "--region", "us-east-1", "--json"]) == 0
    found = {row.machine: row for row in Prices.model_validate_json(capsys.readouterr().out).prices}
    assert {row.cloud for row in found.values()} == {"aws"}
    assert found["ml.p5.48xlarge"].assumed.startswith("spot: 1.15 times")
    assert found["ml.p5.48xlarge"].spot_old
    assert found["p5.48xlarge"].spot_as_of == "2025-08-28"
    assert found["g6.xlarge"].old
    assert not found["g6.xlarge"].spot_old
    assert found["g6.xlarge"].age_days == (today() - datetime.date(2026, 2, 9)).days


def test_a_wrong_file_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "prices:\n  - machine: p5.48xlarge\n    region: us-east-1\n    on_demand: a lot\n"
    )
    assert invoke(["prices", "--prices", str(own), "--json"]) == 2
    errors = json.loads(capsys.readouterr().out)["errors"]
    what = "prices.0.on_demand: should be a valid number, not 'a lot'"
    fix = "write a number: US dollars an hour, `~` where there is no price"
    assert {"code": "E-SPEC", "what": what, "where": f"{own}:4", "fix": fix} in errors
