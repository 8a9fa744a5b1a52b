"""Numbers to predict: what becomes of them, which are refused with their row, and what is learnt."""

from __future__ import annotations

import datetime as dt
import decimal
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from rekindle.data.manifest import open_shards
from rekindle.data.shard import shard
from rekindle.errors import DataError, SpecError
from rekindle.objectives import loss_of
from rekindle.spec import load
from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.tasks import load_task
from tests.data.corpora import all_examples, ingested

TASK = load_task("text_regression")
NETWORK = {
    "model_type": "distilbert",
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 16,
    "max_position_embeddings": 16,
}
COLUMNS = {"text": "text", "target": "minutes"}


def written(folder, minutes, **more):
    rows = [{"text": f"job number {i}", "minutes": value} for i, value in enumerate(minutes)]
    (folder / "jobs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(source=str(folder / "jobs.jsonl"), columns=COLUMNS, max_length=16, **more)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "decimals"])
def test_numbers_arrive_as_they_are_from_every_format(tmp_path, form):
    given = [1.5, -2.25, 3, 1e-9, 7e22, 0] * 20
    if form == "jsonl":
        data = written(tmp_path, given)
    else:
        table = pa.table({"text": [f"job number {i}" for i in range(120)], "minutes": given})
        if form == "decimals":
            exact = [decimal.Decimal(f"{value:.10f}") for value in given]
            table = table.set_column(1, "minutes", pa.array(exact, pa.decimal128(38, 10)))
        path = tmp_path / ("jobs.csv" if form == "csv" else "jobs.parquet")
        if form == "csv":
            lines = (f"job number {i},{value!r}\n" for i, value in enumerate(given))
            path.write_text("text,minutes\n" + "".join(lines))
        else:
            pq.write_table(table, path)
        data = DataSpec(source=str(path), columns=COLUMNS, max_length=16)
    summary = ingested(data, tmp_path / "out", modality="text")
    assert summary.labels == ()
    assert summary.class_rows == {}
    table = all_examples(tmp_path / "out")
    assert table.schema.field("label").type == pa.float64()
    found = {row["text"]: row["label"] for row in table.to_pylist()}
    assert found == pytest.approx({f"job number {i}": value for i, value in enumerate(given)})


@pytest.mark.parametrize("bad", [None, "", "soon", True, float("nan"), float("inf"), 10**400, [1]])
def test_what_is_no_finite_number_is_refused_with_its_row(tmp_path, bad):
    data = written(tmp_path, [1.0, 2.0, bad, 3.0])
    with pytest.raises(DataError) as refused:
        ingested(data, tmp_path / "out", modality="text")
    (problem,) = (one for one in refused.value.problems if "no finite number" in one.what)
    assert "jobs.jsonl:3 (minutes: " in problem.where


def test_times_are_no_numbers(tmp_path):
    table = pa.table({"text": ["a", "b"], "minutes": [dt.datetime(2026, 1, 1)] * 2})
    pq.write_table(table, tmp_path / "jobs.parquet")
    data = DataSpec(source=str(tmp_path / "jobs.parquet"), columns=COLUMNS)
    with pytest.raises(DataError, match="no finite number"):
        ingested(data, tmp_path / "out", modality="text")


def sharded(folder, minutes, **more):
    folder.mkdir(exist_ok=True)
    data = written(folder, minutes, **more)
    ingested(data, folder / "examples", modality="text")
    model = ModelSpec(source=NETWORK, tokenizer={"vocab_size": 64})
    return shard(folder / "examples", data, model, "text_regression", folder / "shards"), model


def test_the_network_learns_deviations_from_the_mean_and_its_folder_says_which(tmp_path):
    minutes = [1e6 + 50 * (i % 7) for i in range(200)]
    manifest, model = sharded(tmp_path, minutes)
    shards = open_shards(tmp_path / "shards")
    train = np.asarray(shards.table("train").column("label"))
    mean, deviation = manifest.settings["target_mean"], manifest.settings["target_std"]
    assert (mean, deviation) == pytest.approx((train.mean(), train.std()))
    wanted = loss_of(TASK.objective).labels(shards.table("train"), manifest.settings)
    assert float(wanted.mean()) == pytest.approx(0, abs=1e-9)
    assert float(wanted.std(correction=0)) == pytest.approx(1)

    network = TASK.build(model, (), manifest.settings, shards.assets).eval()
    TASK.save(network, tmp_path / "model", (), manifest.settings)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert plain.config.problem_type == "regression"
    assert (plain.config.target_mean, plain.config.target_std) == (mean, deviation)
    table = TASK.encode_raw(["job number 3", "job"], manifest.settings, shards.assets)
    inputs = TASK.collate(table, manifest.settings)
    with torch.no_grad():
        numbers = TASK.logits(network, inputs)
        # which kernel attends differs with the processor
        torch.testing.assert_close(plain(**inputs).logits, numbers, rtol=1e-5, atol=1e-6)
        assert numbers.shape == (2, 1)
    found = loss_of(TASK.objective).columns(table, numbers.double().numpy(), manifest.settings)
    assert found["value"].to_pylist() == pytest.approx((numbers[:, 0] * deviation + mean).tolist())


@pytest.mark.parametrize("value", [5.0, 0.1])
def test_a_target_that_never_changes_is_refused(tmp_path, value):
    with pytest.raises(DataError, match="the same number"):
        sharded(tmp_path, [value] * 200)


def test_sources_of_a_mixture_have_targets_of_their_own(tmp_path):
    (tmp_path / "a").mkdir()
    written(tmp_path / "a", [1.5] * 60)
    lines = (json.dumps({"body": f"other {i}", "took": i}) + "\n" for i in range(60))
    (tmp_path / "b.jsonl").write_text("".join(lines))
    ours = {"source": str(tmp_path / "a/jobs.jsonl"), "columns": COLUMNS}
    theirs = {"source": str(tmp_path / "b.jsonl"), "columns": {"text": "body", "target": "took"}}
    data = {"sources": [ours, theirs], "max_length": 16}
    plain = {"name": "m", "task": "text_regression", "data": data, "model": {"source": NETWORK}}
    spec = load.validate(plain, {}, "")
    ingested(spec.data, tmp_path / "out", modality="text")
    found = {row["text"]: row["label"] for row in all_examples(tmp_path / "out").to_pylist()}
    assert len(found) == 120
    assert (found["job number 7"], found["other 7"]) == (1.5, 7.0)
    theirs["columns"] = {"text": "body"}
    with pytest.raises(SpecError, match=r"b\.jsonl holds the number to predict"):
        load.validate(plain, {}, "")


def test_a_row_of_a_csv_is_shown_as_it_is_written(tmp_path):
    (tmp_path / "jobs.csv").write_text('text,minutes\na,"1,234.5"\n')
    data = DataSpec(source=str(tmp_path / "jobs.csv"), columns=COLUMNS)
    with pytest.raises(DataError) as refused:
        ingested(data, tmp_path / "out", modality="text")
    assert "(minutes: '1,234.5')" in refused.value.problems[0].where


def test_new_rows_that_move_the_mean_leave_old_shards_as_they_are(tmp_path):
    """A tokenizer of the hub stays the same from month to month; so do shards, whatever the mean."""
    sharded(tmp_path / "first", list(range(200)))
    own = ModelSpec(source=NETWORK, tokenizer=str(tmp_path / "first/shards/assets"))
    (tmp_path / "more").mkdir()
    made = []
    for minutes in ([*range(200)], [*range(199), 1e6]):
        data = written(tmp_path / "more", minutes)
        ingested(data, tmp_path / "examples", modality="text")
        found = shard(tmp_path / "examples", data, own, "text_regression", tmp_path / "shards")
        made.append({one.split: one.key for one in found.shards})
        assert found.settings["target_std"] > 0
    assert made[0] != made[1], "one split has another row"
    assert len(set(made[0].items()) & set(made[1].items())) == 2
