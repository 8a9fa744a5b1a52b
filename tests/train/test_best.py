"""The model of a training that keeps its best: the weights of the lowest validation loss, whatever interrupted it, and no
longer than patience lasts.

Texts with classes at random: what is learnt of them is learnt by heart, so the validation loss soon rises.
"""

import json
import math
import signal

import psutil
import pytest
import torch

from rekindle.data.manifest import open_shards
from rekindle.records import TrainingSummary
from rekindle.spec.model import TrainSpec
from rekindle.tasks import load_task
from rekindle.train.checkpoint import newest
from rekindle.train.history import read_history
from rekindle.train.loop import Best
from tests.support.train_resume import DISTILBERT, Gang, written

STEPS, PATIENCE = 120, 6
TRAIN = TrainSpec(
    steps=STEPS,
    global_batch_size=16,
    lr=1e-2,
    validate_every=2,
    early_stopping_patience=PATIENCE,
    checkpoint={"every": 5, "keep": 1},
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return written(tmp_path_factory.mktemp("texts"), "text_classification", DISTILBERT)


def gang_in(folder, texts, train=TRAIN):
    return Gang(folder, texts, train=train, task="text_classification", model=DISTILBERT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, texts):
    return gang_in(tmp_path_factory.mktemp("whole"), texts).start().finish()


def kept(**update):
    """The best by `checkpoint.keep_best`, to the last step."""
    checkpoint = TRAIN.checkpoint.model_copy(update={"keep_best": True})
    return TRAIN.model_copy(
        update={"early_stopping_patience": None, "checkpoint": checkpoint, **update}
    )


def curve(gang):
    """The validation losses by step."""
    rows = read_history(gang.folder / f"training-{gang.attempt}" / "history.jsonl")
    return {row.step: row.validation_loss for row in rows if row.validation_loss is not None}


def summary(gang):
    return TrainingSummary.read(gang.folder / f"training-{gang.attempt}" / "training.json")


@pytest.mark.slow
def test_patience_ends_it_and_the_best_weights_are_the_model(whole, texts):
    found, losses = summary(whole), curve(whole)
    best = min(losses, key=losses.get)
    assert (found.best_step, found.planned_steps) == (best, STEPS)
    assert found.steps == best + 2 * PATIENCE < STEPS
    assert list(losses) == list(range(2, found.steps + 1, 2))
    assert found.validation["loss"] == losses[best] < losses[found.steps]
    assert (
        f"stopped early, at step {found.steps} of {STEPS}; the model has the weights of step {best}"
        in whole.said
    )
    assert scored_by_transformers(whole, texts) == pytest.approx(losses[best], rel=1e-4)


def scored_by_transformers(gang, texts):
    from transformers import AutoModelForSequenceClassification

    network = AutoModelForSequenceClassification.from_pretrained(
        gang.folder / f"model-{gang.attempt}"
    ).eval()
    shards = open_shards(texts)
    table = shards.table("validation")
    inputs = load_task("text_classification").collate(table, shards.manifest.settings)
    with torch.no_grad():
        logits = network(**inputs).logits
    return torch.nn.functional.cross_entropy(
        logits, torch.tensor(table["label"].to_pylist())
    ).item()


@pytest.mark.slow
def test_stops_between_a_step_and_its_validation_change_nothing(tmp_path, whole, texts):
    every = kept(validate_every=1, steps=40)
    alone = gang_in(tmp_path / "alone", texts, every).start().finish()
    gang = gang_in(tmp_path / "stopped", texts, every)
    owed = 0
    for step in (3, 9, 14):
        gang.start().until_step(step)
        gang.process.send_signal(signal.SIGTERM)
        gang.finish(75)
        owed += newest(gang.checkpoints, "key").state["validation_loss"] is None
    gang.start().finish()
    assert owed, "no stop came before a validation"
    assert (gang.weights, gang.losses, curve(gang)) == (alone.weights, alone.losses, curve(alone))
    assert summary(gang).best_step == summary(alone).best_step


@pytest.mark.slow
def test_kills_before_and_behind_the_best_change_nothing(tmp_path, whole, texts):
    gang = gang_in(tmp_path, texts)
    for step in (summary(whole).best_step - 2, summary(whole).best_step + 3):
        gang.start().until_step(step)
        workers = gang.workers()
        gang.process.kill()
        psutil.wait_procs(workers, timeout=20)
        gang.process.wait()
    gang.start().finish()
    assert (gang.weights, gang.losses, curve(gang)) == (whole.weights, whole.losses, curve(whole))


@pytest.mark.slow
def test_without_early_stopping_it_goes_to_its_end_and_returns(tmp_path, whole, texts):
    gang = gang_in(tmp_path, texts, kept()).start().finish()
    found = summary(gang)
    assert (found.steps, found.planned_steps) == (STEPS, None)
    assert found.best_step == summary(whole).best_step
    assert gang.weights == whole.weights


@pytest.mark.slow
def test_best_weights_that_are_lost_are_not_replaced_by_others(tmp_path, whole, texts):
    gang = gang_in(tmp_path, texts)
    best = summary(whole).best_step
    gang.start().until_step(best + 2)
    gang.process.send_signal(signal.SIGTERM)
    gang.finish(75)
    for manifest in gang.checkpoints.glob(f"step-{best:09d}.*/manifest.json"):
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "step": best + 1}))
    gang.start().finish(1)
    assert f"the weights of step {best}, the best, are lost" in gang.said
    assert "remove this folder, and train again" in gang.said


@pytest.mark.slow
def test_a_budget_ends_it_with_a_model_and_more_of_it_goes_on_from_there(tmp_path, texts):
    """Of the hours of all attempts: a stop halfway does not set them to zero."""
    steps = 600
    plain = TRAIN.model_copy(
        update={"early_stopping_patience": None, "validate_every": None, "steps": steps}
    )
    alone = gang_in(tmp_path / "alone", texts, plain).start().finish()
    # a quarter of what the machine took just now: it may be four times as fast, or fifteen times as slow
    seconds = newest(alone.checkpoints, "key").state["train_seconds"] / 4
    hours = seconds / 3600
    gang = gang_in(tmp_path / "paid", texts, plain.model_copy(update={"budget_hours": hours}))
    gang.start().until_step(10)
    gang.process.send_signal(signal.SIGTERM)
    gang.finish(75)
    before = newest(gang.checkpoints, "key").state["train_seconds"]
    gang.start().finish()
    found = summary(gang)
    assert before < seconds
    assert 10 < found.steps < steps
    assert (found.planned_steps, found.budget_hours) == (steps, hours)
    assert f"train.budget_hours are spent: it ends at step {found.steps} of {steps}" in gang.said
    assert newest(gang.checkpoints, "key").state["train_seconds"] >= seconds
    assert found.validation["loss"] == curve(gang)[found.steps]
    ended = gang.weights
    gang.start().finish()  # what is spent stays spent
    assert (gang.weights, summary(gang).steps) == (ended, found.steps)
    gang.train = plain
    gang.start().finish()
    assert (gang.weights, gang.losses) == (alone.weights, alone.losses)
    assert (summary(gang).planned_steps, summary(gang).budget_hours) == (None, None)


def test_equals_and_what_is_no_number_are_no_better():
    best = Best()
    heard = [
        best.update(step, loss)
        for step, loss in enumerate([math.nan, 2.0, 2.0, math.inf, 1.0, math.nan], 1)
    ]
    assert heard == [False, True, False, False, True, False]
    assert (best.step, best.loss, best.stale) == (5, 1.0, 1)
