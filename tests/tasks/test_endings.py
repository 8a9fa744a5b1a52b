"""Chats end: what a template puts behind an answer is found by rendering, the first special token of it stops the writing, and an
answer without one gets the end-of-text token. Templates of the shapes that published models have (templates.py), and ten
published ones, where they are there."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from rekindle.errors import DataError, RequestError
from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.tasks import causal_lm
from rekindle.tasks.chat import ChatTemplate
from tests.tasks.templates import CHATML, IM, SHAPES, Shape, saved

SHARED = Path(__file__).parents[3] / "shared" / "chat-templates"
TASK = causal_lm.CausalLM()
DATA = DataSpec.model_validate(
    {"source": "x.jsonl", "columns": {"messages": "messages"}, "max_length": 256}
)
CHAT = [("user", "Hi"), ("assistant", "Hello d!"), ("user", "2 + 2?"), ("assistant", "4")]


def fitted(shape: Shape, folder: Path):
    """The settings of a task, and where its assets are."""
    assets = folder / "assets"
    assets.mkdir(parents=True)
    model = ModelSpec(source="x", tokenizer=str(saved(shape, folder / "tokenizer")))
    return TASK.fit(lambda: iter(()), DATA, model, assets), assets


def named(ids, assets):
    tokenizer = causal_lm._tokenizer(assets)
    return [tokenizer.id_to_token(i) for i in ids]


def encoded(chat, settings, assets):
    """The row of a chat, and its targets as texts, one for each answer."""
    batch = pa.record_batch({"document": [json.dumps(chat)]})
    columns = TASK.encode(batch, settings, assets)
    row = {name: column.to_pylist()[0] for name, column in columns.items()}
    runs, tokenizer = [[]], causal_lm._tokenizer(assets)
    for token, mark in zip(row["input_ids"] or [], row["supervised"], strict=False):
        if mark:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return row, [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_a_template_puts_behind_an_answer_is_found_by_rendering(shape):
    special = {"eos_token": shape.eos, "bos_token": "<s>"}
    endings = ChatTemplate(shape.template, special).endings()
    assert tuple(each.text[each.start : each.end] for each in endings) == shape.behind


@pytest.mark.parametrize("roles", [("user",), ("system", "user")], ids=len)
def test_the_ending_is_found_where_a_template_takes_a_single_answer(roles):
    refusal = "{{ raise_exception('one answer only') }}"
    source = f"{{% if messages|length != {len(roles) + 1} %}}{refusal}{{% endif %}}{CHATML}"
    (ending,) = ChatTemplate(source, {"eos_token": "</s>", "bos_token": "<s>"}).endings()
    assert (
        ending.text[ending.start : ending.end]
        == SHAPES["ChatML whose eos is another token"].behind[-1]
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_answer_ends_with_a_token_that_stops_the_writing(shape, tmp_path):
    settings, assets = fitted(shape, tmp_path)
    stops = named(settings["stop_token_ids"], assets)
    assert stops[0] == shape.eos
    assert shape.stop in ("", *stops)
    row, answers = encoded(CHAT, settings, assets)
    if shape is SHAPES["a prompt that opens a thought"]:
        assert row["input_ids"] is None
        assert row["refused"].startswith("opens the answer of turn 2 otherwise in a prompt")
        return
    assert row["refused"] is None
    assert len(answers) == 2
    for answer, content in zip(answers, ("Hello d!", "4"), strict=True):
        _, found, behind = answer.partition(content)
        assert found
        assert any(behind.strip().startswith(stop) for stop in stops), behind
    lacks = not shape.stop or shape is SHAPES["eos behind the last answer only"]
    assert settings["ends_added"] == lacks
    said = TASK.notices(settings)
    assert [f"each answer gets `{shape.eos}` behind it" in text for text in said] == [True] * lacks


def test_the_text_is_the_templates_own_where_it_ends_answers_itself(tmp_path):
    shape = SHAPES["another token between turns than behind the last"]
    settings, assets = fitted(shape, tmp_path)
    assert named(settings["stop_token_ids"], assets) == ["<|endoftext|>", "<|turn|>", "<|end|>"]
    row, answers = encoded(CHAT, settings, assets)
    text = causal_lm._tokenizer(assets).decode(row["input_ids"], skip_special_tokens=False)
    template = ChatTemplate(shape.template, settings["special_tokens"])
    assert text == template.render(CHAT)[0]
    assert answers == ["Hello d!<|turn|>\n", "4<|end|>\n<|endoftext|>"]


@pytest.mark.parametrize("answer", ["d", "im_end", "id", "|>", "end|>", "<|im_end|>"])
def test_an_answer_that_stands_in_its_own_terminator_keeps_the_terminator(answer):
    chat = [("user", "x"), ("assistant", answer)] * 2
    for shape in (SHAPES["ChatML whose eos is another token"], SHAPES["headers between tokens"]):
        template = ChatTemplate(shape.template, {"eos_token": shape.eos, "bos_token": "<s>"})
        text, spans = template.render(chat)
        assert [text[start:end] for start, end in spans] == [answer + shape.behind[0]] * 2


def test_texts_and_completions_stop_at_the_end_of_text_alone(tmp_path):
    data = DATA.model_copy(update={"columns": DATA.columns.model_validate({"text": "text"})})
    model = ModelSpec(source="x", tokenizer=str(saved(SHAPES["headers between tokens"], tmp_path)))
    settings = TASK.fit(lambda: iter(()), data, model, tmp_path)
    assert named(settings["stop_token_ids"], tmp_path) == ["<|end_of_text|>"]
    assert TASK.notices(settings) == []


def test_a_model_of_before_is_encoded_and_ends_as_it_was_trained(tmp_path):
    settings, assets = fitted(SHAPES["headings without any special token"], tmp_path)
    before = {
        k: v
        for k, v in settings.items()
        if k not in ("stop_token_ids", "answer_ends", "ends_added")
    }
    assert causal_lm.stop_tokens(before) == [settings["eos_token_id"]]
    _, answers = encoded(CHAT, before, assets)
    assert answers == ["Hello d!\n\n", "4\n\n"]


FAULTS = {
    "KeyError": "{{ messages[0].content.__getitem__ }}{{ dict(a=1)['b'].c }}",
    "ZeroDivisionError": "{{ 1 // 0 }}",
    "RecursionError": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "OverflowError": "{{ range(10 ** 9) | list }}",
    "MemoryError": "{{ 'a' * (2 ** 62) }}",
    "AttributeError": "{{ messages[0].content | attr('x') | map('y') | first.z }}",
    "IndexError": "{{ [] | random }}{{ '' | first | upper }}{{ [][3].x }}",
    "UnicodeError": "{{ '\\ud800'.encode('utf-8') }}",
}


@pytest.mark.parametrize("source", FAULTS.values(), ids=FAULTS)
def test_a_template_that_raises_anything_is_a_refusal_of_that_chat(source):
    template = ChatTemplate(
        CHATML + "{% if 'odd' in messages[0].content %}" + source + "{% endif %}",
        {"bos_token": "<s>", "eos_token": "</s>"},
    )
    template.render(CHAT)
    with pytest.raises(DataError, match="the chat template refuses a chat: "):
        template.render([("user", "odd"), ("assistant", "x")])


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ 'a }}", "{% endif %}", "{{ a | no_such }}", "{% generation %}"]
)
def test_a_template_that_is_no_program_is_refused_with_its_place(source, tmp_path):
    with pytest.raises(DataError, match="the chat template cannot be read") as refused:
        fitted(Shape(source, "</s>", (), ("", ""), ""), tmp_path)
    assert refused.value.problems[0].where == "model.tokenizer"


def test_a_template_that_refuses_every_chat_is_refused_before_rows_are_read(tmp_path):
    shape = Shape("{{ raise_exception('never') }}", "</s>", (), ("", ""), "")
    with pytest.raises(DataError, match="never") as refused:
        fitted(shape, tmp_path)
    assert refused.value.problems[0].where == "model.tokenizer"


def test_an_end_of_text_that_is_not_read_in_a_text_is_refused(tmp_path):
    """Nothing could end the answers of a template that has no token for it."""
    settings, assets = fitted(SHAPES["headings without any special token"], tmp_path)
    odd = {**settings, "special_tokens": {**settings["special_tokens"], "eos_token": "unheard"}}
    with pytest.raises(RequestError, match="does not read its own, `unheard`"):
        causal_lm._with_endings(odd, settings, assets)


# name: (the end-of-text token, other special tokens with their ids in the model's own vocabulary)
PUBLISHED = {
    "alpaca": ("</s>", {"</s>": 2}),
    "chatml": ("<|im_end|>", {}),
    "gemma-it": ("<eos>", {"<eos>": 1, "<end_of_turn>": 107, "<start_of_turn>": 106}),
    "llama-2-chat": ("</s>", {"</s>": 2}),
    "llama-3-instruct": (
        "<|end_of_text|>",
        {"<|end_of_text|>": 128001, "<|eot_id|>": 128009, "<|start_header_id|>": 128006},
    ),
    "mistral-instruct": ("</s>", {"</s>": 2}),
    "phi-3": (
        "<|endoftext|>",
        {"<|endoftext|>": 32000, "<|end|>": 32007, "<|assistant|>": 32001, "<|user|>": 32010},
    ),
    "qwen2.5-instruct": (
        "<|endoftext|>",
        {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<|im_start|>": 151644},
    ),
    "vicuna": ("</s>", {"</s>": 2}),
    "zephyr": ("</s>", {"</s>": 2, "<|user|>": 32001}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_stop_tokens_of_published_templates_are_the_recorded_ones(name, tmp_path):
    if not SHARED.is_dir():
        pytest.skip("the published templates are not on this machine")
    eos, ids = PUBLISHED[name]
    special = tuple(ids) or IM
    source = (SHARED / f"{name}.jinja").read_text()
    settings, assets = fitted(Shape(source, eos, special, ("", ""), ""), tmp_path)
    stops = named(settings["stop_token_ids"], assets)
    recorded = SHARED / f"{name}.generation.json"
    if recorded.is_file():
        assert {ids[stop] for stop in stops} <= set(
            json.loads(recorded.read_text())["stop_token_ids"]
        )
    _, answers = encoded(CHAT, settings, assets)
    assert not settings["ends_added"]
    assert all(any(stop in answer for stop in stops) for answer in answers)
    ends = {"gemma-it": "<end_of_turn>", "llama-3-instruct": "<|eot_id|>", "phi-3": "<|end|>"}
    assert ends.get(name, "<|im_end|>" if "<|im_end|>" in special else eos) in stops
