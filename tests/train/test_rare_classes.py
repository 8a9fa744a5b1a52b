"""Rare classes: weights in the loss, and sampling that draws every class equally often.

Classes that nothing in a text tells apart: what a network learns of them is how often they are, as training shows it.
"""

import dataclasses
import random

import numpy as np
import pytest
import torch

from rekindle.data.manifest import open_shards
from rekindle.errors import RequestError
from rekindle.spec.model import TrainSpec
from rekindle.tasks import load_task
from rekindle.train.finetune import finetune
from rekindle.train.history import read_history
from rekindle.train.job import Job
from rekindle.train.teacher import class_weights
from tests.support.train_resume import DISTILBERT, Gang, sharded

TASK = "text_classification"
TRAIN = TrainSpec(steps=60, global_batch_size=16, lr=2e-3, checkpoint={"every": None})


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """600 texts, every tenth of them `rare`."""
    folder = tmp_path_factory.mktemp("rare")
    made = random.Random(0)
    rows = [
        {
            "text": " ".join(made.choices(["to", "be", "or", "not"], k=8)),
            "label": "rare" if n % 10 == 0 else "usual",
        }
        for n in range(600)
    ]
    return sharded(folder, rows, TASK, DISTILBERT)


def trained(folder, shards, ranks=1, **update):
    gang = Gang(folder, shards, ranks, TRAIN.model_copy(update=update), TASK, DISTILBERT)
    gang.start().finish()
    return gang


def share_of_rare(gang, shards):
    """The mean probability that the model gives to `rare`."""
    from transformers import AutoModelForSequenceClassification

    network = AutoModelForSequenceClassification.from_pretrained(gang.folder / "model-1").eval()
    opened = open_shards(shards)
    inputs = load_task(TASK).collate(opened.table("validation"), opened.manifest.settings)
    with torch.no_grad():
        shares = network(**inputs).logits.softmax(-1).mean(0)
    return shares[list(opened.manifest.labels).index("rare")].item()


@pytest.mark.slow
def test_a_class_counts_what_its_weight_says(tmp_path, shards):
    assert share_of_rare(trained(tmp_path / "natural", shards), shards) < 0.2
    weighed = trained(tmp_path / "weighed", shards, class_weights="balanced")
    assert 0.35 < share_of_rare(weighed, shards) < 0.65


@pytest.mark.slow
def test_drawn_equally_often_it_is_expected_equally_often(tmp_path, shards):
    drawn = trained(tmp_path, shards, sampling="balanced")
    assert 0.35 < share_of_rare(drawn, shards) < 0.65


@pytest.mark.slow
def test_weights_count_the_same_on_one_rank_and_on_two(tmp_path, shards):
    weights = {"class_weights": {"rare": 5.0}, "sampling": "balanced"}
    runs = [trained(tmp_path / str(ranks), shards, ranks, **weights) for ranks in (1, 2)]
    curves = [
        [row.loss for row in read_history(run.folder / "training-1" / "history.jsonl")]
        for run in runs
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


def job(tmp_path, wanted):
    train = TRAIN.model_copy(update={"class_weights": wanted})
    fields = {"task": TASK, "shards": "", "output": "", "history": "", "init": "", "init_from": ""}
    return Job.of(
        artifact_root=str(tmp_path), run_key="key", model=DISTILBERT, train=train, **fields
    )


def test_balanced_weights_are_those_of_scikit_learn(tmp_path, shards):
    from sklearn.utils.class_weight import compute_class_weight

    opened = open_shards(shards)
    labels = np.array(opened.table("train")["label"].to_pylist())
    found = class_weights(job(tmp_path, "balanced"), opened, torch.device("cpu"))
    assert found.tolist() == pytest.approx(
        compute_class_weight("balanced", classes=np.unique(labels), y=labels)
    )


def test_classes_that_are_not_named_count_one_and_unknown_ones_are_refused(tmp_path, shards):
    opened = open_shards(shards)
    found = class_weights(job(tmp_path, {"usual": 0.5}), opened, torch.device("cpu"))
    assert dict(zip(opened.manifest.labels, found.tolist(), strict=True)) == {
        "rare": 1.0,
        "usual": 0.5,
    }
    wrong = dataclasses.replace(job(tmp_path, {"frequent": 2.0}), shards=str(shards))
    with pytest.raises(RequestError, match=r"no class `frequent`\n.*\n.*one of rare, usual"):
        finetune(wrong)
    assert not list(tmp_path.iterdir()), "no rank was started"
