"""Joined texts beside the real transformers.Trainer, each a process of its own (tests/bench)."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_leaves_the_held_out_loss_that_trainer_leaves_after_the_same_batches(
    tmp_path, monkeypatch
):
    """Without dropout, whose draws differ; Trainer with its own defaults, texts padded."""
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_train
    import work

    given = dataclasses.replace(work.reviews(tmp_path, **bench_train.STILL), threads=1)
    steps = 24
    before = given.held_out(given.start(0))
    ours = bench_train.ours(given, tmp_path, 1, 0, steps=steps, epochs=None)
    theirs = bench_train.theirs(given, tmp_path, "trainer", 0, sampling="our_batches", steps=steps)
    assert ours["steps"] == theirs["steps"] == steps
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert abs(ours["loss"] - before) > 1e-2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_equal_masks_of_dropout_it_is_the_training_that_trainer_makes(tmp_path, monkeypatch):
    """Same batches, and each element of a text dropped in both or in neither (same_masks.py)."""
    monkeypatch.syspath_prepend(str(BENCH))
    import contest
    import work

    given = dataclasses.replace(work.reviews(tmp_path), threads=1)
    steps, script = 24, Path(__file__).with_name("same_masks.py")

    def trained(who: str, wish: Path) -> float:
        done = subprocess.run(
            [sys.executable, str(script), who, str(wish)],
            capture_output=True,
            text=True,
            env=contest.environment(**contest.alone()) if who == "ours" else contest.environment(),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return given.held_out(wish.parent / "model")

    ours = contest.fresh(tmp_path / "ours")
    given.job(0, ours, steps=steps, epochs=None).write(ours / "job.json")
    theirs = contest.fresh(tmp_path / "theirs")
    wish = {
        "loop": "trainer",
        "shards": str(given.shards),
        "start": str(given.start(0)),
        "output": str(theirs),
        "seed": 0,
        "sampling": "our_batches",
        "packed": False,
        "tokens": False,
        "ranks": 1,
        "lr": given.train.lr,
        "epochs": 1,
        "steps": steps,
        "batch_size": given.train.global_batch_size,
        "pad_token_id": given.opened().manifest.settings["pad_token_id"],
    }
    (theirs / "wish.json").write_text(json.dumps(wish))
    before = given.held_out(given.start(0))
    loss = trained("ours", ours / "job.json")
    assert loss == pytest.approx(trained("theirs", theirs / "wish.json"), rel=1e-5)
    assert abs(loss - before) > 1e-2
