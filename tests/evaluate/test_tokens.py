"""A language model's held-out scores, against transformers' own loss, and its judgement end to end."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from rekindle.data.examples import open_examples
from rekindle.evaluate import tokens
from rekindle.evaluate.evaluate import evaluate
from rekindle.registry.signature import log_model
from rekindle.spec.model import EvaluateSpec
from rekindle.tasks import load_task
from rekindle.train.modelfolder import describe, open_model
from tests.data.dialogues import FORMS, model, sharded, source

SLICES = {"slices": ["topic"], "split": {"train": 0.4, "validation": 0.1, "test": 0.5}}
SPEC = EvaluateSpec.model_validate({"gate": {"resamples": 200, "min_slice_size": 5}})


def saved(folder, form="chat", seed=0, vocab_size=400, change=lambda network: None, **fields):
    """Examples, shards and an untrained model of them; the model's folder."""
    data = source(folder, form, **{**SLICES, **fields})
    shards = sharded(folder, data, model(vocab_size))
    task = load_task("causal_lm")
    torch.manual_seed(seed)
    network = task.build(model(vocab_size), (), shards.manifest.settings, shards.assets)
    with torch.no_grad():
        change(network)
    task.save(network, folder / "model", (), shards.manifest.settings)
    describe("causal_lm", shards, folder / "model", f"key{seed}")
    return folder / "model"


def one_by_one(folder, rows):
    """Loss, right predictions and targets of each text, by transformers' forward pass alone."""
    opened = open_model(folder)
    network, found = opened.network(), []
    for row in tokens.encode(opened, rows).to_pylist():
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor([i if m else -100 for i, m in zip(row["input_ids"], row["supervised"], strict=True)])[None]  # fmt: skip
        with torch.no_grad():
            out = network(input_ids=ids, labels=labels)
        count = int((labels[0, 1:] != -100).sum())
        right = (out.logits[0, :-1].argmax(-1) == labels[0, 1:]).sum()
        found.append((float(out.loss) * count, int(right), count))
    return np.array(found)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("chat"))


def held_out(folder):
    return pa.Table.from_batches(list(open_examples(folder.parent / "examples", "test")))


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_transformers_one_text_at_a_time(form, tmp_path, monkeypatch):
    folder = saved(tmp_path, form)
    rows = held_out(folder)
    opened = open_model(folder)
    expected = one_by_one(folder, rows)
    for tokens_at_once, logits_at_once in ((1 << 14, 1 << 24), (200, 3_000)):
        monkeypatch.setattr(tokens, "TOKENS_AT_ONCE", tokens_at_once)
        monkeypatch.setattr(tokens, "LOGITS_AT_ONCE", logits_at_once)
        found = tokens.score(opened, tokens.encode(opened, rows), "candidate")
        assert found.nats_N == pytest.approx(expected[:, 0], rel=1e-4)
        assert found.right_N.tolist() == expected[:, 1].tolist()
        assert found.targets_N.tolist() == expected[:, 2].tolist()
    targets = [
        i
        for row in tokens.encode(opened, rows).to_pylist()
        for i, m in zip(row["input_ids"], row["supervised"], strict=True)
        if m
    ]
    shares = np.bincount(targets)[np.bincount(targets) > 0] / len(targets)
    assert found.unigram_nats == pytest.approx(-(shares * np.log(shares)).sum())


def test_an_untrained_model_is_judged_and_refused(chat):
    found = evaluate(SPEC, ("topic",), chat, chat.parent / "examples", None, "")
    assert not found.promote
    assert [c.name for c in found.checks if not c.passed] == ["beats_unigram"]
    assert (found.labels, found.confusion, found.calibration) == ((), (), ())
    assert found.rows == len(held_out(chat))
    assert found.metrics["log_loss"] == pytest.approx(math.log(393), rel=0.05)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(found.metrics["log_loss"]))
    assert [part.value for part in found.slices] == ["t0", "t1", "t2"]
    assert sum(part.rows for part in found.slices) == found.rows
    assert set(found.slices[0].candidate) == set(found.metrics)
    assert len(found.samples) == 3
    assert found.samples[0].prompt.startswith(("Question", "And"))
    assert found.samples[0].expected
    json.loads(found.model_dump_json())


def test_the_same_tokenizer_is_compared_in_the_gate_s_metric(chat, tmp_path):
    other = saved(tmp_path, seed=1)
    found = evaluate(SPEC, ("topic",), other, chat.parent / "examples", chat, "4")
    assert found.comparison.metric == "log_loss"
    assert set(found.champion_metrics) == set(found.metrics)
    assert found.slices[0].champion
    metric = EvaluateSpec.model_validate({"gate": {"metric": "token_accuracy", "resamples": 200}})
    found = evaluate(metric, (), other, chat.parent / "examples", chat, "4")
    assert found.comparison.metric == "token_accuracy"


def test_another_tokenizer_is_compared_in_bits_per_byte(chat, tmp_path):
    """The larger vocabulary costs more nats a token and fewer bits a byte."""
    other = saved(tmp_path, seed=1, vocab_size=300)
    found = evaluate(SPEC, ("topic",), chat, chat.parent / "examples", other, "4")
    assert found.comparison.metric == "bits_per_byte"
    ours, theirs = found.metrics, found.champion_metrics
    assert ours["log_loss"] > theirs["log_loss"]
    assert ours["bits_per_byte"] < theirs["bits_per_byte"]
    assert found.comparison.estimate == pytest.approx(
        theirs["bits_per_byte"] - ours["bits_per_byte"]
    )
    assert found.comparison.lower > 0
    rise = [check for check in found.checks if check.name.startswith("slice:")]
    assert rise
    assert all("bits_per_byte" in check.detail for check in rise)


def test_texts_that_one_contender_cannot_score_are_left_out_for_both(chat, tmp_path):
    short = saved(tmp_path, seed=1, max_length=18)
    everything = len(held_out(chat))
    for pair in ((chat, short), (short, chat)):
        found = evaluate(SPEC, (), pair[0], chat.parent / "examples", pair[1], "4")
        assert 0 < found.rows < everything
        assert found.rows + found.excluded == everything


def test_texts_that_a_contender_was_trained_on_are_left_out(chat, tmp_path):
    trained = saved(tmp_path, seed=1, split={"train": 0.8, "validation": 0.1, "test": 0.1})
    found = evaluate(SPEC, (), chat, chat.parent / "examples", trained, "4")
    assert found.excluded > 0
    assert found.rows + found.excluded == len(held_out(chat))


def test_weights_that_are_not_numbers_refuse(tmp_path):
    folder = saved(tmp_path, change=lambda network: network.lm_head.weight.fill_(math.nan))
    found = evaluate(SPEC, ("topic",), folder, folder.parent / "examples", None, "")
    assert not found.promote
    assert "is not a number" in found.reason


def test_a_classifier_is_no_champion_of_a_language_model(chat, tmp_path):
    described = json.loads((chat / "rekindle.json").read_text())
    (tmp_path / "rekindle.json").write_text(
        json.dumps({**described, "task": "text_classification", "labels": ["a", "b"]})
    )
    found = evaluate(SPEC, (), chat, chat.parent / "examples", tmp_path, "4")
    assert not found.promote
    assert [check.name for check in found.checks] == ["same_task"]


def test_a_registered_model_writes(chat, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = mlflow.create_experiment("x", artifact_location=(tmp_path / "a").as_uri())
    with mlflow.start_run(experiment_id=experiment):
        logged = log_model(chat)
    loaded = mlflow.pyfunc.load_model(logged.model_uri)
    asked = pd.DataFrame({"text": ["Question 3: how large is «3»?", "And 4?"]})
    answers = loaded.predict(asked, params={"max_new_tokens": 4})
    opened = open_model(chat)
    prompts = [[("user", text)] for text in asked["text"]]
    expected = opened.task.generate(opened.network(), prompts, opened.settings, chat, 4)
    assert answers["text"].tolist() == expected
    assert len(loaded.predict(asked)["text"][0]) > len(answers["text"][0])
