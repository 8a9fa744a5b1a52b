"""Causal language models, from documents to tensors and from a config to a network."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rekindle.errors import DataError, RequestError, UnsupportedError
from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.tasks import load_task
from rekindle.tasks.causal_lm import SMALLEST, CausalLM, train_bpe
from rekindle.tasks.chat import TEMPLATE
from tests.data.corpora import content
from tests.data.dialogues import FORMS, LLAMA, dialogues, model, sharded, source
from tests.servers.hub import HubServer

TASK = CausalLM()
SETTINGS = {"pad_token_id": 9}
TINY = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "mistral": {**LLAMA, "model_type": "mistral"},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
}
TRAIN = """
import json, sys
from rekindle.tasks.causal_lm import train_bpe
texts = json.loads(sys.stdin.read())
print(train_bpe([texts[:50], texts[50:]], vocab_size=600, min_frequency=2).to_str())
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Verified shards of each form."""
    folder = tmp_path_factory.mktemp("forms")
    return {
        form: sharded(
            folder / form,
            source(folder / form, form, columns={**FORMS[form]["columns"], "key": "id"}),
        )
        for form in FORMS
    }


def rows_by_id(shards, split="train"):
    return {row["id"]: row for row in shards.table(split).to_pylist()}


# the tokenizer


@pytest.mark.slow
def test_every_process_learns_the_same_tokenizer():
    texts = json.dumps([f"{r['text']} naïve 好的 {i}!" for i, r in enumerate(dialogues())])
    found = set()
    for parallel in ("true", "false", "true", "false"):
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": parallel, "PYTHONHASHSEED": "random"}
        done = subprocess.run(
            [sys.executable, "-c", TRAIN],
            input=texts,
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        found.add(hashlib.sha256(done.stdout.encode()).hexdigest())
    assert len(found) == 1


@settings(max_examples=60)
@given(st.text())
def test_the_tokenizer_loses_nothing(text):
    tokenizer = train_bpe([["some words to learn"]], vocab_size=SMALLEST + 9, min_frequency=1)
    # a special token's name in a text is that token, and decoding leaves it out
    if not any(name in text for name in ("<|pad|>", "<|end|>", "<|system|>", "<|user|>")):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


# targets


def decoded(shards, row):
    tokenizer = Tokenizer.from_file(str(shards.assets / "tokenizer.json"))
    ids = [i for i, mark in zip(row["input_ids"], row["supervised"], strict=True) if mark]
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("form", FORMS)
def test_the_targets_are_what_the_model_is_to_write(form, shards):
    found = rows_by_id(shards[form])
    tokenizer = Tokenizer.from_file(str(shards[form].assets / "tokenizer.json"))
    records = {record["id"]: record for record in dialogues()}
    for key, row in found.items():
        record = records[key]
        if form == "text":
            first = tokenizer.decode(row["input_ids"][:1])
            expected, text = record["text"][len(first) :] + "<|end|>", record["text"] + "<|end|>"
            covered = len(expected.encode()) - len("<|end|>")
        elif form == "completion":
            expected = record["answer"] + "<|end|>"
            text = record["question"] + expected
            covered = len(record["answer"].encode())
        else:
            turns = record["messages"]
            turns = turns[:-1] if turns[-1]["role"] == "user" else turns
            ended = [f"{t['content']}<|end|>" for t in turns if t["role"] == "assistant"]
            expected = "".join(ended)
            text = "".join(f"<|{t['role']}|>\n{t['content']}<|end|>" for t in turns)
            covered = len(expected.encode())
        assert decoded(shards[form], row) == expected
        assert tokenizer.decode(row["input_ids"], skip_special_tokens=False) == text
        assert row["target_bytes"] == covered
        assert row["supervised"][0] == 0


def test_shards_count_targets_and_tokens(shards):
    for found in shards.values():
        table = found.table("train")
        assert found.targets("train").tolist() == [
            sum(marks[1:]) for marks in table.column("supervised").to_pylist()
        ]
        assert found.lengths("train").max() <= 96
        assert (found.targets("train") > 0).all()


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=20), st.integers(0, 3)
)
def test_targets_leave_out_a_first_token_even_if_it_is_marked(marks, start):
    from rekindle.data.manifest import _supervised

    array = pa.array(marks, pa.list_(pa.uint8())).slice(start)
    assert _supervised(array).tolist() == [sum(row[1:]) for row in marks[start:]]


def test_what_is_too_long_is_cut_and_then_does_not_end(tmp_path):
    data = source(tmp_path, "text", max_length=12)
    found = sharded(tmp_path, data)
    table = found.table("train").to_pylist()
    assert {len(row["input_ids"]) for row in table} == {12}
    assert all(row["input_ids"][-1] != found.manifest.settings["eos_token_id"] for row in table)
    assert found.manifest.dropped == {}


def test_a_text_without_a_target_in_reach_is_left_out_and_counted(tmp_path, caplog):
    data = source(tmp_path, "chat", columns={"messages": "messages", "key": "id"}, max_length=18)
    with caplog.at_level(logging.WARNING):
        found = sharded(tmp_path, data)
    manifest = found.manifest
    assert sum(manifest.dropped.values()) + sum(manifest.rows.values()) == 120
    assert manifest.dropped["train"] > 0
    assert "left out" in caplog.text
    assert all(sum(row["supervised"]) > 0 for row in found.table("train").to_pylist())


def test_if_no_text_has_a_target_nothing_is_trained(tmp_path):
    data = source(tmp_path, "chat", max_length=8)
    with pytest.raises(DataError, match=r"raise data\.max_length"):
        sharded(tmp_path, data)


@pytest.mark.slow
def test_shards_do_not_depend_on_the_number_of_workers(tmp_path):
    found = []
    for workers in (1, 3):
        data = source(tmp_path / str(workers), "chat", shard_rows=30, workers=workers)
        sharded(tmp_path / str(workers), data)
        found.append(content(tmp_path / str(workers) / "shards"))
    assert {k: v for k, v in found[0].items() if k != "manifest.json"} == {
        k: v for k, v in found[1].items() if k != "manifest.json"
    }


# tensors


def slowly(ids, marks, slots, rows, length, pad):
    """The tensors of `collate`, one token at a time."""
    shape = (max(slots) + 1, length)
    made = {name: np.zeros(shape, np.int64) for name in ("position_ids", "documents")}
    made["input_ids"], made["labels"] = np.full(shape, pad), np.full(shape, -100)
    filled, count = [0] * shape[0], [0] * shape[0]
    for i, slot in enumerate(slots):
        count[slot] += 1
        for position, token in enumerate(ids[i] if rows[i] >= 0 else []):
            at = slot, filled[slot] + position
            made["input_ids"][at], made["position_ids"][at] = token, position
            made["documents"][at] = count[slot]
            if position + 1 < len(ids[i]) and marks[i][position + 1]:
                made["labels"][at] = ids[i][position + 1]
        filled[slot] += len(ids[i]) if rows[i] >= 0 else 0
    return made


@st.composite
def packs(draw):
    documents = draw(st.lists(st.integers(1, 7), min_size=1, max_size=9))
    ids = [[draw(st.integers(10, 99)) for _ in range(n)] for n in documents]
    marks = [[draw(st.integers(0, 1)) for _ in range(n)] for n in documents]
    steps = [draw(st.integers(0, 1)) for _ in documents[1:]]
    slots = np.cumsum([0, *steps])
    rows = [draw(st.sampled_from([0, 0, 0, -1])) for _ in documents]
    return ids, marks, slots, np.array(rows), draw(st.integers(0, 5))


@settings(max_examples=150)
@given(packs())
def test_tensors_are_those_made_one_token_at_a_time(made):
    ids, marks, slots, rows, more = made
    table = pa.table(
        {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "supervised": pa.array(marks, pa.list_(pa.uint8())),
        }
    )
    kept = np.array([len(row) for row in ids]) * (rows >= 0)
    longest = max(1, int(np.bincount(slots, weights=kept).max()))
    found = TASK.collate(table, SETTINGS, slots=slots, rows=rows, length=longest + more)
    for name, expected in slowly(ids, marks, slots, rows, longest + more, 9).items():
        assert found[name].dtype == torch.int64
        assert found[name].tolist() == expected.tolist(), name
    assert TASK.collate(table, SETTINGS, slots=slots, rows=rows)["labels"].shape[1] == longest


def test_texts_stand_alone_unless_told_otherwise(shards):
    found = shards["chat"]
    batch = found.take("train", [4, 1, 2])
    tensors = TASK.collate(batch, found.manifest.settings)
    lengths = found.lengths("train")[[4, 1, 2]]
    assert tensors["input_ids"].shape == (3, lengths.max())
    assert (tensors["documents"] > 0).sum(1).tolist() == lengths.tolist()
    assert (tensors["labels"] != -100).sum(1).tolist() == found.targets("train")[[4, 1, 2]].tolist()


def test_a_sequence_that_does_not_fit_is_refused(shards):
    batch = shards["text"].take("train", [0, 1])
    with pytest.raises(ValueError, match="does not fit"):
        TASK.collate(batch, SETTINGS, slots=np.array([0, 0]), length=10)


# networks


@pytest.mark.parametrize("name", TINY)
def test_a_config_becomes_a_network_of_its_family(name, shards, tmp_path):
    found = shards["chat"]
    settings_, spec = found.manifest.settings, ModelSpec(source=TINY[name])
    torch.manual_seed(0)
    network = TASK.build(spec, (), settings_, found.assets)
    config = network.config
    assert (config.pad_token_id, config.eos_token_id) == (0, 1)
    assert config.vocab_size == settings_["vocab_size"] <= 400
    assert TASK.weights(spec) is None
    inputs = TASK.collate(found.take("train", [0, 1]), settings_)
    TASK.save(network.eval(), tmp_path, (), settings_)
    again = TASK.load(tmp_path)
    assert torch.equal(TASK.logits(network, inputs), TASK.logits(again, inputs))
    meta = TASK.build(ModelSpec(source=str(tmp_path)), (), settings_, found.assets)
    assert not torch.equal(TASK.logits(meta.eval(), inputs), TASK.logits(again, inputs)), (
        "a folder gives the shape, its weights are read elsewhere"
    )
    assert TASK.weights(ModelSpec(source=str(tmp_path))) == tmp_path


@pytest.mark.parametrize(("wished", "rows"), [(1024, 1024), (10, None), (None, None)])
def test_an_inline_config_may_ask_for_more_rows_than_there_are_tokens(wished, rows, shards):
    found = shards["chat"]
    fields = {} if wished is None else {"vocab_size": wished}
    network = TASK.build(
        ModelSpec(source={**LLAMA, **fields}), (), found.manifest.settings, found.assets
    )
    tokens = found.manifest.settings["vocab_size"]
    assert network.get_input_embeddings().num_embeddings == (rows or tokens)
    assert tokens < 1024


def test_generation_is_greedy_and_stops_at_the_end(shards):
    found = shards["chat"]
    torch.manual_seed(0)
    network = TASK.build(model(), (), found.manifest.settings, found.assets).eval()
    prompts = [[("user", "Question 3?")], [("system", "Be brief."), ("user", "x" * 9_000)]]
    first, second = TASK.generate(network, prompts, found.manifest.settings, found.assets, 5)
    tokenizer = Tokenizer.from_file(str(found.assets / "tokenizer.json"))
    ids = tokenizer.encode("<|user|>\nQuestion 3?<|end|><|assistant|>\n").ids
    expected = []
    for _ in range(5):
        inputs = {"input_ids": torch.tensor([ids + expected])}
        expected.append(int(TASK.logits(network, inputs)[0, -1].argmax()))
    assert first == tokenizer.decode(expected)
    assert second
    with torch.no_grad():  # whatever comes, the end is most probable
        network.lm_head.weight.zero_()
        network.lm_head.weight[1] = 1
        network.model.norm.weight.fill_(1)
    network.model.norm = torch.nn.Sequential()
    network.model.norm.forward = lambda x: torch.ones_like(x)
    assert TASK.generate(network, prompts[:1], found.manifest.settings, found.assets, 5) == [""]


BASE = {"vocab_size": 400, "pad_token_id": 0, "eos_token_id": 1, "max_length": 64}


@pytest.mark.parametrize(
    ("fields", "changed", "error", "said"),
    [
        ({"max_position_embeddings": 32}, {}, RequestError, "32 positions"),
        ({"model_type": "phi"}, {}, UnsupportedError, "adds a bias"),
        ({"model_type": "lama"}, {}, RequestError, "not a configuration of lama"),
    ],
    ids=["too few positions", "biased", "unknown"],
)
def test_a_network_that_cannot_be_trained_right_is_refused(fields, changed, error, said, tmp_path):
    with pytest.raises(error, match=said):
        TASK.build(ModelSpec(source={**LLAMA, **fields}), (), {**BASE, **changed}, tmp_path)


def test_a_tokenizer_larger_than_the_embedding_is_refused(shards, tmp_path):
    found = shards["text"]
    TASK.build(model(), (), found.manifest.settings, found.assets).config.save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"knows \d+ tokens, the tokenizer 500"):
        TASK.build(ModelSpec(source=str(tmp_path)), (), {**BASE, "vocab_size": 500}, tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"source": {}}, "model_type"),
        ({"source": LLAMA, "tokenizer": {"vocab_size": 200}}, f"at least {SMALLEST}"),
        (
            {"source": "some/model", "tokenizer": {"vocab_size": 2000}},
            "does not fit the embeddings",
        ),
    ],
)
def test_a_config_that_can_never_work_is_refused_at_once(fields, said):
    data = DataSpec(source="x.jsonl")
    with pytest.raises(RequestError, match=said):
        load_task("causal_lm").check(data, ModelSpec.model_validate(fields))


# the hub

CHILD = """
import json, sys
from pathlib import Path
from safetensors import safe_open
from rekindle.errors import RekindleError
from rekindle.spec.model import ModelSpec
from rekindle.tasks import load_task
from tests.data.dialogues import sharded, source

out = Path(sys.argv[1])
answers = {}
spec = ModelSpec(source="acme/tiny")
shards = sharded(out, source(out, "chat"), spec)
answers["settings"] = dict(shards.manifest.settings)
answers["template"] = (shards.assets / "chat_template.jinja").read_text()
answers["first"] = shards.table("train").column("input_ids")[0].as_py()
task = load_task("causal_lm")
network = task.build(spec, (), shards.manifest.settings, shards.assets)
folder = task.weights(spec)
answers["files"] = sorted(p.name for p in folder.iterdir())
with safe_open(folder / "model.safetensors", "pt") as file:
    answers["names"] = sorted(file.keys())
    name = answers["names"][0]
    answers["differs"] = bool((file.get_tensor(name) != network.state_dict()[name]).any())
for name in ("acme/nothing", "acme/tiny"):
    spec = ModelSpec(source=name, tokenizer="acme/nothing" if name == "acme/tiny" else None)
    try:
        task.fit(lambda: iter(()), source(out, "chat"), spec, out)
    except RekindleError as error:
        answers[name] = str(error)
try:
    task.weights(ModelSpec(source="acme/nothing"))
except RekindleError as error:
    answers["weights"] = str(error)
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_a_model_of_the_hub_brings_its_tokenizer_config_and_weights(shards, tmp_path):
    found, repository = shards["chat"], tmp_path / "hub/models/acme/tiny"
    torch.manual_seed(1)
    network = TASK.build(model(), (), found.manifest.settings, found.assets)
    TASK.save(network, repository, (), found.manifest.settings)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (repository / name).write_bytes((found.assets / name).read_bytes())
    (repository / "chat_template.jinja").write_text(TEMPLATE.replace("<|", "<<|"))
    (repository / "unused.bin").write_text("large")
    with HubServer(tmp_path / "hub") as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path / "out")],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["settings"]["eos_token_id"] == 1
    assert answers["settings"]["vocab_size"] == found.manifest.settings["vocab_size"]
    assert "<<|" in answers["template"]
    ids = answers["first"]
    tokenizer = Tokenizer.from_file(str(found.assets / "tokenizer.json"))
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<<|")
    assert {"config.json", "model.safetensors"} <= set(answers["files"])
    assert "unused.bin" not in answers["files"]
    assert answers["names"] == sorted(network.state_dict())
    assert answers["differs"], "build must not load the weights"
    assert "cannot load the tokenizer `acme/nothing`" in answers["acme/nothing"]
    assert "cannot load the tokenizer `acme/nothing`" in answers["acme/tiny"]
    assert "cannot fetch the weights of `acme/nothing`" in answers["weights"]


def test_a_tokenizer_without_a_template_gets_ours(shards, tmp_path):
    found = shards["chat"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((found.assets / name).read_bytes())
    (tmp_path / "assets").mkdir()
    made = TASK.fit(
        lambda: iter(()),
        source(tmp_path, "chat"),
        ModelSpec(source=LLAMA, tokenizer=str(tmp_path)),
        tmp_path / "assets",
    )
    assert (tmp_path / "assets/chat_template.jinja").read_text() == TEMPLATE
    assert made == found.manifest.settings
    batch = pa.record_batch({"document": ['[["user","Hi"],["assistant","Ho"]]']})
    ours, theirs = (TASK.encode(batch, made, a) for a in (found.assets, tmp_path / "assets"))
    assert ours == theirs


def test_own_settings_name_the_form(shards):
    assert {form: s.manifest.settings["form"] for form, s in shards.items()} == {
        form: form for form in FORMS
    }
    assert all(s.manifest.settings["packing"] is True for s in shards.values())
