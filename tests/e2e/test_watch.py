"""Ten months of reviews, watched turn by turn while a client asks, once left alone and once killed at random times: the same
turns, models, champions and deployment, and no request lost."""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml

import rekindle
from rekindle.report.ledger import path_of, turns
from rekindle.serve.messages import VERSION
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]
MONTHS = [f"2026-{month:02}" for month in range(1, 11)]
FIRST = "2026-03"  # that has a champion: it is deployed by hand
TOO_SLOW = "2026-07"  # its answers have to be there within less time than any takes
DECIDED = ["ran", "skipped"] * 5
KILLS = 12  # at least ten come before the last look has ended
SEED = 20261127
RUN_ID = re.compile(r"reviews-\d+-\d+-\w+")
ROOT = Path(__file__).parents[2]
PAUSE_SECONDS = 0.02


class Months:
    """A folder whose config is watched month after month, and a client of what it deploys."""

    def __init__(self, path: Path):
        path.mkdir()
        self.path, self.port = path, free_port()
        self.versions: collections.Counter[str] = collections.Counter()
        self.failed: list[str] = []
        self.over = threading.Event()
        self.client = threading.Thread(target=self._ask)
        config = {
            "extends": str(ROOT / "configs/reviews.yaml"),
            "data": {
                "source": str(ROOT / "configs/data/reviews.jsonl"),
                "window": {"size": "6 months", "every": "1 month"},
            },
            "train": {"checkpoint": {"every": 5}},
            "evaluate": {"floor": {"accuracy": 0.38}},
            "triggers": {"new_rows": 250},
            "deploy": {
                "after_promotion": True,
                "canary": [50],
                "step_minutes": 0,
                "min_requests": 60,
            },
        }
        (path / "c.yaml").write_text(yaml.safe_dump(config))

    def command(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "rekindle.cli.main", *words],
            cwd=self.path,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def look(self, month: str) -> subprocess.Popen[str]:
        words = ["--once", "--now", f"{month}-28", "--set", f"data.window.end={month}"]
        if not self.client.ident:
            words += ["--set", "deploy.after_promotion=false"]
        if month == TOO_SLOW:
            words += ["--set", "deploy.max_p99_ms=1"]
        return self.command("watch", "c.yaml", *words)

    def said(self, process: subprocess.Popen[str], code: int = 0) -> str:
        out, err = process.communicate()
        assert process.returncode == code, out + err
        return out

    def deploy(self) -> None:
        self.said(self.command("deploy", "c.yaml", "--port", str(self.port)))
        self.client.start()

    def _ask(self) -> None:
        lines = (ROOT / "configs/data/reviews.jsonl").read_text().splitlines()
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60) as client:
            for line in itertools.cycle(lines):
                body = {"instances": [{"text": json.loads(line)["text"]}]}
                try:
                    answer = client.post("/predict", json=body).raise_for_status()
                    self.versions[answer.headers[VERSION]] += 1
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                if self.over.wait(PAUSE_SECONDS):
                    return

    def facts(self) -> tuple[object, ...]:
        return self.ended(), self.models(), self.champions(), self.serving()

    def end(self) -> None:
        self.over.set()
        if self.client.ident:
            self.client.join()
        self.command("deploy", "delete", "reviews", "--yes").communicate()

    def ended(self) -> list[tuple[str, ...]]:
        """The turns, each once: a look that was killed behind its line is taken again, and skipped."""
        found: list[tuple[str, ...]] = []
        for one in turns(path_of(self.path / ".rekindle", "reviews")):
            because, outcome = (RUN_ID.sub("RUN", text) for text in (one.because, one.outcome))
            if one.at.startswith(TOO_SLOW):  # a kill may come between the roll back and its record
                assert "rolled back" in outcome
                outcome = ""
            if one.decision == "ran" or one.at not in {at for at, *_ in found}:
                found.append((one.at, one.decision, because, outcome))
        return found

    def models(self) -> list[tuple[str, str]]:
        """Of each run that came to it, the version and the digest of its model."""
        found = {}
        for run in rekindle.runs(self.path / ".rekindle"):
            if run.model:
                made = [one for step in run.record.steps for one in step.artifacts.values()]
                (found[run.model["version"]],) = {
                    one.digest for one in made if one.schema_title == "system.Model"
                }
        return sorted(found.items())

    def champions(self) -> list[tuple[str, ...]]:
        history = rekindle.champion("reviews", self.path / ".rekindle").history
        return [(one.version, one.how) for one in history]

    def serving(self) -> dict[str, int]:
        status = json.loads(self.said(self.command("deploy", "status", "reviews", "--json")))
        return {version: one["share"] for version, one in status["versions"].items()}


@pytest.fixture
def months(tmp_path):
    both = Months(tmp_path / "alone"), Months(tmp_path / "killed")
    yield both
    for each in both:
        each.end()


def test_kills_change_neither_what_is_decided_nor_what_is_learnt_and_served(months):
    alone, killed = months
    seconds = {}  # that a look takes here
    for month in MONTHS:
        began = time.monotonic()
        alone.said(alone.look(month), code=int(month == TOO_SLOW))
        seconds[month] = time.monotonic() - began
        if month == FIRST:
            alone.deploy()
    assert [line[1] for line in alone.ended()] == DECIDED
    assert alone.champions() == [("2", "gate"), ("4", "gate"), ("2", "rollback"), ("5", "gate")]
    assert alone.serving() == {"2": 0, "5": 100}
    expected = alone.facts()
    alone.end()
    chance, kills, left = random.Random(SEED), 0, 0
    planned = collections.Counter(chance.choices(MONTHS, k=KILLS))
    for month in MONTHS:
        left += planned[month]
        while left:
            process = killed.look(month)
            try:
                process.communicate(timeout=chance.uniform(0.3, seconds[month]))
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills, left = kills + 1, left - 1
        else:
            process = killed.look(month)
            process.communicate()
        assert process.returncode in (0, int(month == TOO_SLOW))
        if month == FIRST:
            killed.deploy()
    print(f"{kills} kills; requests: {alone.versions}, {killed.versions}")
    assert kills >= 10
    assert killed.facts() == expected
    for each in months:
        assert not each.failed
        assert set(each.versions) == {"2", "4", "5"}, "of which 4 was the canary that went back"
