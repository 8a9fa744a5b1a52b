"""Months of reviews, watched turn by turn, once left alone and once killed at random times: the same turns, the same
models."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rekindle
from rekindle.report.ledger import path_of, turns

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MONTHS = ("2026-03", "2026-04", "2026-05", "2026-05", "2026-06")
KILLS = 10
SEED = 20261127
RUN_ID = re.compile(r"reviews-\d+-\d+-\w+")
ROOT = Path(__file__).parents[2]


def look(folder: Path, month: str) -> subprocess.Popen[str]:
    words = [
        sys.executable,
        "-m",
        "rekindle.cli.main",
        "watch",
        "c.yaml",
        "--once",
        "--now",
        f"{month}-28",
    ]
    return subprocess.Popen(
        [*words, "--set", f"data.window.end={month}"], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def folder(path: Path) -> Path:
    path.mkdir()
    config = {
        "extends": str(ROOT / "configs/reviews.yaml"),
        "data": {"source": str(ROOT / "configs/data/reviews.jsonl"), "window": {"size": "6 months", "every": "1 month"}},
        "train": {"checkpoint": {"every": 5}},
        "evaluate": {"floor": {"accuracy": 0.4}},
        "triggers": {"new_rows": 250, "cooldown": "20 days", "every": "6 months"},
    }  # fmt: skip
    (path / "c.yaml").write_text(yaml.safe_dump(config))
    return path


def ended(path: Path) -> list[tuple[str, ...]]:
    return [
        (one.at, one.decision, *(RUN_ID.sub("RUN", text) for text in (one.because, one.outcome)))
        for one in turns(path_of(path / ".rekindle", "reviews"))
    ]


def models(path: Path) -> list[tuple[str, str]]:
    """Of each run that was judged, the version and the digest of its model."""
    found = {}
    for run in rekindle.runs(path / ".rekindle"):
        if run.gate:
            made = [one for step in run.record.steps for one in step.artifacts.values()]
            (found[run.model["version"]],) = {
                one.digest for one in made if one.schema_title == "system.Model"
            }
    return sorted(found.items())


def test_kills_change_neither_what_is_decided_nor_what_is_learnt(tmp_path):
    alone, killed = folder(tmp_path / "alone"), folder(tmp_path / "killed")
    for month in MONTHS:
        process = look(alone, month)
        said, _ = process.communicate()
        assert process.returncode == 0, said
    assert [line[1] for line in ended(alone)] == ["ran", "skipped", "ran", "skipped", "skipped"]
    chance, kills = random.Random(SEED), 0
    for month in MONTHS:
        while True:
            process = look(killed, month)
            try:
                said, _ = process.communicate(
                    timeout=chance.uniform(0.5, 25) if kills < KILLS else None
                )
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
                continue
            assert process.returncode == 0, said
            break
    assert kills == KILLS
    assert models(killed) == models(alone)
    assert ended(killed) == ended(alone)
