"""Lists of words with a tag each: what becomes of them, and which are refused with their row."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from rekindle.data.fingerprint import fingerprint
from rekindle.data.manifest import open_shards
from rekindle.data.shard import shard
from rekindle.errors import DataError
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from tests.data.corpora import all_examples, content, ingested
from tests.data.tagged import TAGS, source, texts

NETWORK = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def test_words_keep_their_tags_and_classes_are_counted_by_word(tmp_path):
    summary = ingested(source(tmp_path, slices=["topic"]), tmp_path / "out", modality="words")
    table = all_examples(tmp_path / "out")
    found = {row["id"]: row for row in table.to_pylist()}
    for record in texts():
        assert json.loads(found[record["id"]]["words"]) == record["tokens"]
        assert found[record["id"]]["label"] == record["tags"]
        assert found[record["id"]]["topic"] == record["topic"]
    assert summary.labels == TAGS
    everything = [tag for record in texts() for tag in record["tags"]]
    for tag in TAGS:
        assert sum(rows[tag] for rows in summary.class_rows.values()) == everything.count(tag)


def test_shards_hold_class_indices_and_ask_for_the_words_that_have_a_place(tmp_path):
    data = source(tmp_path, max_length=8)
    ingested(data, tmp_path / "examples", modality="words")
    model = ModelSpec(source=NETWORK, tokenizer={"vocab_size": 64})
    shard(tmp_path / "examples", data, model, "token_classification", tmp_path / "shards")
    shards = open_shards(tmp_path / "shards")
    wanted = {record["id"]: record["tags"] for record in texts()}
    for split in ("train", "validation", "test"):
        rows = shards.table(split).to_pylist()
        assert [[TAGS[i] for i in row["label"]] for row in rows] == [
            wanted[row["id"]] for row in rows
        ]
        placed = [sum(place >= 0 for place in row["places"]) for row in rows]
        assert shards.targets(split).tolist() == placed
        assert any(place < 0 for row in rows for place in row["places"]), "some are cut off"
    assert shards.take("train", [3, 1]).column("id").to_pylist() == [
        shards.table("train").column("id")[i].as_py() for i in (3, 1)
    ]


def test_parquet_and_whole_numbers_as_tags_give_the_same(tmp_path):
    numbered = [{**r, "tags": [TAGS.index(tag) for tag in r["tags"]]} for r in texts()]
    ingested(source(tmp_path / "json", numbered), tmp_path / "a", modality="words")
    pa.parquet.write_table(pa.Table.from_pylist(numbered), tmp_path / "x.parquet")
    data = source(tmp_path / "json").model_copy(update={"source": str(tmp_path / "x.parquet")})
    summary = ingested(data, tmp_path / "b", modality="words")
    assert summary.labels == ("0", "1", "2")
    same = [
        {f: h for f, h in content(tmp_path / name).items() if f != "summary.json"} for name in "ab"
    ]
    assert same[0] == same[1]


# name: (fields of the third record, what the message must hold)
REFUSED = {
    "a text": ({"tokens": "New York"}, ["1 row without a list of words", "x.jsonl:3 (New York)"]),
    "null": ({"tokens": None}, ["without a list of words", "x.jsonl:3"]),
    "no words": ({"tokens": [], "tags": []}, ["without a list of words"]),
    "an empty word": ({"tokens": ["a", " "], "tags": ["O", "O"]}, ["without a list of words"]),
    "a number as a word": (
        {"tokens": ["a", 5], "tags": ["O", "O"]},
        ["without a list of words", "(5)"],
    ),
    "half a surrogate pair": ({"tokens": ["\ud800"], "tags": ["O"]}, ["not UTF-8"]),
    "too few tags": (
        {"tokens": ["a", "b"], "tags": ["O"]},
        ["without exactly one tag per word", "1 for 2 words"],
    ),
    "no tags": ({"tags": None}, ["without exactly one tag per word"]),
    "one tag for all": ({"tags": "O"}, ["without exactly one tag per word"]),
    "an empty tag": (
        {"tokens": ["a", "b"], "tags": ["O", ""]},
        ["without exactly one tag per word", "none for word 2"],
    ),
    "half a number": ({"tokens": ["a"], "tags": [0.5]}, ["without exactly one tag per word"]),
}


@pytest.mark.parametrize(("fields", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_words_with_a_tag_each_is_refused_with_its_row(fields, said, tmp_path):
    records = texts()
    records[2] |= fields
    data = source(tmp_path)
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(DataError) as caught:
        ingested(data, tmp_path / "out", modality="words")
    for part in said:
        assert part in str(caught.value)
    assert str(caught.value).count("x.jsonl:3") == 1, "one fault is one line"
    assert not (tmp_path / "out/summary.json").exists()


def test_a_tag_that_the_config_does_not_name_is_refused(tmp_path):
    records = texts()
    records[2]["tags"][0] = "B-CTIY"
    with pytest.raises(
        DataError, match=r"label that data.labels does not name.*\n.*x.jsonl:3 \(B-CTIY\)"
    ):
        ingested(source(tmp_path, records, labels=TAGS), tmp_path / "out", modality="words")


def test_a_tag_may_be_missing_from_a_split_but_not_from_training(tmp_path):
    records = texts(60)
    for record in records[:50]:
        record |= {
            "tokens": ["n" + record["id"], "Leeds"],
            "tags": ["O", "B-CITY"],
            "split": "train",
        }
    for record in records[50:]:
        record |= {"tokens": ["n" + record["id"], "York"], "tags": ["O", "O"], "split": "test"}
    for split in ("train", "test"):
        (tmp_path / "s").mkdir(exist_ok=True)
        rows = [json.dumps(record) + "\n" for record in records if record["split"] == split]
        (tmp_path / f"s/{split}.jsonl").write_text("".join(rows))
    data = DataSpec.model_validate(
        {
            "source": str(tmp_path / "s/*.jsonl"),
            "columns": {"label": "tags", "key": "id"},
            "split": {"by": "source"},
        }
    )
    summary = ingested(data, tmp_path / "out", modality="words")
    assert summary.class_rows["test"] == {"B-CITY": 0, "O": 20}
    swapped = data.model_copy(update={"labels": (*summary.labels, "B-X")})
    with pytest.raises(DataError, match="the split train has no row of class `B-X`"):
        ingested(swapped, tmp_path / "other", modality="words")


def test_one_text_in_two_splits_is_a_leak_and_shown_as_words(tmp_path):
    records = [
        {**record, "tokens": ["New", "York"], "tags": ["B-CITY", "I-CITY"]} for record in texts()
    ]
    with pytest.raises(
        DataError, match=r"stands in more than one split[\s\S]*\[\"New\",\"York\"\]"
    ):
        ingested(source(tmp_path, records), tmp_path / "out", modality="words")


def test_another_tag_in_a_window_is_another_fingerprint(tmp_path):
    records = [{**record, "day": "2026-03-01"} for record in texts()]
    fields = {
        "columns": {"label": "tags", "key": "id", "time": "day"},
        "window": {"size": "1 month"},
    }

    def seen(changed):
        data = source(tmp_path, changed, **fields)
        return fingerprint(
            "token_classification", data, ModelSpec(), TrainSpec(), champion=None
        ).data

    before = seen(records)
    assert seen(records) == before
    records[0] = {**records[0], "tags": ["O"] * len(records[0]["tags"])}
    assert seen(records) != before


def test_splits_are_not_called_empty_because_their_rows_were_refused(tmp_path):
    records = [{**record, "tags": record["tags"][1:]} for record in texts(12)]
    records[0] = texts(12)[0]
    with pytest.raises(DataError) as caught:
        ingested(source(tmp_path, records), tmp_path / "out", modality="words")
    assert [problem.what for problem in caught.value.problems] == [
        "11 rows without exactly one tag per word"
    ]
