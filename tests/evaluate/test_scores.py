"""Candidate and champion scored by the training's own machinery, and judged: the same numbers as plain transformers, one
example at a time (reference.py)."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rekindle.data.ingest import ingest
from rekindle.data.manifest import open_shards
from rekindle.data.shard import shard
from rekindle.errors import DataError
from rekindle.evaluate.evaluate import evaluate
from rekindle.objectives.tokens import cross_entropy as linear_loss
from rekindle.records import Scores
from rekindle.registry.signature import log_model
from rekindle.spec.load import load_target
from rekindle.spec.model import DataSpec, EvaluateSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import score_rank
from rekindle.train.modelfolder import digest_of, open_model
from rekindle.train.score import _incomparable, job_of
from tests.data.dialogues import FORMS, model, sharded, source
from tests.evaluate import reference
from tests.evaluate.scoring import judged, scored
from tests.quick import first, only
from tests.serve import models
from tests.support.evaluate_scores import OWN, SLICES, model_of

CONFIGS = Path(__file__).parents[2] / "configs"
SPEC = EvaluateSpec.model_validate({"gate": {"resamples": 200, "min_slice_size": 5}})


def saved(folder, form="chat", seed=0, vocab_size=400, change=lambda network: None, **fields):
    """Examples, shards and an untrained language model of them; the model's folder."""
    data = source(folder, form, **{**SLICES, **fields})
    shards = sharded(folder, data, model(vocab_size))
    return model_of("causal_lm", model(vocab_size), shards, folder / "model", seed, change)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("chat"))


def examples_of(folder):
    return folder.parent / "examples"


def same(found, expected):
    """Numbers of whole records; tight, for fp32 sums in another order. What depends on ranks may differ by two rows of an
    untrained model, whose scores are the same but for rounding, in turn."""
    if isinstance(found, dict):
        found, expected = dict(found), dict(expected)
        for name, most in (
            ("roc_auc", 1e-3),
            ("average_precision", 1e-3),
            ("recall_at_90_precision", 0.03),
        ):
            if name in found:
                assert found.pop(name) == pytest.approx(expected.pop(name), abs=most)
    return found == pytest.approx(expected, rel=2e-6, abs=2e-7, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", first(1, ["chat", "digits", "reviews"]))
def test_the_shipped_configs_are_judged_as_by_plain_transformers(name, tmp_path):
    spec = load_target(CONFIGS / f"{name}.yaml")
    ingest(spec.data, load_task(spec.task).modality, "", tmp_path / "examples")
    shard(tmp_path / "examples", spec.data, spec.model, spec.task, tmp_path / "shards")
    shards = open_shards(tmp_path / "shards")
    ours, theirs = (
        model_of(spec.task, spec.model, shards, tmp_path / who, seed)
        for seed, who in enumerate(("candidate", "champion"))
    )
    slices = spec.data.slices
    expected = reference.evidence(spec.evaluate, slices, ours, tmp_path / "examples", theirs)
    found = judged(spec.evaluate, slices, ours, tmp_path / "examples", theirs, "3", tmp_path)
    assert same(dict(found.metrics), dict(expected["metrics"]))
    assert same(dict(found.champion_metrics), dict(expected["champion_metrics"]))
    assert found.comparison.metric == expected["comparison"].metric
    for field in ("estimate", "lower", "upper"):
        assert getattr(found.comparison, field) == pytest.approx(
            getattr(expected["comparison"], field), rel=1e-5, abs=1e-6
        )
    assert [list(row) for row in found.confusion] == expected["confusion"]
    assert [b.rows for b in found.calibration] == [b.rows for b in expected["calibration"]]
    for ours_bin, bin_ in zip(found.calibration, expected["calibration"], strict=True):
        assert same([ours_bin.confidence, ours_bin.accuracy], [bin_.confidence, bin_.accuracy])
    assert len(found.slices) == len(expected["slices"])
    for part, (column, value, rows, candidate, champion) in zip(
        found.slices, expected["slices"], strict=True
    ):
        assert (part.column, part.value, part.rows) == (column, value, rows)
        assert same(dict(part.candidate), dict(candidate))
        assert same(dict(part.champion), dict(champion))
    trivial = next(check for check in found.checks if check.name.startswith("beats_"))
    assert trivial.threshold == pytest.approx(expected["trivial"].threshold, rel=1e-12)
    for field in ("rows", "excluded", "examples"):
        assert getattr(found, field) == expected[field]
    if name == "chat":
        documents = reference.held_out(tmp_path / "examples").column("document").to_pylist()[:3]
        assert found.samples == reference.samples(ours, documents)


@pytest.mark.parametrize("form", only({"chat", "completion"}, FORMS))
def test_scores_are_those_of_transformers_one_text_at_a_time(form, tmp_path, monkeypatch):
    folder = saved(tmp_path, form)
    rows = reference.held_out(tmp_path / "examples")
    expected = reference.token_sums(folder, rows)
    for i, (tokens_at_once, logits_at_once) in enumerate(((1 << 14, 1 << 24), (200, 3_000))):
        monkeypatch.setattr(score_rank, "MOST_TOKENS_AT_ONCE", tokens_at_once)
        monkeypatch.setattr(
            linear_loss,
            "rows_at_once",
            lambda columns, device, most=logits_at_once: max(1, most // columns),
        )
        found = scored(tmp_path / f"state{i}", folder, tmp_path / "examples")
        sums = pq.read_table(found / "scores.parquet").column("candidate").combine_chunks()
        assert np.array(sums.field("nats")) == pytest.approx(expected[:, 0], rel=1e-5)
        assert sums.field("right").to_pylist() == expected[:, 1].tolist()
        assert sums.field("targets").to_pylist() == expected[:, 2].tolist()
    wanted = reference.token_scores(folder, rows).unigram_nats
    record = Scores.read(found / "scores.json")
    assert record.candidate.unigram_nats == pytest.approx(wanted, rel=1e-12)


def test_a_table_has_one_row_an_example_with_all_that_decides(chat, tmp_path):
    found = scored(tmp_path, chat, examples_of(chat), saved(tmp_path / "other", seed=1), "2")
    table, rows = pq.read_table(found / "scores.parquet"), reference.held_out(examples_of(chat))
    assert table.column_names == ["id", "hash", "slices", "champion", "candidate"]
    assert table.column("id").to_pylist() == rows.column("id").to_pylist()
    assert table.column("hash").to_pylist() == rows.column("hash").to_pylist()
    assert table.column("candidate")[0].as_py().keys() == {
        "nats",
        "right",
        "targets",
        "target_bytes",
    }
    record = Scores.read(found / "scores.json")
    assert (record.champion_version, record.same_targets, record.rows) == ("2", True, len(rows))
    assert (record.candidate.run_key, record.champion.run_key) == ("key0", "key1")


def test_an_untrained_model_is_judged_and_refused(chat, tmp_path):
    found = judged(SPEC, ("topic",), chat, examples_of(chat), None, "", tmp_path)
    assert not found.promote
    assert [c.name for c in found.checks if not c.passed] == ["beats_unigram"]
    assert (found.labels, found.confusion, found.calibration) == ((), (), ())
    assert found.rows == len(reference.held_out(examples_of(chat)))
    assert found.metrics["log_loss"] == pytest.approx(math.log(393), rel=0.05)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(found.metrics["log_loss"]))
    assert [part.value for part in found.slices] == ["t0", "t1", "t2"]
    assert sum(part.rows for part in found.slices) == found.rows
    assert set(found.slices[0].candidate) == set(found.metrics)
    assert len(found.samples) == 3
    assert found.samples[0].prompt.startswith(("Question", "And"))
    assert found.samples[0].expected
    json.loads(found.model_dump_json())


@pytest.mark.slow
def test_the_same_tokenizer_is_compared_in_the_gate_s_metric(chat, tmp_path):
    other = saved(tmp_path, seed=1)
    found = judged(SPEC, ("topic",), other, examples_of(chat), chat, "4", tmp_path)
    assert found.comparison.metric == "log_loss"
    assert set(found.champion_metrics) == set(found.metrics)
    assert found.slices[0].champion
    metric = EvaluateSpec.model_validate({"gate": {"metric": "token_accuracy", "resamples": 200}})
    found = judged(metric, (), other, examples_of(chat), chat, "4", tmp_path)
    assert found.comparison.metric == "token_accuracy"


def test_another_tokenizer_is_compared_in_bits_per_byte(chat, tmp_path):
    """The larger vocabulary costs more nats a token and fewer bits a byte."""
    other = saved(tmp_path, seed=1, vocab_size=300)
    found = judged(SPEC, ("topic",), chat, examples_of(chat), other, "4", tmp_path)
    expected = reference.evidence(SPEC, ("topic",), chat, examples_of(chat), other)
    assert same(dict(found.champion_metrics), dict(expected["champion_metrics"]))
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


@pytest.mark.slow
@pytest.mark.parametrize("longest", first(1, [36, 40]))
def test_texts_of_which_one_contender_sees_less_are_left_out_for_both(chat, tmp_path, longest):
    """What comes late in a text is easier to guess: a model that cuts it earlier would look worse."""
    short = saved(tmp_path, seed=1, max_length=longest)
    for pair in ((chat, short), (short, chat)):
        found = judged(SPEC, (), pair[0], examples_of(chat), pair[1], "4", tmp_path)
        expected = reference.evidence(SPEC, (), pair[0], examples_of(chat), pair[1])
        assert found.rows > 0
        assert found.excluded > 0
        assert (found.rows, found.excluded) == (expected["rows"], expected["excluded"])
        assert same(dict(found.metrics), dict(expected["metrics"]))
        threshold = next(c for c in found.checks if c.name == "beats_unigram").threshold
        assert threshold == pytest.approx(expected["trivial"].threshold, rel=1e-12)


@pytest.mark.slow
def test_texts_that_a_contender_was_trained_on_are_left_out(chat, tmp_path):
    trained = saved(tmp_path, seed=1, split={"train": 0.8, "validation": 0.1, "test": 0.1})
    found = judged(SPEC, (), chat, examples_of(chat), trained, "4", tmp_path)
    expected = reference.evidence(SPEC, (), chat, examples_of(chat), trained)
    assert found.excluded > 0
    assert (found.rows, found.excluded) == (expected["rows"], expected["excluded"])
    assert same(dict(found.metrics), dict(expected["metrics"]))


@pytest.mark.slow
def test_a_champion_that_does_not_say_what_it_was_trained_on_is_not_judged_beside(chat, tmp_path):
    other = saved(tmp_path / "other", seed=1)
    (other / "trained_on.npy").unlink()
    with pytest.raises(DataError, match="does not say what its model was trained on"):
        judged(SPEC, (), chat, examples_of(chat), other, "4", tmp_path / "state")


def test_weights_that_are_not_numbers_refuse(tmp_path):
    folder = saved(tmp_path, change=lambda network: network.lm_head.weight.fill_(math.nan))
    found = judged(SPEC, ("topic",), folder, tmp_path / "examples", None, "", tmp_path)
    assert not found.promote
    assert "is not a number" in found.reason


@pytest.mark.slow
def test_a_model_is_compared_with_itself_as_equal_however_early_the_champion_cuts(chat, tmp_path):
    early = tmp_path / "early"
    shutil.copytree(chat, early)
    described = json.loads((early / "rekindle.json").read_text())
    described["settings"]["max_length"] = 40
    (early / "rekindle.json").write_text(json.dumps(described))
    found = judged(SPEC, (), chat, examples_of(chat), early, "4", tmp_path / "state")
    assert found.rows > 0
    assert found.excluded > 0
    assert found.comparison.estimate == pytest.approx(0, abs=1e-6)
    assert not found.promote


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"settings": {"form": "text"}}, "the form text, not chat"),
        ({"task": "image_classification"}, "is not a language model"),
    ],
)
def test_a_champion_of_another_form_or_kind_is_not_compared(chat, tmp_path, change, says):
    described = json.loads((chat / "rekindle.json").read_text())
    settings = {**described["settings"], **change.pop("settings", {})}
    (tmp_path / "rekindle.json").write_text(
        json.dumps({**described, "settings": settings, **change})
    )
    shutil.copy(chat / "trained_on.npy", tmp_path)
    found = judged(SPEC, (), chat, examples_of(chat), tmp_path, "4", tmp_path / "state")
    assert not found.promote
    assert found.checks[-1].name == "same_task"
    assert says in found.reason


@pytest.mark.parametrize(("shape", "said"), [([4, 16, 1], "reads images of"), ([8, 8, 1], None)])
def test_a_champion_of_images_of_another_shape_is_not_compared(tmp_path, shape, said):
    """Of as many pixels, which would be read in another order."""
    models.made(tmp_path / "made", "image")
    ours = tmp_path / "made" / "model"
    theirs = tmp_path / "theirs"
    shutil.copytree(ours, theirs)
    described = json.loads((ours / "rekindle.json").read_text())
    for folder, size in ((ours, [8, 8, 1]), (theirs, shape)):
        settings = {**described["settings"], "image_shape": size}
        (folder / "rekindle.json").write_text(json.dumps({**described, "settings": settings}))
    found = _incomparable(ours, theirs, "image_classification")
    assert (found[0], said in found[1]) == ("same_task", True) if said else found is None


def test_a_classifier_is_no_champion_of_a_language_model(chat, tmp_path):
    described = json.loads((chat / "rekindle.json").read_text())
    (tmp_path / "rekindle.json").write_text(
        json.dumps({**described, "task": "text_classification", "labels": ["a", "b"]})
    )
    shutil.copy(chat / "trained_on.npy", tmp_path)
    found = judged(SPEC, (), chat, examples_of(chat), tmp_path, "4", tmp_path / "state")
    assert not found.promote
    assert found.checks[-1].name == "same_task"


def test_a_champion_without_scores_refuses_and_is_not_taken_for_none(chat, tmp_path):
    found = scored(tmp_path, chat, examples_of(chat))
    assert evaluate(SPEC, DataSpec(source="-"), found).checks[-1].name != "champion_scored"
    record = Scores.read(found / "scores.json")
    record.model_copy(update={"champion_version": "4"}).write(found / "scores.json")
    refused = evaluate(SPEC, DataSpec(source="-"), found)
    assert not refused.promote
    assert [check.name for check in refused.checks] == ["champion_scored"]
    assert "the champion, version 4, was not scored" in refused.reason


def test_a_champion_is_scored_once_for_the_same_examples(chat, tmp_path, capsys):
    candidates = [saved(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    said = []
    for candidate in candidates:
        scored(tmp_path / "state", candidate, examples_of(chat), chat, "4")
        said.append(capsys.readouterr().out)
    assert ["scoring the champion" in text for text in said] == [True, False]
    assert all("scoring the candidate" in text for text in said)
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in chat.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())

    def champion_in(folder, version, examples):
        return job_of(
            candidates[0], folder, version, digest_of(folder), examples, TrainSpec(), str(tmp_path)
        ).turns[0]

    again = champion_in(chat, "4", examples_of(chat))
    assert champion_in(changed, "9", examples_of(chat)).kept == again.kept, "bytes, not the name"
    weights = changed / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert champion_in(changed, "4", examples_of(chat)).kept != again.kept
    elsewhere = champion_in(chat, "4", candidates[0].parent / "examples")
    assert elsewhere.kept == again.kept, "the same rows in another folder"


def test_evaluate_needs_no_torch_and_no_model():
    code = "import sys, rekindle.evaluate.evaluate; print(sorted({'torch', 'transformers'} & set(sys.modules)), [m for m in sys.modules if m.startswith('rekindle.train')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"


@pytest.mark.slow
def test_a_registered_model_writes(chat, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    experiment = mlflow.create_experiment("x", artifact_location=(tmp_path / "a").as_uri())
    (tmp_path / "judged").write_text("{}")
    with mlflow.start_run(experiment_id=experiment):
        logged = log_model(chat, "", tmp_path / "judged")
    loaded = mlflow.pyfunc.load_model(logged.model_uri)
    asked = pd.DataFrame({"text": ["Question 3: how large is «3»?", "And 4?"]})
    answers = loaded.predict(asked, params={"max_new_tokens": 4})
    opened = open_model(chat)
    prompts = [[("user", text)] for text in asked["text"]]
    expected = opened.task.generate(opened.network(), prompts, opened.settings, chat, 4)
    assert answers["text"].tolist() == expected
    assert len(loaded.predict(asked)["text"][0]) > len(answers["text"][0])


def test_judging_targets_reads_nothing_back_from_the_device():
    """A read (.item(), .tolist(), a boolean index) of a fake tensor raises, because it holds no numbers."""
    with FakeTensorMode():
        hidden_FH, weight_VH = torch.zeros(9, 16), torch.zeros(400, 16)
        found = linear_loss.judge_targets(hidden_FH, weight_VH, torch.zeros(9, dtype=torch.int64))
        with pytest.raises(DataDependentOutputException):
            found[0, 0].item()
    assert (tuple(found.shape), found.dtype) == ((9, 2), torch.float64)


def test_a_language_model_of_a_user_s_own_is_scored_by_its_logits_and_writes_itself(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path / 'own.py'}:Bigrams"
    shards = sharded(tmp_path, source(tmp_path, "chat", **SLICES), model(400))
    folder = model_of(name, model(400), shards, tmp_path / "model", 0)
    found = scored(tmp_path / "state", folder, tmp_path / "examples")
    sums = pq.read_table(found / "scores.parquet").column("candidate").combine_chunks()
    opened, expected = open_model(folder, name), []
    table_VV = opened.network().table.weight.detach().double().log_softmax(-1)
    for row in reference.encoded(opened, reference.held_out(tmp_path / "examples")).to_pylist():
        targets = [(i, t) for i, t in enumerate(reference.targets_of(row)) if t != -100]
        expected.append(-sum(float(table_VV[row["input_ids"][i - 1], t]) for i, t in targets))
    assert sums.field("nats").to_pylist() == pytest.approx(expected, rel=1e-6)
    samples = Scores.read(found / "scores.json").samples
    assert [sample.generated for sample in samples] == [f"Table after {s.prompt}" for s in samples]
