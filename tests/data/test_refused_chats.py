"""Chats that the tokenizer's template refuses: each is a row with a fault, named by file and line, left out where rows may be."""

from __future__ import annotations

import json

import pytest

from rekindle.app.preflight.rows import first_look
from rekindle.cli.main import invoke
from rekindle.data.quarantine import QUARANTINE
from rekindle.errors import DataError
from rekindle.launch.events import parse
from rekindle.spec.load import load_target
from rekindle.spec.model import DataSpec, ModelSpec
from tests.data.corpora import write_jsonl
from tests.data.dialogues import sharded
from tests.tasks.templates import SHAPES, saved

ALTERNATING = SHAPES["a role that is renamed, and no turn of the system"]
ODD = (37, 137)  # rows with two turns of the user in a row
CONFIG = """\
name: chats
task: causal_lm
data: {source: chats.jsonl, columns: {messages: messages}, max_length: 96, ON_BAD_ROWS}
model: {source: {model_type: llama, hidden_size: 16, num_hidden_layers: 1}, tokenizer: ./tokenizer}
"""


def chats(folder, count=200, odd=ODD):
    rows = []
    for i in range(count):
        turns = [("user", f"Question {i}"), ("assistant", f"Answer {i}")]
        if i in odd:
            turns = [turns[0], *turns]
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append({"id": f"c{i}", "messages": messages})
    return write_jsonl(folder / "chats.jsonl", rows)


def data(folder, columns=None, **fields):
    given = {"source": str(folder / "chats.jsonl"), "max_length": 96, **fields}
    given["columns"] = {"messages": "messages", **(columns or {})}
    return DataSpec.model_validate(given)


@pytest.fixture
def model(tmp_path):
    return ModelSpec(source="x", tokenizer=str(saved(ALTERNATING, tmp_path / "tokenizer")))


def test_a_chat_that_the_template_refuses_names_its_row(tmp_path, model):
    chats(tmp_path)
    with pytest.raises(DataError) as refused:
        sharded(tmp_path, data(tmp_path), model)
    (problem,) = refused.value.problems
    assert problem.what == "2 rows whose chat the tokenizer's template refuses or alters"
    assert "chats.jsonl:38 (refuses a chat: Conversation roles must alternate)" in problem.where
    assert "chats.jsonl:138 " in problem.where
    assert "data.on_bad_rows: drop" in problem.fix


def test_a_row_with_a_key_is_named_by_it(tmp_path, model):
    chats(tmp_path)
    with pytest.raises(DataError, match="key c37 ") as refused:
        sharded(tmp_path, data(tmp_path, {"key": "id"}), model)
    assert "key c137 " in str(refused.value)


def test_refused_chats_are_left_out_counted_and_listed(tmp_path, model):
    file = chats(tmp_path)
    lines = file.read_text().splitlines()
    lines[4] = "{broken"
    file.write_text("\n".join(lines))
    shards = sharded(tmp_path, data(tmp_path, on_bad_rows="drop", max_bad_rows=3), model)
    assert shards.manifest.bad_rows == {"malformed": 1, "template": 2}
    assert sum(shards.manifest.rows.values()) == 197
    assert not shards.manifest.dropped
    listed = (tmp_path / "shards" / QUARANTINE).read_text().splitlines()
    assert [json.loads(line)["place"] for line in listed] == ["chats.jsonl:38", "chats.jsonl:138"]
    assert {json.loads(line)["kind"] for line in listed} == {"template"}
    assert "refused" not in shards.table("train").column_names


@pytest.mark.parametrize("limit", [2, 0.014])
def test_refused_chats_and_rows_that_cannot_be_read_share_a_limit(tmp_path, model, limit):
    file = chats(tmp_path)
    lines = file.read_text().splitlines()
    lines[4] = "{broken"
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match="3 of 200 rows have faults, more than data"):
        sharded(tmp_path, data(tmp_path, on_bad_rows="drop", max_bad_rows=limit), model)
    assert not (tmp_path / "shards" / "manifest.json").exists()


def test_chats_that_are_all_refused_are_an_error_also_where_rows_may_be_left_out(tmp_path, model):
    chats(tmp_path, odd=range(200))
    with pytest.raises(DataError, match="200 rows whose chat"):
        sharded(tmp_path, data(tmp_path, on_bad_rows="drop", max_bad_rows=0.99), model)


def test_a_template_that_ends_no_answer_is_noticed(tmp_path, capfd):
    chats(tmp_path, odd=())
    shape = SHAPES["headings without any special token"]
    model = ModelSpec(source="x", tokenizer=str(saved(shape, tmp_path / "tokenizer")))
    shards = sharded(tmp_path, data(tmp_path), model)
    events = [event for line in capfd.readouterr().out.splitlines() if (event := parse(line))]
    (notice,) = shards.manifest.notices
    assert "each answer gets `</s>` behind it" in notice
    assert notice in [event.get("text") for event in events]


@pytest.mark.parametrize(
    ("drop", "odd", "expected"),
    [
        (
            "on_bad_rows: refuse",
            ODD,
            ["2 rows whose chat the tokenizer's template refuses or alters"],
        ),
        ("on_bad_rows: drop", ODD, []),
        ("on_bad_rows: refuse", (), []),
        (
            "on_bad_rows: drop",
            range(200),
            ["200 rows whose chat the tokenizer's template refuses or alters"],
        ),
    ],
)
def test_doctor_renders_the_first_chats_by_the_tokenizer_of_a_folder(
    tmp_path, monkeypatch, drop, odd, expected
):
    monkeypatch.chdir(tmp_path)
    saved(ALTERNATING, tmp_path / "tokenizer")
    chats(tmp_path, odd=odd)
    (tmp_path / "c.yaml").write_text(CONFIG.replace("ON_BAD_ROWS", drop))
    problems = first_look(load_target(tmp_path / "c.yaml"))
    assert [problem.what for problem in problems] == expected
    assert all("chats.jsonl:" in problem.where for problem in problems)


def test_doctor_says_that_a_template_is_no_program(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = saved(ALTERNATING, tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text("{% for %}")
    chats(tmp_path, odd=())
    (tmp_path / "c.yaml").write_text(CONFIG.replace("ON_BAD_ROWS", "on_bad_rows: refuse"))
    assert invoke(["doctor", "c.yaml"]) == 2
    shown = capsys.readouterr()
    assert "the chat template cannot be read" in shown.out + shown.err
