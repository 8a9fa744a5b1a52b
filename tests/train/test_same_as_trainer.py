"""Joined texts beside the real transformers.Trainer, each a process of its own (tests/bench)."""

import dataclasses
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
