"""Shards: the same bytes however many processes encode them, and a manifest that vouches for
each."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pytest

from rekindle.data import examples
from rekindle.data.ingest import ingest
from rekindle.data.manifest import open_shards
from rekindle.data.shard import shard
from rekindle.errors import DataError, StepError
from rekindle.launch.events import parse
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import DataSpec, ModelSpec
from tests.data.corpora import (
    LABELS,
    TASKS,
    all_examples,
    content,
    ingested,
    rows,
    sharded,
    text_spec,
    write_jsonl,
)
from tests.quick import first


@pytest.fixture
def small_batches(monkeypatch):
    """Many batches from few rows, so that several workers have something to do."""
    monkeypatch.setattr(examples, "BATCH_ROWS", 23)


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "reviews.jsonl", rows())


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path, source, small_batches):
    data = text_spec(source, slices=["category"], shard_rows=50)
    manifests = {n: sharded(data, tmp_path / str(n), workers=n) for n in (1, 2, 3)}
    contents = [content(tmp_path / str(n) / "shards") for n in manifests]
    assert contents[0] == contents[1] == contents[2]
    assert manifests[1].shards[0].rows == 50
    assert len({file.path for file in manifests[1].shards}) == len(manifests[1].shards) > 5


def test_the_manifest_says_what_the_shards_hold(tmp_path, source):
    data = text_spec(source, slices=["category"], columns={"key": "id"})
    manifest = sharded(data, tmp_path)
    folder = tmp_path / "shards"
    for file in manifest.shards:
        table = pa.ipc.open_file(folder / file.path).read_all()
        lengths = [len(ids) for ids in table["input_ids"].to_pylist()]
        assert (file.rows, file.tokens) == (len(table), sum(lengths))
        assert (file.bytes, file.sha256) == (
            (folder / file.path).stat().st_size,
            file_sha256(folder / file.path),
        )
    assert manifest.labels == LABELS
    assert sum(manifest.rows.values()) == 300
    assert {s: sum(c.values()) for s, c in manifest.class_rows.items()} == dict(manifest.rows)
    assert manifest.settings["vocab_size"] > 100
    assert "" not in (manifest.tokenizer, manifest.source, manifest.examples)


def test_shards_hold_the_examples_in_their_order(tmp_path, source, small_batches):
    sharded(text_spec(source, slices=["category"], shard_rows=37), tmp_path, workers=2)
    shards = open_shards(tmp_path / "shards")
    written = all_examples(tmp_path / "examples")
    read = pa.concat_tables([shards.table(split) for split in ("train", "validation", "test")])
    for name in ("id", "hash", "category"):
        assert read[name].to_pylist() == written[name].to_pylist()
    assert [LABELS[i] for i in read["label"].to_pylist()] == written["label"].to_pylist()


def test_images_keep_their_shape_in_the_settings(tmp_path):
    manifest = sharded(DataSpec(source="sklearn:digits"), tmp_path, "Pixels")
    assert manifest.settings == {"image_shape": [8, 8, 1]}
    table = open_shards(tmp_path / "shards").take("train", [3, 1])
    assert [len(value) for value in table["pixels"].to_pylist()] == [64, 64]


@pytest.mark.slow
def test_a_task_may_print_in_its_worker(tmp_path, source, small_batches):
    manifest = sharded(text_spec(source), tmp_path, "Talkative", workers=2)
    assert sum(manifest.rows.values()) == 300


@pytest.mark.slow
def test_workers_are_light(tmp_path, source, small_batches):
    sharded(text_spec(source), tmp_path, "Modules", workers=2)
    table = open_shards(tmp_path / "shards").table("train")
    assert set(table["modules"].to_pylist()) == {json.dumps([])}


@pytest.mark.parametrize(
    ("task", "message"),
    first(
        1, [("Failing", "failed: ZeroDivisionError: the needle"), ("Killed", "killed by signal 9")]
    ),
)
def test_a_worker_that_dies_is_an_error_and_leaves_no_manifest(
    tmp_path, source, small_batches, capfd, task, message
):
    write_jsonl(source, [*rows(), *({"text": "needle", "label": "bad"} for _ in range(3))])
    with pytest.raises(StepError, match=message):
        sharded(text_spec(source), tmp_path, task, workers=2)
    assert not (tmp_path / "shards/manifest.json").exists()
    assert task == "Killed" or "ZeroDivisionError: the needle" in capfd.readouterr().err
    with pytest.raises(DataError, match="never completed"):
        open_shards(tmp_path / "shards")


def test_a_second_attempt_replaces_the_first(tmp_path, source):
    sharded(text_spec(source, shard_rows=20), tmp_path)
    write_jsonl(source, rows()[:200])
    manifest = sharded(text_spec(source), tmp_path)
    names = sorted(file.name for file in (tmp_path / "shards").glob("*.arrow"))
    assert names == sorted(file.path for file in manifest.shards)
    open_shards(tmp_path / "shards")


def test_examples_that_were_never_completed_are_refused(tmp_path, source):
    data = text_spec(source)
    ingested(data, tmp_path / "examples")
    with pytest.raises(DataError, match="reads image"):
        shard(tmp_path / "examples", data, ModelSpec(), f"{TASKS}:Pixels", tmp_path / "out")
    os.truncate(tmp_path / "examples/train-00000.arrow", 100)
    with pytest.raises(DataError, match=r"train-00000.arrow is not a file of examples"):
        shard(tmp_path / "examples", data, ModelSpec(), f"{TASKS}:Words", tmp_path / "out")
    (tmp_path / "examples/summary.json").unlink()
    with pytest.raises(DataError, match=r"summary.json is missing"):
        shard(tmp_path / "examples", data, ModelSpec(), f"{TASKS}:Words", tmp_path / "out")


def test_batches_end_by_bytes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "BATCH_BYTES", 1_000)
    records = [{"text": f"{i} " + "long " * (i % 7 * 50), "label": i % 2} for i in range(200)]
    ingested(text_spec(write_jsonl(tmp_path / "x.jsonl", records)), tmp_path / "out")
    for batch in examples.open_examples(tmp_path / "out", "train"):
        sizes = [len(text) for text in batch["text"].to_pylist()]
        assert sum(sizes[:-1]) < 1_000


@pytest.mark.parametrize(
    ("most", "said"),
    [(4, "300 of 300 texts are cut at data.max_length (4 tokens), or fill it"), (64, "")],
)
def test_texts_that_are_cut_are_told_of(tmp_path, capfd, most, said):
    data = text_spec(write_jsonl(tmp_path / "r.jsonl", rows(300)), max_length=most)
    model = ModelSpec(source={"model_type": "distilbert"}, tokenizer={"vocab_size": 200})
    ingest(data, "text", "", tmp_path / "examples")
    shard(tmp_path / "examples", data, model, "text_classification", tmp_path / "shards")
    events = map(parse, capfd.readouterr().out.splitlines())
    assert [event["text"] for event in events if event] == ([said] if said else [])
