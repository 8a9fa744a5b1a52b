"""Hugging Face data sets, read over real HTTP from a loopback hub, in a child process that knows no
other."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.data.corpora import LABELS, all_examples, rows
from tests.data.dialogues import dialogues
from tests.data.tagged import TAGS, texts
from tests.servers.hub import HubServer

CARD = """---
dataset_info:
  features:
  - {name: text, dtype: string}
  - name: label
    dtype: {class_label: {names: {'0': bad, '1': fair, '2': good}}}
  - {name: category, dtype: string}
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: validation, path: data/validation-*}
  - {split: test, path: data/test-*}
---
"""
CHILD = """
import json, sys
from pathlib import Path
from rekindle.data.fingerprint import fingerprint
from rekindle.data.ingest import ingest
from rekindle.errors import RekindleError
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from rekindle.tasks import load_task

answers = []
for i, fields in enumerate(json.loads(sys.argv[1])):
    task = fields.pop("task", "text_classification")
    data = DataSpec.model_validate(fields)
    try:
        found = fingerprint(task, data, ModelSpec(), TrainSpec(), champion=None)
        out, modality = Path(sys.argv[2], str(i)), load_task(task).modality
        summary = ingest(data, modality, found.window, out, store=sys.argv[3])
        answers.append({"data": found.data, **summary.model_dump(mode="json")})
    except RekindleError as error:
        answers.append({"error": type(error).__name__, "text": str(error)})
print(json.dumps(answers))
"""


def write_split(folder, split, records, hidden=False):
    numbers = [-1 if hidden else LABELS.index(record["label"]) for record in records]
    columns = {
        "text": [r["text"] for r in records],
        "label": pa.array(numbers, pa.int64()),
        "category": [r["category"] for r in records],
    }
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.table(columns), folder / f"data/{split}-00000-of-00001.parquet")


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "hub/datasets/acme/reviews"
    for split, start, end in (("train", 0, 200), ("validation", 200, 250), ("test", 250, 300)):
        write_split(folder, split, rows()[start:end])
    (folder / "README.md").write_text(CARD)
    with HubServer(tmp_path / "hub") as server:
        yield server


def ask(hub, tmp_path, *specs, store=""):
    """What a fresh process makes of the specs."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-c", CHILD, json.dumps(specs), str(tmp_path / "out"), store]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_streamed_and_pinned_to_a_commit(hub, tmp_path):
    own = {"source": "hub:acme/reviews", "split": {"by": "source"}, "slices": ["category"]}
    mixed = {"source": "hub:acme/reviews?split=train+validation&revision=main"}
    first, hashed, missing, no_split = ask(
        hub,
        tmp_path,
        own,
        mixed,
        {"source": "hub:acme/nothing"},
        {"source": "hub:acme/reviews?split=dev"},
    )
    assert first["rows"] == {"train": 200, "validation": 50, "test": 50}
    assert first["labels"] == list(LABELS)
    assert sum(hashed["rows"].values()) == 250
    assert (missing["error"], no_split["error"]) == ("DataError", "RequestError")
    assert "it has train, validation, test" in no_split["text"]
    commit = hub.commit("datasets", "acme/reviews")
    fetched = [line for line in hub.requests if line.startswith("GET") and ".parquet" in line]
    assert fetched
    assert all(commit in line for line in fetched)

    folder = hub.folder / "datasets/acme/reviews"
    write_split(folder, "test", rows()[250:], hidden=True)
    again, refused = ask(hub, tmp_path, mixed, own)
    assert again["data"] != hashed["data"]
    assert again["class_rows"] == hashed["class_rows"]
    assert "the split test is empty" in refused["text"]


@pytest.mark.slow
def test_a_file_of_the_hub_that_is_cut_short_is_refused_with_its_data_set(hub, tmp_path):
    file = hub.folder / "datasets/acme/reviews/data/test-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:-9])
    (refused,) = ask(hub, tmp_path, {"source": "hub:acme/reviews"})
    assert refused["error"] == "DataError"
    assert "cannot read `acme/reviews` from the hub: Could not open Parquet" in refused["text"]


@pytest.mark.slow
def test_workers_read_files_of_the_hub_apart(hub, tmp_path):
    folder = hub.folder / "datasets/acme/reviews/data"
    (folder / "train-00000-of-00001.parquet").unlink()
    for number in range(4):
        write_split(folder.parent, "train", rows()[50 * number : 50 * number + 50])
        name = f"train-{number:05}-of-00004.parquet"
        (folder / "train-00000-of-00001.parquet").rename(folder / name)
    own = {"source": "hub:acme/reviews", "split": {"by": "source"}}
    one, two = ask(hub, tmp_path, {**own, "workers": 1}, {**own, "workers": 2})
    assert one["rows"] == {"train": 200, "validation": 50, "test": 50}
    assert [file["batches"] for file in two["files"] if file["batches"]] == 6 * [[50]]
    assert one == two
    assert all_examples(tmp_path / "out/0")["text"].to_pylist() == [row["text"] for row in rows()]


CONFIGS = """---
configs:
- {config_name: day, data_files: [{split: train, path: day.parquet}]}
- {config_name: night, data_files: [{split: train, path: night.parquet}]}
---
"""


@pytest.mark.slow
def test_a_store_does_not_mix_the_configs_of_a_data_set(tmp_path):
    folder = tmp_path / "hub/datasets/acme/times"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CONFIGS)
    for name in ("day", "night"):
        table = pa.Table.from_pylist([{**row, "text": f"{name} {row['text']}"} for row in rows()])
        pa.parquet.write_table(table, folder / f"{name}.parquet")
    with HubServer(tmp_path / "hub") as hub:
        specs = [{"source": f"hub:acme/times?config={name}"} for name in ("day", "night")]
        ask(hub, tmp_path, *specs, store=str(tmp_path / "store"))
    for number, name in enumerate(("day", "night")):
        texts = all_examples(tmp_path / f"out/{number}")["text"].to_pylist()
        assert {text.split(" ")[0] for text in texts} == {name}


TAG_CARD = """---
dataset_info:
  features:
  - {name: id, dtype: string}
  - {name: tokens, sequence: string}
  - name: tags
    sequence:
      class_label: {names: {'0': B-CITY, '1': I-CITY, '2': O}}
configs:
- {config_name: default, data_files: [{split: train, path: train.parquet}]}
---
"""


@pytest.mark.slow
def test_tags_of_the_hub_have_names_and_hidden_ones_are_refused(tmp_path):
    folder = tmp_path / "hub/datasets/acme/cities"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(TAG_CARD)
    source = {
        "source": "hub:acme/cities",
        "columns": {"label": "tags", "key": "id"},
        "task": "token_classification",
    }

    def write(first):
        numbered = [
            {"id": r["id"], "tokens": r["tokens"], "tags": [TAGS.index(tag) for tag in r["tags"]]}
            for r in texts()
        ]
        numbered[0]["tags"][0] = first
        pa.parquet.write_table(pa.Table.from_pylist(numbered), folder / "train.parquet")

    with HubServer(tmp_path / "hub") as hub:
        write(2)
        (found,) = ask(hub, tmp_path, source)
        assert found["labels"] == list(TAGS)
        examples = all_examples(tmp_path / "out/0")
        tags = dict(zip(*(examples.column(c).to_pylist() for c in ("id", "label")), strict=True))
        assert tags == {
            r["id"]: ["O", *r["tags"][1:]] if r["id"] == "t0" else r["tags"] for r in texts()
        }
        write(-1)
        (refused,) = ask(hub, tmp_path, source)
    assert "none for word 1" in refused["text"]


@pytest.mark.slow
def test_chats_of_the_hub_keep_their_turns(tmp_path):
    folder = tmp_path / "hub/datasets/acme/chats"
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist([{**record, "label": 1} for record in dialogues()])
    pa.parquet.write_table(table, folder / "train.parquet")
    source = {"source": "hub:acme/chats", "columns": {"messages": "messages", "key": "id"}}
    with HubServer(tmp_path / "hub") as hub:
        (found,) = ask(hub, tmp_path, {**source, "task": "causal_lm"})
    assert sum(found["rows"].values()) == 120, found
    examples = all_examples(tmp_path / "out/0")
    first = dict(zip(*(examples.column(c).to_pylist() for c in ("id", "document")), strict=True))
    turns = [[t["role"], t["content"]] for t in dialogues()[0]["messages"]]
    assert json.loads(first["d0"]) == turns


@pytest.mark.slow
def test_a_card_that_names_files_elsewhere_is_refused_before_they_are_asked_for(tmp_path):
    with HubServer(tmp_path / "elsewhere") as elsewhere, HubServer(tmp_path / "hub") as hub:
        here = tmp_path / "private.csv"
        here.write_text("text,label\nmine,good\n")
        bad = {
            "url": f"data_files: {elsewhere.url}/x.csv",
            "chain": f"data_files: [{{split: train, path: ['x.csv::{elsewhere.url}/x.csv']}}]",
            "absolute": f"data_files: [{here}]",
            "above": f"data_files: ../../{here}",
            "folder": f"data_dir: {tmp_path}",
            "repository": "data_files: hf://datasets/acme/other/x.csv",
        }
        for name, files in bad.items():
            folder = hub.folder / "datasets/acme" / name
            folder.mkdir(parents=True)
            (folder / "README.md").write_text(
                f"---\nconfigs:\n- config_name: default\n  {files}\n---\n"
            )
        folder = hub.folder / "datasets/acme/yaml"  # what stands there replaces the card's
        folder.mkdir()
        (folder / "README.md").write_text("no front matter")
        (folder / ".huggingface.yaml").write_text(
            f"configs: [{{config_name: default, {bad['url']}}}]"
        )
        answers = ask(hub, tmp_path, *({"source": f"hub:acme/{name}"} for name in [*bad, "yaml"]))
    for answer in answers:
        assert "which is not a file of the data set" in answer["text"], answer
    assert not elsewhere.requests


@pytest.mark.slow
def test_a_hub_that_does_not_listen_is_refused_with_what_to_check(tmp_path):
    with HubServer(tmp_path / "hub") as hub:
        pass
    (refused,) = ask(hub, tmp_path, {"source": "hub:acme/reviews"})
    assert refused["error"] == "DataError"
    assert "cannot read `acme/reviews` from the hub: " in refused["text"]


@pytest.mark.slow
def test_a_card_that_cannot_be_read_is_no_card_without_names(hub, tmp_path):
    hub.down.add(".huggingface.yaml")  # what stands there is not known
    (refused,) = ask(hub, tmp_path, {"source": "hub:acme/reviews"})
    assert "cannot read `acme/reviews` from the hub" in refused["text"]
    assert not [line for line in hub.requests if ".parquet" in line]
