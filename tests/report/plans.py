"""Runs that were planned, as submissions leave them on record: a language model on eight A100."""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path
from typing import Any

import rekindle
from rekindle.outputs import Planned
from rekindle.records import HistoryRow, RunRecord
from tests.report.homes import Home, began, spec, steps, training

ROOT = Path(__file__).parents[2]
GIB = 2**30
DEVICE = "NVIDIA A100-SXM4-80GB"


@functools.cache
def seven(*overrides: str) -> Planned:
    """The plan of a model with seven billion weights: 31.5 s a step, 23.3 to 42.5, as it was on
    2026-11-23, since what is planned changes with what is learnt; a new one for `overrides`."""
    if not overrides:
        return Planned.read(Path(__file__).with_name("plan-7b.json"))
    return rekindle.planned(ROOT / "configs" / "plan" / "7b-spot.yaml", overrides).record


def rows(
    seconds: float, count: int, *, memory: int = 60 * GIB, mfu: bool = True
) -> list[HistoryRow]:
    """A curve whose first three steps take four times as long."""
    noise = random.Random(1)
    found = []
    for step in range(1, count + 1):
        took = seconds * (4 if step <= 3 else 1) * (1 + noise.gauss(0, 0.01))
        found.append(
            HistoryRow(
                step=step,
                epoch=step / count,
                loss=8.0 / step**0.5,
                lr=1e-4,
                grad_norm=0.4,
                samples_per_second=512 / took,
                tokens_per_second=2**20 / took,
                tokens=2**20,
                step_seconds=took,
                memory_bytes=memory,
                mfu=17.33 / took if mfu else None,
            )
        )
    return found


def planned(
    home: Home,
    run_id: str = "20261123-080000-seven-7b7b",
    *,
    factor: float = 0.96,
    count: int = 60,
    plan: Planned | None = None,
    spot: bool = False,
    **over: Any,
) -> RunRecord:
    """A run whose steps took `factor` times what was expected; `over` replaces fields of its
    training, and `step`, `history` and `run` those of the step, the curve and the record."""
    figures = plan or seven()
    seconds = factor * figures.chosen.step_seconds[1]
    step, history, run = (over.pop(name, {}) for name in ("step", "history", "run"))
    fields = {"layout": "shard 8", "device": DEVICE, "world_size": 8, "global_batch_size": 512}
    summary = training("s3://corpus", "causal_lm", figures.steps or 0, 1_000_000, 6_738_415_616)
    summary = summary.model_copy(update={**fields, **over})
    artifacts = {"finetune": home.artifact(run_id, "finetune", "training", summary)}
    home.history(run_id, rows(seconds, count, **history))
    took = seconds * (figures.steps or 0) + 900
    ran = steps(home, run_id, artifacts, {"shard": 40.0, "finetune": took}, finetune=step)
    resources = {"nodes": 1, "gpus_per_node": 8, "spot": spot}
    fields = {
        "run_id": run_id,
        "name": "seven",
        "status": "succeeded",
        "started_at": began(run_id),
        "seconds": took + 60,
        "config": "configs/plan/7b-spot.yaml",
        "command": "",
        "spec": {**spec("seven", "causal_lm", "s3://corpus"), "resources": resources},
        "steps": ran,
        "plan": figures.model_dump(mode="json"),
    }
    made = RunRecord(platform="sagemaker", versions={"rekindle": "0.1.0"}, **{**fields, **run})
    made.write(home.root / "runs" / run_id / "run.json")
    return made


def build(root: Path) -> dict[str, RunRecord]:
    """One of each outcome, in one home."""
    home, ids = Home(root), "20261123-0{}0000-seven-7b7b".format
    return {
        "inside": planned(home, ids(1)),
        "slower": planned(home, ids(2), factor=2.9, step={"attempts": 3}),
        "faster": planned(home, ids(3), factor=0.3, spot=True),
        "elsewhere": planned(home, ids(4), device="cpu", history={"mfu": False}, layout="dp 8"),
        "older": planned(home, ids(5), device="", layout=""),
        "cached": planned(home, ids(6), step={"cached": True, "seconds": 0.1}),
        "running": planned(home, ids(7), run={"steps": (), "status": "running"}),
    }


if __name__ == "__main__":
    from rekindle.report.card import render_card

    target = Path(sys.argv[1])
    for name, run in build(target).items():
        print(name, render_card(target, run))
