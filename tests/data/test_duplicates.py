"""`data.duplicates` leaves copies out, the first one stays, in bounded memory and in the same way each time."""

from __future__ import annotations

import collections
import random

import pytest
from PIL import Image

from rekindle.data.examples import SPLITS
from rekindle.errors import DataError, SpecError
from rekindle.spec.load import load_target
from rekindle.spec.model import DataSpec
from tests.data.corpora import (
    all_examples,
    content,
    ingested,
    rows,
    sharded,
    text_spec,
    write_jsonl,
)

HOW = {
    "by content": {},
    "by key": {"columns": {"key": "id"}},
    "by time": {"columns": {"time": "month"}, "split": {"by": "time"}},
}


def with_copies(path, copies=40):
    """300 records, of which every fourth late one copies an early one, by turns in capitals."""
    records = rows()
    for i in range(copies):
        text = records[i % 20]["text"]
        records[299 - 4 * i]["text"] = f"  {text.upper()}\t" if i % 2 else text
    return write_jsonl(path, records), records


def folded(text):
    return " ".join(text.lower().split())


@pytest.mark.parametrize("buckets", [1, 7])
@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
@pytest.mark.parametrize(("duplicates", "fold"), [("exact", str), ("folded", folded)])
def test_the_first_copy_stays(tmp_path, monkeypatch, how, duplicates, fold, buckets):
    monkeypatch.setattr("rekindle.data.duplicates.GROUP_ROWS", 1_000 if buckets == 1 else 40)
    path, records = with_copies(tmp_path / "x.jsonl")
    data = text_spec(path, **how)
    if how:
        with pytest.raises(DataError, match=r"more than one split[^$]*set data\.duplicates: exact"):
            ingested(data, tmp_path / "refused")
    data = data.model_copy(update={"duplicates": duplicates})
    summary = ingested(data, tmp_path / "a")
    table = all_examples(tmp_path / "a")
    found = [fold(text) for text in table["text"].to_pylist()]
    assert sorted(found) == sorted({fold(record["text"]) for record in records})
    assert summary.left_out == {"duplicate": 300 - len(found)}
    assert sum(summary.rows.values()) == len(found)
    counts = {s: collections.Counter() for s in SPLITS}
    for split, label in zip(table["split"].to_pylist(), table["label"].to_pylist(), strict=True):
        counts[split][label] += 1
    assert {s: dict(by) for s, by in summary.class_rows.items()} == counts
    assert sharded(data, tmp_path / "b").left_out == summary.left_out
    assert content(tmp_path / "a") == content(tmp_path / "b" / "examples")


@pytest.mark.parametrize("duplicates", ["exact", "near"])
def test_a_file_that_two_sources_hold_is_read_once(tmp_path, duplicates):
    """Of the same name and bytes, so that both are one entry of the store."""
    folders = [write_jsonl(tmp_path / name / "x.jsonl", rows()).parent for name in "ab"]
    sources = [{"source": str(folder)} for folder in folders]
    data = DataSpec.model_validate({"sources": sources, "duplicates": duplicates})
    alone = ingested(text_spec(folders[0], duplicates=duplicates), tmp_path / "alone")
    summary = ingested(data, tmp_path / "out")
    assert summary.rows == alone.rows
    assert summary.left_out["duplicate"] == 600 - sum(summary.rows.values())


def test_a_copy_in_train_stays_and_the_test_split_loses_its_own(tmp_path):
    path, _ = with_copies(tmp_path / "x.jsonl")
    data = text_spec(path, duplicates="exact", **HOW["by time"])
    ingested(data, tmp_path / "out")
    table = all_examples(tmp_path / "out")
    split_of = dict(zip(table["text"].to_pylist(), table["split"].to_pylist(), strict=True))
    assert {split_of[rows()[i]["text"]] for i in range(20)} == {"train"}


def test_nothing_is_written_anew_without_copies(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", rows())
    ingested(text_spec(path), tmp_path / "a")
    summary = ingested(text_spec(path, duplicates="folded"), tmp_path / "b")
    assert summary.left_out == {}
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.mark.parametrize("buckets", [1, 7])
def test_near_copies_are_left_out_and_texts_that_share_half_stay(tmp_path, monkeypatch, buckets):
    monkeypatch.setattr("rekindle.data.duplicates.GROUP_ROWS", 100_000 if buckets == 1 else 1_000)
    made = random.Random(1)
    words = ["".join(made.choices("abcdefghij", k=5)) for _ in range(2_000)]
    texts = [made.choices(words, k=60) for _ in range(300)]
    near = [[*text[:30], "changed", *text[30:]] for text in texts[:60]]  # 52 of 61 runs in common
    half = [text[:40] + made.choices(words, k=20) for text in texts[60:120]]  # 36 of 76
    records = [
        {"text": "  ".join(text).upper() if i % 2 else " ".join(text), "label": "ab"[i % 2]}
        for i, text in enumerate([*texts, *near, *half, ["one", "word"], ["One", "WORD"]])
    ]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    summary = ingested(text_spec(path, duplicates="near"), tmp_path / "a")
    kept = {folded(text) for text in all_examples(tmp_path / "a")["text"].to_pylist()}
    assert sum(summary.rows.values()) + summary.left_out["duplicate"] == len(records)
    either = [
        ({" ".join(one), " ".join(other)} & kept) for one, other in zip(texts, near, strict=False)
    ]
    assert sum(len(pair) == 1 for pair in either) >= 55  # 0.96 of them are expected
    assert all(either)
    assert sum(" ".join(text) in kept for text in half) >= 50
    assert "one word" in kept
    assert content(tmp_path / "a") == (
        ingested(text_spec(path, duplicates="near"), tmp_path / "b") and content(tmp_path / "b")
    )


def test_near_copies_in_a_script_without_spaces_are_found(tmp_path):
    made = random.Random(1)
    texts = [
        "".join(made.choices("天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往", k=40)) for _ in range(300)
    ]
    near = [f"{text[:-1]}新" for text in texts[:60]]
    records = [{"text": text, "label": "ab"[i % 2]} for i, text in enumerate([*texts, *near])]
    data = text_spec(write_jsonl(tmp_path / "x.jsonl", records), duplicates="near")
    assert 55 <= ingested(data, tmp_path / "a").left_out["duplicate"] <= 62


@pytest.mark.parametrize("form", ["chat", "tags"])
def test_turns_and_words_are_folded_each(tmp_path, form):
    def record(i, text):
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
        return {
            "messages": turns,
            "words": text.split(" "),
            "label": ["AB"[i % 2]] * len(text.split(" ")),
        }

    texts = [f"Is {i} even?" for i in range(100)] + ["is 1 EVEN?"]
    path = write_jsonl(tmp_path / "x.jsonl", [record(i, text) for i, text in enumerate(texts)])
    columns = {"messages": "messages"} if form == "chat" else {"words": "words"}
    data = text_spec(path, columns=columns, duplicates="folded")
    modality = "document" if form == "chat" else "words"
    summary = ingested(data, tmp_path / "out", modality=modality)
    assert summary.left_out == {"duplicate": 1}


def test_images_are_compared_by_their_pixels(tmp_path):
    for i in range(60):
        path = tmp_path / "d" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), min(i, 56)).save(path)
    summary = ingested(
        text_spec(
            tmp_path / "d", duplicates="exact", split={"train": 0.5, "validation": 0, "test": 0.5}
        ),
        tmp_path / "out",
        modality="image",
    )
    assert summary.left_out == {"duplicate": 3}


def test_a_group_stays_in_one_split(tmp_path):
    records = [{**row, "customer": f"c{i % 50}"} for i, row in enumerate(rows())]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    columns = {"key": "id", "group": "customer"}
    data = text_spec(path, columns=columns, slices=["customer"])
    summary = ingested(data, tmp_path / "out")
    table = all_examples(tmp_path / "out")
    pairs = set(zip(table["customer"].to_pylist(), table["split"].to_pylist(), strict=True))
    assert len(pairs) == 50
    assert {split for _, split in pairs} == set(SPLITS)
    assert sum(summary.rows.values()) == 300
    half = write_jsonl(tmp_path / "half.jsonl", records[150:])
    ingested(text_spec(half, columns=columns, slices=["customer"]), tmp_path / "half")
    later = all_examples(tmp_path / "half")
    assert set(zip(later["customer"].to_pylist(), later["split"].to_pylist(), strict=True)) <= pairs
    records[7]["customer"] = None
    write_jsonl(path, records)
    with pytest.raises(DataError, match="1 row without a group"):
        ingested(data, tmp_path / "refused")
    write_jsonl(
        path,
        [
            {**row, "customer": f"c{i % 50}", "text": f"text {i // 50}"}
            for i, row in enumerate(rows())
        ],
    )
    with pytest.raises(DataError, match="300 rows whose content stands in more than one split"):
        ingested(data, tmp_path / "refused")


def test_a_gap_leaves_time_before_validation_and_test(tmp_path):
    days = [
        {**row, "at": f"2026-{i // 28 + 1:02}-{i % 28 + 1:02}"} for i, row in enumerate(rows(336))
    ]
    path = write_jsonl(tmp_path / "x.jsonl", days)

    def spans(gap):
        split = {"by": "time", "train": 0.5, "validation": 0.25, "test": 0.25, "gap": gap}
        data = text_spec(path, columns={"time": "at"}, split=split, slices=["at"])
        summary = ingested(data, tmp_path / f"out{gap}")
        table = all_examples(tmp_path / f"out{gap}")
        times = collections.defaultdict(list)
        for at, name in zip(table["at"].to_pylist(), table["split"].to_pylist(), strict=True):
            times[name].append(at)
        return summary, {name: (min(found), max(found)) for name, found in times.items()}

    without, plain = spans(None)
    summary, found = spans("7 days")
    assert plain["train"] == ("2026-01-01", "2026-06-28")
    assert found["train"] == ("2026-01-01", "2026-06-23"), (
        "7 days before 2026-07-01 begin on the 24th"
    )
    assert found["validation"] == ("2026-07-01", "2026-09-23")
    assert found["test"] == plain["test"]
    assert without.left_out == {}
    assert summary.left_out == {"gap": 336 - sum(summary.rows.values())} == {"gap": 10}
    assert sum(sum(by.values()) for by in summary.class_rows.values()) == 326
    with pytest.raises(DataError, match="the split validation is empty"):
        spans("6 months")


@pytest.mark.parametrize(
    "setting",
    [
        "data.duplicates=drop",
        "data.split.gap=7",
        "data.split.gap=7_days",
        "data.split.gap=-1_days",
        "data.split.by=source data.columns.group=x",
        "task=image_classification data.duplicates=folded",
        "task=image_classification data.duplicates=near",
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, setting):
    path = tmp_path / "c.yaml"
    path.write_text("name: x\ntask: text_classification\ndata: {source: x.csv}\n")
    good = ["data.duplicates=folded", "data.columns.group=x"]
    assert load_target(path, good).data.columns.group == "x"
    with pytest.raises(SpecError, match=r"data\.(duplicates|split\.gap|columns\.group)"):
        load_target(path, [part.replace("_d", " d") for part in setting.split(" ")])
