"""Texts, pairs and chats become documents, and what is none is refused with its row."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from rekindle.data.fingerprint import fingerprint
from rekindle.errors import DataError
from rekindle.spec.model import DataSpec, TrainSpec
from tests.data.corpora import all_examples, content, ingested, text_spec, write_jsonl
from tests.data.dialogues import FORMS, dialogues, model, source, turn

GOOD = [turn("user", "Hi"), turn("assistant", "Hello")]


def documents(folder):
    table = all_examples(folder)
    return dict(
        zip(table.column("id").to_pylist(), table.column("document").to_pylist(), strict=True)
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_list_of_turns(form, tmp_path):
    data = source(tmp_path, form, slices=["topic"], columns={**FORMS[form]["columns"], "key": "id"})
    summary = ingested(data, tmp_path / "out", modality="document")
    assert sum(summary.rows.values()) == 120
    assert (summary.labels, summary.class_rows) == ((), {})
    found = documents(tmp_path / "out")
    for record in dialogues():
        expected = {
            "text": [["text", record["text"]]],
            "completion": [["prompt", record["question"]], ["completion", record["answer"]]],
            "chat": [[t["role"], t["content"]] for t in record["messages"]],
        }[form]
        assert json.loads(found[record["id"]]) == expected
    assert "label" not in all_examples(tmp_path / "out").schema.names
    assert set(all_examples(tmp_path / "out").column("topic").to_pylist()) == {"t0", "t1", "t2"}


@pytest.mark.parametrize("form", FORMS)
def test_parquet_and_csv_give_the_same_examples_as_json(form, tmp_path):
    data = source(tmp_path, form, columns={**FORMS[form]["columns"], "key": "id"})
    ingested(data, tmp_path / "json", modality="document")
    table = pa.Table.from_pylist(dialogues())
    pa.parquet.write_table(table, tmp_path / "d.parquet")
    with (tmp_path / "d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "question", "answer"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(dialogues())
    for name in ("d.parquet", "d.csv") if form != "chat" else ("d.parquet",):
        other = data.model_copy(update={"source": str(tmp_path / name)})
        ingested(other, tmp_path / name.replace(".", "-"), modality="document")
        found = content(tmp_path / name.replace(".", "-"))
        assert {f: h for f, h in found.items() if f != "summary.json"} == {
            f: h for f, h in content(tmp_path / "json").items() if f != "summary.json"
        }


# name: (value of `messages`, what the message must hold)
REFUSED = {
    "no list": ("Hi", ["1 row without a chat", "x.jsonl:3 (Hi)"]),
    "null": (None, ["without a chat", "x.jsonl:3"]),
    "an empty list": ([], ["without a chat"]),
    "a list of texts": (["Hi"], ["without a chat", "(Hi)"]),
    "a turn without a role": ([{"content": "Hi"}], ["without a chat"]),
    "a turn without content": ([{"role": "user", "content": None}], ["without a chat"]),
    "content in parts": ([{"role": "user", "content": [{"type": "text"}]}], ["without a chat"]),
    "a turn that says more": (
        [{**GOOD[0], "tool_calls": [1]}, GOOD[1]],
        ["without a chat", "with no other keys"],
    ),
    "an unknown role": ([turn("human", "Hi"), GOOD[1]], ["with a role that is unknown", "(human)"]),
    "a system turn out of place": (
        [*GOOD, turn("system", "Be brief.")],
        ["out of place", "(system)"],
    ),
    "an empty turn": ([GOOD[0], turn("assistant", " \n")], ["with an empty turn", "(assistant)"]),
    "no answer": ([GOOD[0]], ["without a turn of the assistant"]),
    "half a surrogate pair": ([GOOD[0], turn("assistant", "\ud800")], ["not UTF-8", "x.jsonl:3"]),
}


@pytest.mark.parametrize(("messages", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_chat_is_refused_with_its_row(messages, said, tmp_path):
    records = dialogues()
    records[2]["messages"] = messages
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataSpec.model_validate({"source": str(file), **FORMS["chat"]})
    with pytest.raises(DataError) as caught:
        ingested(data, tmp_path / "out", modality="document")
    for part in said:
        assert part in str(caught.value)
    assert not (tmp_path / "out/summary.json").exists()


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("question", "", "1 row without a prompt"),
        ("answer", " ", "1 row without a completion"),
        ("answer", 5, "wrong type"),
    ],
)
def test_a_pair_needs_both_parts(column, value, said, tmp_path):
    records = dialogues()
    records[2][column] = value
    file = write_jsonl(tmp_path / "x.jsonl", records)
    data = DataSpec.model_validate({"source": str(file), **FORMS["completion"]})
    with pytest.raises(DataError, match=said):
        ingested(data, tmp_path / "out", modality="document")


def test_a_missing_column_says_which_there_are(tmp_path):
    data = source(tmp_path, "chat", columns={"messages": "message"})
    with pytest.raises(DataError, match="did you mean `messages`"):
        ingested(data, tmp_path / "out", modality="document")


def test_one_chat_in_two_splits_is_a_leak(tmp_path):
    records = dialogues()
    for record in records:
        record["messages"] = records[0]["messages"]
    file = write_jsonl(tmp_path / "x.jsonl", records)
    data = DataSpec.model_validate(
        {"source": str(file), "columns": {"messages": "messages", "key": "id"}}
    )
    with pytest.raises(DataError, match="stands in more than one split"):
        ingested(data, tmp_path / "out", modality="document")


def test_an_empty_split_is_refused_without_talk_of_classes(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", dialogues(2))
    data = DataSpec.model_validate({"source": str(file), **FORMS["chat"]})
    with pytest.raises(DataError) as caught:
        ingested(data, tmp_path / "out", modality="document")
    assert "is empty" in str(caught.value)
    assert "class" not in str(caught.value)


def test_the_fingerprint_of_a_window_follows_its_chats_only(tmp_path):
    def key(records):
        file = write_jsonl(tmp_path / "w.jsonl", records)
        data = DataSpec.model_validate(
            {
                "source": str(file),
                "columns": {"messages": "messages", "time": "month"},
                "window": {"size": "3 months", "end": "2026-06"},
            }
        )
        return fingerprint("causal_lm", data, model(), TrainSpec(), champion=None).data

    records = dialogues()
    before = key(records)
    records[0]["messages"] = GOOD  # January lies outside
    assert key(records) == before
    records[4]["messages"] = GOOD  # May lies inside
    assert key(records) != before


@pytest.mark.parametrize("by", ["hash", "time"])
def test_documents_split_by_hash_and_by_time(by, tmp_path):
    columns = {"messages": "messages", "time": "month"}
    data = source(tmp_path, "chat", columns=columns, split={"by": by})
    summary = ingested(data, tmp_path / "out", modality="document")
    assert all(summary.rows.values())


def test_the_shipped_conversations_are_what_their_script_writes(tmp_path):
    folder = Path(__file__).parents[2] / "configs/data"
    shutil.copy(folder / "make_chat.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "make_chat.py"], check=True)
    assert (tmp_path / "chat.jsonl").read_bytes() == (folder / "chat.jsonl").read_bytes()


def test_a_header_whose_quote_never_ends_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text('text,label,"open\n' + "a,b\n" * 40_000)
    spec = text_spec(tmp_path / "a.csv", columns={"text": "text", "label": "label"})
    with pytest.raises(DataError, match="the header cannot be read"):
        ingested(spec, tmp_path)


def conversations(record):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in record["messages"]]


def forms_of(folder):
    """The same dialogues as OpenAI, ShareGPT, Alpaca and others write them: files and columns."""
    records = dialogues()
    asked = [
        {"prompt": r["question"] + "\n\nBriefly." * (i % 2), "completion": r["answer"]}
        for i, r in enumerate(records)
    ]
    alpaca = [
        {"instruction": r["question"], "input": ["", "Briefly."][i % 2], "output": r["answer"]}
        for i, r in enumerate(records)
    ]
    for name, rows in {
        "openai": [{"messages": r["messages"]} for r in records],
        "sharegpt": [{"conversations": conversations(r)} for r in records],
        "alpaca": alpaca,
        "asked": asked,
    }.items():
        (folder / name).mkdir()
        write_jsonl(folder / name / "x.jsonl", rows)
    return {
        "openai": {"messages": "messages"},
        "sharegpt": {"messages": "conversations"},
        "alpaca": {"prompt": "instruction", "input": "input", "completion": "output"},
        "asked": {"prompt": "prompt", "completion": "completion"},
    }


def test_forms_of_others_give_equal_examples(tmp_path):
    contents = {}
    for name, columns in forms_of(tmp_path).items():
        data = text_spec(tmp_path / name / "x.jsonl", columns=columns)
        ingested(data, tmp_path / name / "out", modality="document")
        contents[name] = content(tmp_path / name / "out")
        del contents[name]["summary.json"]  # has the hash of the file
    assert contents["openai"] == contents["sharegpt"]
    assert contents["alpaca"] == contents["asked"]
    assert contents["openai"] != contents["asked"]


def test_rows_of_a_known_form_are_refused_with_the_columns_to_set(tmp_path):
    for name, columns in forms_of(tmp_path).items():
        with pytest.raises(DataError) as caught:
            ingested(text_spec(tmp_path / name / "x.jsonl"), tmp_path / "out", modality="document")
        (problem,) = caught.value.problems
        shown = "{" + ", ".join(f"{role}: {column}" for role, column in columns.items()) + "}"
        assert problem.fix == f"causal_lm reads rows like these with {shown} in data.columns"


@pytest.mark.parametrize(
    ("turns", "kind"),
    [
        ([{"from": "robot", "value": "x"}], "role"),
        ([{"from": "human", "value": None}], "chat"),
        ([{"from": "human", "value": "x"}], "no answer"),
        ([{"from": 1, "value": "x"}], "role"),
        ([{"from": "human", "value": "x"}, {"role": "assistant", "content": "y"}], "chat"),
        ([{"from": "human", "value": ["x"]}], "chat"),
        ([{"from": "human", "value": ""}], "empty turn"),
    ],
)
def test_turns_of_sharegpt_have_the_faults_of_others(tmp_path, turns, kind):
    path = write_jsonl(
        tmp_path / "x.jsonl", [{"c": conversations(r)} for r in dialogues()] + [{"c": turns}]
    )
    data = text_spec(path, columns={"messages": "c"}, on_bad_rows="drop")
    assert ingested(data, tmp_path / "out", modality="document").bad_rows == {kind: 1}


def test_an_input_that_is_no_text_is_a_fault(tmp_path):
    rows = [{"a": f"q {i}", "b": "yes", "c": 1 if i == 7 else None} for i in range(200)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    columns = {"prompt": "a", "completion": "b", "input": "c"}
    data = text_spec(path, columns=columns, on_bad_rows="drop")
    summary = ingested(data, tmp_path / "out", modality="document")
    assert (summary.bad_rows, sum(summary.rows.values())) == ({"type": 1}, 199)
