"""Text from scratch on the shipped reviews: better than chance, slices in the card, a version a window, a person's approval."""

import json
import re
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "configs" / "reviews.yaml"
MANUAL = """
name: manual
task: image_classification
data: {source: "sklearn:digits"}
train: {epochs: 1}
register: {approval: manual}
platforms: {local: {ranks: 1}}
"""
WAITS = re.compile("approval needed|Waiting for approval")  # a card shows `approval: manual`, too
QUICK = [
    "--set",
    "train.epochs=1",
    "--set",
    "evaluate.floor={}",
    "--set",
    "platforms.local.ranks=1",
]


@pytest.mark.slow
def test_a_person_approves_what_the_gate_let_pass(cli, registry):
    """A first model passes and waits; evidence that was changed meanwhile cannot be approved."""
    (cli.folder / "manual.yaml").write_text(MANUAL)
    waiting = cli.json("run", "manual.yaml", "--home", "manual")
    assert waiting["gate"]["decision"] == "approval_needed"
    assert waiting["gate"]["promoted"] is False
    pages = [Path(waiting["card"]), cli.folder / "manual" / "index.html"]
    assert all(WAITS.search(page.read_text()) for page in pages)
    assert registry("manual", "manual")["aliases"] == {"challenger": "1"}
    (evidence,) = Path(cli.folder / "manual").rglob("artifacts/*evaluate*/*/evidence")
    original = evidence.read_text()
    evidence.write_text(json.dumps({**json.loads(original), "metrics": {"accuracy": 1.0}}))
    refused = cli("promote", "latest", "--home", "manual", code=1)
    assert "the evidence was changed after it was registered" in refused.stderr
    assert registry("manual", "manual")["aliases"] == {"challenger": "1"}
    evidence.write_text(original)
    assert "is now the champion" in cli("promote", "latest", "--home", "manual").stdout
    assert registry("manual", "manual")["aliases"] == {"champion": "1"}
    (run,) = cli.json("runs", "--home", "manual")["runs"]
    assert run["gate"]["decision"] == "promoted"
    assert not [page for page in pages if WAITS.search(page.read_text())]
    twice = cli("promote", "latest", "--home", "manual").stdout
    assert "version 1 is already the champion; nothing changed" in twice
    again = cli.json("run", "manual.yaml", "--set", "register.approval=auto", "--home", "manual")
    ran = [s["name"] for s in again["steps"] if s["status"] == "succeeded" and not s["cached"]]
    assert not {"ingest", "shard", "finetune"} & {*ran}, "who approves is no reason to train"


@pytest.mark.slow
def test_reviews_from_scratch_beat_chance_by_ten_points(cli):
    result = cli.json("run", CONFIG, "--home", "whole")
    assert result["metrics"]["accuracy"] >= 1 / 3 + 0.1
    card = Path(result["card"]).read_text()
    assert "electric kettle" in card
    assert "category" in card


@pytest.mark.slow
def test_windows_roll_over_the_months_and_make_a_version_each(cli, registry):
    window = "data.window={size: 4 months, every: 2 months, end: 2026-08, backfill: 2}"
    result = cli.json("run", CONFIG, *QUICK, "--set", window, "--home", "windows")
    assert len(result["earlier"]) == 2
    now = registry("reviews", "windows")
    assert now["versions"] == ["1", "2", "3"]
    windows = [now["tags"][v]["rekindle.window"] for v in now["versions"]]
    assert windows == [
        "2026-01-01T00:00:00/2026-05-01T00:00:00",
        "2026-03-01T00:00:00/2026-07-01T00:00:00",
        "2026-05-01T00:00:00/2026-09-01T00:00:00",
    ]
    again = cli.json("run", CONFIG, *QUICK, "--set", window, "--home", "windows")
    assert registry("reviews", "windows")["versions"] == ["1", "2", "3"]
    assert again["model"]["created"] is False
