"""Shards that are not what their manifest says are refused before anything is read from them."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.data.manifest import open_shards
from rekindle.data.reading import shared_shards
from rekindle.errors import DataError
from tests.data.corpora import rows, sharded, text_spec, write_jsonl


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    source = write_jsonl(folder / "reviews.jsonl", rows())
    sharded(text_spec(source, slices=["category"], shard_rows=60), folder)
    return folder / "shards"


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "shards")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def replaced(**fields):
    return lambda folder: edit(folder, lambda manifest: manifest.update(fields))


def first_shard(**fields):
    return lambda folder: edit(folder, lambda manifest: manifest["shards"][0].update(fields))


def escaping(folder):
    shutil.copy(folder / "train-00000.arrow", folder.parent / "outside.arrow")
    first_shard(path="../outside.arrow")(folder)


def moved_row(folder):
    def change(manifest):
        manifest["shards"][0]["rows"] += 1
        manifest["shards"][1]["rows"] -= 1

    edit(folder, change)


def swapped(folder):
    """Two shards exchange their names and entries: each is whole, but the order is another."""
    edit(folder, lambda manifest: manifest["shards"].insert(1, manifest["shards"].pop(0)))


BROKEN = {
    "one bit in the data": (
        lambda f: flip(f / "train-00001.arrow", 2_000),
        "train-00001.arrow has other bytes",
    ),
    "one bit at the end": (
        lambda f: flip(f / "train-00000.arrow", -1),
        "train-00000.arrow has other bytes",
    ),
    "a shard cut short": (
        lambda f: (f / "train-00000.arrow").write_bytes(
            (f / "train-00000.arrow").read_bytes()[:-8]
        ),
        "bytes and not the",
    ),
    "a shard gone": (lambda f: (f / "train-00002.arrow").unlink(), "train-00002.arrow is missing"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "never completed"),
    "half a manifest": (lambda f: (f / "manifest.json").write_text('{"schema_'), "cannot be read"),
    "a list for a manifest": (
        lambda f: (f / "manifest.json").write_text("[]"),
        "schema version None",
    ),
    "a later version": (
        replaced(schema_version=99),
        "schema version 99, and this rekindle reads 1",
    ),
    "an unknown field": (replaced(colour="red"), "is not a manifest: colour"),
    "other rows in total": (replaced(rows={"train": 1, "validation": 2, "test": 3}), "promises"),
    "other examples": (replaced(examples="0" * 32), "other examples"),
    "no shards at all": (replaced(shards=[]), "names no shards"),
    "another hash": (first_shard(sha256="0" * 64), "SHA-256 differs"),
    "other rows": (moved_row, "holds 60 rows and not the 61"),
    "another size": (first_shard(bytes=1), "and not the 1 of"),
    "a way out": (escaping, "outside of its folder: ../outside.arrow"),
    "an absolute path": (first_shard(path="/etc/passwd"), "outside of its folder"),
    "another order": (swapped, "other examples"),
    "another tokenizer": (
        lambda f: flip(f / "assets/tokenizer.json", 50),
        "assets has other files",
    ),
    "no tokenizer": (lambda f: (f / "assets/tokenizer.json").unlink(), "assets has other files"),
}


@pytest.mark.parametrize(("break_it", "message"), BROKEN.values(), ids=list(BROKEN))
def test_it_is_refused(folder, break_it, message):
    open_shards(folder)
    break_it(folder)
    with pytest.raises(DataError, match=message) as caught:
        open_shards(folder)
    assert "run the step `shard` again" in str(caught.value)


@settings(max_examples=30)
@given(st.data())
def test_taken_rows_are_the_rows_asked_for_in_that_order(original, data):
    shards = open_shards(original)
    indices = data.draw(st.lists(st.integers(0, shards.rows("train") - 1), max_size=50))
    taken = shards.take("train", indices)
    everything = shards.table("train").to_pylist()
    assert taken.to_pylist() == [everything[i] for i in indices]
    assert taken.schema == shards.table("train").schema


def test_a_reader_knows_lengths_and_assets(original):
    shards = open_shards(original)
    table = shards.table("test").to_pylist()
    assert shards.lengths("test").tolist() == [len(row["input_ids"]) for row in table]
    assert (shards.assets / "tokenizer.json").exists()


@pytest.mark.parametrize("row", [-1, 10_000])
def test_a_row_that_does_not_exist_is_an_error(original, row):
    with pytest.raises(IndexError, match="rows 0 to"):
        open_shards(original).take("train", [0, row])


def test_ranks_check_a_shard_when_it_is_touched_first(folder, tmp_path, monkeypatch):
    damaged = sorted(folder.glob("train-*.arrow"))[-1]
    marks = tmp_path / "marks"
    first = shared_shards(folder, marks, tmp_path / "cache", "")
    rows = first.rows("train")
    assert first.take("train", [0]).column("id")[0].as_py()
    assert len(list(marks.iterdir())) == 1
    flip(damaged, 2_000)
    with pytest.raises(DataError, match=f"{damaged.name} has other bytes"):
        first.take("train", [rows - 1])
    flip(damaged, 2_000)
    order = first.order("train", global_batch_size=4, seed=0)
    order.batch(0)  # one window: all files are checked, and not again by the next rank
    flip(damaged, 2_000)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shared_shards(folder, marks, tmp_path / "cache", "").take("train", [rows - 1])
    with pytest.raises(DataError, match=f"{damaged.name} has other bytes"):
        shared_shards(folder, tmp_path / "attempt-2", tmp_path / "cache", "").order(
            "train", global_batch_size=4, seed=0
        ).batch(0)


def test_a_shard_that_left_the_store_is_named(tmp_path):
    source = write_jsonl(tmp_path / "reviews.jsonl", rows())
    data = text_spec(source, shard_rows=60, disk_gb=1)
    manifest = sharded(data, tmp_path, store=str(tmp_path / "pieces"))
    assert not list((tmp_path / "shards").glob("*.arrow"))
    shards = shared_shards(
        tmp_path / "shards", tmp_path / "marks", tmp_path / "cache", str(tmp_path / "pieces")
    )
    key = next(file.key for file in manifest.shards if file.split == "train")
    assert len(shards.take("test", [0])) == 1
    assert [len(part) for part in shards.hashes("test")] == [
        file.rows for file in manifest.shards if file.split == "test"
    ]
    first = next(file for file in manifest.shards if file.split == "train")
    (tmp_path / "cache" / first.path).write_bytes(b"of an attempt before")
    assert len(shards.take("train", [0])) == 1  # fetched again
    (tmp_path / "cache" / first.path).unlink()
    shutil.rmtree(tmp_path / "pieces" / key)
    again = shared_shards(
        tmp_path / "shards", tmp_path / "marks-2", tmp_path / "cache", str(tmp_path / "pieces")
    )
    with pytest.raises(DataError, match=r"the piece shard.arrow is missing") as caught:
        again.take("train", [0])
    assert "--from shard" in str(caught.value)
