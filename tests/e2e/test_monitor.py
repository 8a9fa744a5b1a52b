"""The loop closed: what is asked moves away from what judged the model, the monitor says so, and `watch` retrains and
deploys, for that reason; real servers, requests by HTTP, the command line."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60


def asked(folder, *words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_drift_of_what_is_asked_retrains_what_serves(tmp_path):
    lines = (ROOT / "configs/data/reviews.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    known = [line for line, row in zip(lines, rows, strict=True) if row["month"] < "2026-07"]
    held = [json.loads(line) for line in known[::5]]  # no model sees them
    (tmp_path / "r.jsonl").write_text("\n".join(line for i, line in enumerate(known) if i % 5))
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    config = {
        "extends": str(ROOT / "configs/reviews.yaml"),
        "data": {"source": "r.jsonl"},
        "evaluate": {
            "floor": {"accuracy": 0.34},
            "gate": {"mode": "noninferiority", "margin": 0.3, "max_slice_drop": 0.9},
        },
        "deploy": {"after_promotion": True, "canary": []},
        "monitor": {"labels": "labels.jsonl"},
        "triggers": {"drift": True, "new_rows": 100_000},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    asked(tmp_path, "run", "c.yaml", "--set", "deploy.after_promotion=false")
    asked(tmp_path, "deploy", "c.yaml", "--port", port)
    try:
        _send(port, [{"text": row["text"], "id": row["id"]} for row in held])
        quiet = _monitored(tmp_path, len(held), code=0)
        names = {one["name"] for one in quiet["signals"]}
        assert names == {"length", "unknown", "confidence", "prediction", "accuracy"}
        assert "a run" not in asked(tmp_path, "watch", "c.yaml", "--once")
        # the months after, in a slang that no training text has
        new = [
            {"text": " ".join(word[::-1] for word in row["text"].split()), "id": f"n{row['id']}"}
            for row in rows
            if row["month"] >= "2026-07"
        ]
        _send(port, new)
        alarm = _monitored(tmp_path, len(held) + len(new), code=3)
        assert "unknown" in {one["name"] for one in alarm["signals"] if one["alarm"]}
        said = asked(tmp_path, "watch", "c.yaml", "--once")
        assert "skipped because the data have not changed" in said
        (tmp_path / "r.jsonl").write_text("\n".join(lines))
        said = asked(tmp_path, "watch", "c.yaml", "--once")
        assert "ran because" in said, said
        assert "unknown went from" in said, said
        assert "promoted" in said, said
        status = json.loads(asked(tmp_path, "deploy", "status", "reviews", "--json"))
        assert {v: one["share"] for v, one in status["versions"].items()} == {"1": 0, "2": 100}
        fresh = json.loads(asked(tmp_path, "monitor", "c.yaml", "--json"))
        assert (fresh["version"], fresh["verdict"], fresh["rows"]) == ("2", "too_few", 0)
        assert fresh["left_out"]["of another version"] == len(held) + len(new)
    finally:
        asked(tmp_path, "deploy", "delete", "reviews", "--yes")


def _send(port, instances):
    for at in range(0, len(instances), 50):
        body = {"instances": instances[at : at + 50]}
        httpx.post(f"http://127.0.0.1:{port}/predict", json=body, timeout=60).raise_for_status()


def _monitored(folder, rows, code):
    """The check that sees all the rows that were sent, once they are in the log."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while True:
        words = [sys.executable, "-m", "rekindle.cli.main", "monitor", "c.yaml", "--json"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        found = json.loads(done.stdout)
        if found["rows"] == rows:
            assert done.returncode == code, done.stdout
            return found
        assert found["rows"] < rows, found
        assert time.monotonic() < give_up, found
