"""What each kind of input promises: rows become examples, and requests the same contents."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rekindle.data.examples import modality_in, schema_of
from rekindle.data.roles import wanted_columns
from rekindle.errors import RequestError
from rekindle.modalities import MODALITIES, load_modality
from rekindle.modalities.base import InstanceError, Written
from rekindle.rows.columns import RawBatch, encodable
from rekindle.rows.findings import Findings
from rekindle.spec.checks import RESERVED
from rekindle.spec.model import ColumnsSpec, DataSpec

GREY = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)
CHAT = ColumnsSpec(messages="messages")
PAIR = ColumnsSpec(prompt="prompt", input="context", completion="answer")
TURNS = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Ho"), ("user", "Bye")]
SHAPED = {"image_shape": [2, 3, 1]}


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return file.getvalue()


def batch(**columns: list[object]) -> RawBatch:
    rows = len(next(iter(columns.values())))
    return RawBatch(columns, np.arange(rows) + 1, "rows.jsonl")


def sent(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


# name, columns of the config, settings of a model, a row of the source (its second one is at
# fault), what the example stores, its label, the fault
ROWS = {
    "a text": (
        "text",
        ColumnsSpec(),
        {},
        {"text": ["The box was wet.", "  "], "label": ["shipping", "other"]},
        "The box was wet.",
        "shipping",
        "1 row with an empty text or none",
    ),
    "a text with a number": (
        "text",
        ColumnsSpec(target="hours"),
        {},
        {"text": ["The box was wet.", ""], "hours": ["2.5", 1]},
        "The box was wet.",
        2.5,
        "1 row with an empty text or none",
    ),
    "words": (
        "words",
        ColumnsSpec(),
        {},
        {"tokens": [["Ada", "übt"], []], "label": [["NAME", 0], []]},
        '["Ada","übt"]',
        ["NAME", "0"],
        "1 row without a list of words",
    ),
    "an image": (
        "image",
        ColumnsSpec(),
        SHAPED,
        {"image": [png(GREY), b"GIF"], "label": [7, 8]},
        GREY.tobytes(),
        "7",
        "1 row with an image that cannot be read",
    ),
    "a document that is a text": (
        "document",
        ColumnsSpec(text="body"),
        {"form": "text"},
        {"body": ["Once upon a time", None]},
        '[["text","Once upon a time"]]',
        None,
        "1 row with an empty text or none",
    ),
    "a prompt with an input, and its completion": (
        "document",
        PAIR,
        {"form": "completion"},
        {"prompt": ["Add", "Add"], "context": ["2 and 2", None], "answer": ["4", " "]},
        '[["prompt","Add\\n\\n2 and 2"],["completion","4"]]',
        None,
        "1 row without a completion",
    ),
    "a chat": (
        "document",
        CHAT,
        {"form": "chat"},
        {"messages": [sent(TURNS), sent(TURNS[:2])]},
        json.dumps(TURNS, separators=(",", ":")),
        None,
        "1 row without a turn of the assistant",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_row_becomes_an_example_and_a_row_with_a_fault_is_noted(case):
    name, columns, _, rows, stored, label, fault = ROWS[case]
    modality = load_modality(name)
    reader = modality.reader(DataSpec(source="rows.jsonl", columns=columns))
    findings = Findings()
    assert list(reader.columns) == list(rows)
    values, is_fit = reader.content(batch(**rows), findings)
    assert (values.type, values[0].as_py()) == (modality.field.type, stored)
    assert is_fit.tolist() == [True, False]
    assert [problem.what for problem in findings.problems()] == [fault]
    assert reader.shape == ((2, 3, 1) if name == "image" else None)
    labels = reader.labels(batch(**rows), findings)
    assert (labels is None) == (modality.label_type is None) == (label is None)
    if labels is not None:
        assert labels[0][0].as_py() == label
        assert columns.target or labels[0].type == modality.label_type


@pytest.mark.parametrize("case", ROWS)
def test_a_request_a_row_of_a_file_and_the_example_hold_the_same_content(case):
    name, columns, settings, rows, stored, _, _ = ROWS[case]
    modality = load_modality(name)
    question = modality.question(columns, settings)
    content = modality.content(stored, settings.get("image_shape"))
    assert question.columns[0] == question.column
    of_a_request = {column: rows[column] for column in question.columns}
    value, _ = question.values(batch(**of_a_request), Findings())
    # what a chat goes on with behind its last answer is no part of the example's question
    if case == "a chat":
        assert question.content(value, "row 1") == TURNS
        return
    np.testing.assert_equal(question.content(value, "row 1"), content)
    request = json.loads(json.dumps(question.value(modality.evidence(content))))
    np.testing.assert_equal(question.content(request, "instance 0"), content)
    json_types = {"string": str, "array": list}
    assert isinstance(request, json_types[question.json_type])
    assert not question.in_csv or question.json_type == "string"


def test_a_chat_is_asked_by_its_turns_before_the_last_answer():
    question = load_modality("document").question(CHAT, {"form": "chat"})
    answered = [*TURNS, ("assistant", "So long")]
    (value,) = question.values(batch(messages=[sent(answered)]), Findings())
    assert question.content(value, "row 1") == TURNS
    stored = json.dumps(answered)
    assert load_modality("document").content(stored) == TURNS
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    assert list(question.values(batch(messages=[shared]), Findings())) == [sent([("user", "Hi")])]


@pytest.mark.parametrize(
    ("name", "columns", "settings", "value", "message"),
    [
        ("text", ColumnsSpec(), {}, " ", "a text that is not empty is needed"),
        ("text", ColumnsSpec(), {}, "\ud800", "a text that is not empty is needed"),
        ("words", ColumnsSpec(), {}, [], "a list of words is needed"),
        ("words", ColumnsSpec(), {}, ["a", 1], "a text that is not empty is needed"),
        ("image", ColumnsSpec(), SHAPED, "no base64!", "an image is base64 of a file"),
        ("image", ColumnsSpec(), SHAPED, [[0, 300, 0]], "pixels that are not whole numbers"),
        ("image", ColumnsSpec(), SHAPED, [[0, 1, 2]], "an image of another size"),
        ("document", ColumnsSpec(), {"form": "text"}, None, "a text that is not empty is needed"),
        ("document", CHAT, {"form": "chat"}, "Hi", "a list of {role, content} is needed"),
        ("document", CHAT, {"form": "chat"}, sent(TURNS[:3]), "the user's last"),
        ("document", CHAT, {"form": "chat"}, [{"role": "pirate", "content": "Ho"}], "role system"),
    ],
)
def test_a_value_that_is_no_content_is_refused_where_it_stands(
    name, columns, settings, value, message
):
    question = load_modality(name).question(columns, settings)
    with pytest.raises(InstanceError, match=r"^instance 3") as caught:
        question.content(value, "instance 3")
    assert message in str(caught.value)


def test_an_image_is_scaled_where_the_config_scales_to_the_size_of_the_version():
    image = load_modality("image")
    larger = base64.b64encode(png(np.full((4, 6, 1), 9, np.uint8))).decode()
    scaled = image.question(ColumnsSpec(), SHAPED, (16, 16))
    assert (scaled.kind, scaled.content(larger, "i").tolist()) == (
        "an image",
        np.full((2, 3, 1), 9).tolist(),
    )
    as_it_is = image.question(ColumnsSpec(), SHAPED)
    assert as_it_is.kind == "an image of 2 x 3 x 1"
    with pytest.raises(InstanceError, match="another size"):
        as_it_is.content(larger, "i")


def test_a_model_is_not_asked_in_another_form_than_it_was_trained_on():
    with pytest.raises(RequestError, match="form chat, not completion"):
        load_modality("document").question(PAIR, {"form": "chat"})


TEXTS = st.text(min_size=1, max_size=40).filter(lambda text: text.strip() and encodable(text))
CONTENTS = {
    "text": TEXTS,
    "words": st.lists(TEXTS, min_size=1, max_size=5),
    "image": st.binary(min_size=12, max_size=12).map(
        lambda pixels: np.frombuffer(pixels, np.uint8).reshape(2, 2, 3)
    ),
    "document": st.lists(st.tuples(st.just("user"), TEXTS), min_size=1, max_size=4),
}


@pytest.mark.parametrize("name", MODALITIES)
@given(data=st.data())
def test_contents_are_stored_and_sent_without_loss(name, data):
    content = data.draw(CONTENTS[name])
    modality = load_modality(name)
    settings = {"form": "chat", "image_shape": [2, 2, 3]}
    stored = pa.array([modality.stored(content)], modality.field.type)[0].as_py()
    np.testing.assert_equal(modality.content(stored, (2, 2, 3)), content)
    question = modality.question(CHAT, settings)
    value = question.value(modality.evidence(content))
    np.testing.assert_equal(question.content(value, "i"), content)
    signals = modality.signals(content, {1})
    assert all(np.isfinite(value) and value >= 0 for value in signals.values())
    assert ("length" in signals) == isinstance(modality, Written)


@pytest.mark.parametrize("name", MODALITIES)
def test_examples_tell_their_modality_and_no_slice_takes_its_column(name):
    schema = schema_of(name, ("lang",))
    assert schema.field(name) == load_modality(name).field
    assert modality_in(schema) is load_modality(name)
    assert name in RESERVED


def test_a_column_with_two_roles_is_read_as_content():
    columns = ColumnsSpec(text="body", label="body", key="body")
    assert wanted_columns(DataSpec(source="x", columns=columns), "text") == {"body": "text"}


def test_what_tells_copies_apart_are_the_roles_of_turns_too():
    stored = '[["user","a B"],["assistant","c"]]'
    assert load_modality("document").strings(stored) == ["user", "a B", "assistant", "c"]
    assert load_modality("words").strings('["a","B"]') == ["a", "B"]
    assert load_modality("text").strings('["a"]') == ['["a"]']


def test_a_modality_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(RequestError, match="`sound`") as caught:
        load_modality("sound")
    assert caught.value.problems[0].fix == "use one of text, words, image, document"


def test_names_need_no_pyarrow_and_no_modality_needs_torch():
    script = """
import sys
from rekindle.modalities import MODALITIES, load_modality
assert "pyarrow" not in sys.modules
for name in MODALITIES:
    load_modality(name)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
