"""What a language model learns: a text, a prompt with its completion, or a chat.

Examples store it as JSON, a list of [role, content] (turns.py). Which of the three forms it is
the columns of the config say (`ColumnsSpec.form`), and the settings of a trained model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from rekindle.errors import RequestError
from rekindle.modalities.base import (
    InstanceError,
    JsonType,
    Question,
    Reader,
    Shape,
    Written,
    json_of,
    sent_text,
)
from rekindle.modalities.turns import (
    ROLE_OF_FORM,
    ROLES,
    Turn,
    keys_with_value,
    prompt_of,
    with_roles,
)
from rekindle.rows import Columns, Kind
from rekindle.rows.columns import Mask, RawBatch, as_python, encodable, texts, with_mask
from rekindle.rows.findings import Findings
from rekindle.spec.model import ColumnsSpec, DataSpec

Turns = list[Turn]


class Document(Written[Turns]):
    """Its content is the turns that a model is given, (role, text) each."""

    field: ClassVar[pa.Field] = pa.field("document", pa.string())
    label_type: ClassVar[pa.DataType | None] = None

    def reader(self, data: DataSpec, shape: Shape | None = None) -> Reader:
        if data.columns.form == "chat":
            assert data.columns.messages is not None
            return _ChatReader(data.columns.messages)
        return _PartsReader(data.columns)

    def content(self, stored: str, shape: Shape | None = None) -> Turns:
        """The turns before the answer."""
        return prompt_of([(role, text) for role, text in json.loads(stored)])

    def texts(self, content: Turns) -> list[str]:
        return [text for _, text in content]

    def question(
        self,
        names: ColumnsSpec,
        settings: Mapping[str, Any],
        image_size: tuple[int, int] | None = None,
    ) -> Question[Turns]:
        form = settings.get("form", "")
        if names.form != form:
            message = f"the model was trained on documents of the form {form}, not {names.form}"
            raise RequestError(message, where="data.columns", fix="name the columns as in training")
        if names.messages is not None:
            return ChatQuestion(names.messages)
        if names.prompt is not None and names.completion is not None:
            return PromptQuestion(names.prompt, names.input)
        return BeginningQuestion(names.text)


class _Unlabelled(Reader):
    def labels(self, raw: RawBatch, findings: Findings) -> None:
        return None


class _ChatReader(_Unlabelled):
    def __init__(self, column: str) -> None:
        self._column = column
        self.columns = {column: "list"}

    def content(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask]:
        documents: list[str | None] = []
        for row, value in enumerate(raw.columns[self._column]):
            turns: Any = with_roles(as_python(value))  # a chat where `_chat_fault` finds nothing
            fault, detail = _chat_fault(turns)
            if fault:
                findings.add(fault, raw.place(row), detail)
                documents.append(None)
            else:
                documents.append(json_of([(turn["role"], turn["content"]) for turn in turns]))
        return with_mask(documents, pa.string())


class _PartsReader(_Unlabelled):
    """Documents of one content for each role, in a column each."""

    def __init__(self, names: ColumnsSpec) -> None:
        self._input: str | None = None
        self._columns_by_role = {"text": names.text}
        if names.prompt is not None and names.completion is not None:
            self._input = names.input
            self._columns_by_role = {"prompt": names.prompt, "completion": names.completion}
        self.columns = self._columns()

    def _columns(self) -> Columns:
        columns: dict[str, Kind] = {}
        for role, column in self._columns_by_role.items():
            columns[column] = "text"
            if role == "prompt" and self._input is not None:
                columns[self._input] = "text"
        return columns

    def content(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask]:
        fit = np.ones(len(raw), bool)
        contents: dict[str, list[str | None]] = {}
        for role, column in self._columns_by_role.items():
            column_texts = texts(raw, column, "text", findings)
            for row in np.flatnonzero(column_texts.blank).tolist():
                findings.add(f"empty {role}", raw.place(row))
            below = self._input if role == "prompt" else None
            contents[role], refused = _with_input(raw, column_texts.values, below, findings)
            fit &= ~(column_texts.noted | column_texts.blank | refused)
        documents: list[str | None] = []
        for row, is_fit in enumerate(fit.tolist()):
            turns = [(role, contents[role][row]) for role in contents]
            documents.append(json_of(turns) if is_fit else None)
        return with_mask(documents, pa.string())


def _with_input(
    raw: RawBatch, prompts: pa.Array, column: str | None, findings: Findings
) -> tuple[list[str | None], Mask]:
    """Prompts, the text of `column` below each, if any; and which texts were refused."""
    if column is None:
        return prompts.to_pylist(), np.zeros(len(prompts), bool)
    inputs = texts(raw, column, "text", findings)
    joined = []
    for prompt, below in zip(prompts.to_pylist(), inputs.values.to_pylist(), strict=True):
        if prompt and below and below.strip():
            # as templates of instruction data put the input below the instruction
            prompt = f"{prompt}\n\n{below}"
        joined.append(prompt)
    return joined, inputs.noted


def _chat_fault(turns: object) -> tuple[str, object]:
    """What keeps a value from being a chat, and the part at fault; "" for nothing."""
    if not isinstance(turns, list) or not turns:
        return "chat", turns
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or keys_with_value(turn) != {"role", "content"}:
            return "chat", turn
        if not isinstance(turn["content"], str):
            return "chat", turn
        if turn["role"] not in ROLES or (turn["role"] == "system" and number):
            return "role", turn["role"]
        if not turn["content"].strip():
            return "empty turn", turn["role"]
        if not encodable(turn["content"]):
            return "undecodable", ascii(turn["content"])
    if all(turn["role"] != "assistant" for turn in turns):
        return "no answer", turns[-1]["content"]
    return "", None


class _OneTextQuestion(Question[Turns]):
    """Asks with one text, as a document of one turn."""

    role: ClassVar[str]
    json_type: ClassVar[JsonType] = "string"
    in_csv: ClassVar[bool] = True

    def content(self, value: object, place: str) -> Turns:
        return [(self.role, sent_text(value, place))]

    def value(self, evidence: str) -> str:
        *_, (_, text) = json.loads(evidence)
        return str(text)


@dataclasses.dataclass(frozen=True)
class BeginningQuestion(_OneTextQuestion):
    """Asks with the beginning of a text."""

    column: str
    role: ClassVar[str] = ROLE_OF_FORM["text"]

    @property
    def kind(self) -> str:
        return "the beginning of a text"

    def values(self, raw: RawBatch, findings: Findings) -> Iterable[object]:
        values: list[str | None] = texts(raw, self.column, "text", findings).values.to_pylist()
        return values


@dataclasses.dataclass(frozen=True)
class PromptQuestion(_OneTextQuestion):
    """Asks with a prompt. `input` is the column with a text that a file may have below the
    prompt; a request puts both into one text."""

    column: str
    input: str | None = None
    role: ClassVar[str] = ROLE_OF_FORM["completion"]

    @property
    def columns(self) -> tuple[str, ...]:
        if self.input is None:
            return (self.column,)
        return (self.column, self.input)

    @property
    def kind(self) -> str:
        return "a prompt"

    def values(self, raw: RawBatch, findings: Findings) -> Iterable[object]:
        prompts = texts(raw, self.column, "text", findings).values
        values, _ = _with_input(raw, prompts, self.input, findings)
        return values


@dataclasses.dataclass(frozen=True)
class ChatQuestion(Question[Turns]):
    """Asks with the turns of a chat, whose last one is the user's."""

    column: str
    json_type: ClassVar[JsonType] = "array"
    in_csv: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return "a chat"

    def content(self, value: object, place: str) -> Turns:
        turns = []
        if isinstance(value, list):
            turns = [_plain_turn(turn) for turn in value]
        is_chat = all(turn.get("role") in ROLES and len(turn) == 2 for turn in turns)
        if not turns or not is_chat or turns[-1]["role"] == "assistant":
            message = f"a list of {{role, content}} is needed, role {', '.join(ROLES)}, "
            raise InstanceError(f"{place}: {message}the user's last")
        content = Turns()
        for number, turn in enumerate(turns):
            text = sent_text(turn.get("content"), f"{place}, turn {number}")
            content.append((turn["role"], text))
        return content

    def values(self, raw: RawBatch, findings: Findings) -> Iterable[object]:
        for value in raw.columns[self.column]:
            yield _without_answer(with_roles(as_python(value)))

    def value(self, evidence: str) -> object:
        return [{"role": role, "content": text} for role, text in json.loads(evidence)]


def _without_answer(turns: object) -> object:
    """Of a chat that ends with an answer, the turns before it; all else as it is."""
    if isinstance(turns, list) and len(turns) > 1:
        last_turn = turns[-1]
        if isinstance(last_turn, dict) and last_turn.get("role") == "assistant":
            return turns[:-1]
    return turns


def _plain_turn(turn: object) -> dict[str, Any]:
    """A turn without what is null; what consists of parts of text alone is one text."""
    if not isinstance(turn, dict):
        return {}
    fields = {name: value for name, value in turn.items() if value is not None}
    parts = fields.get("content")
    if isinstance(parts, list):
        part_texts = _part_texts(parts)
        if part_texts is not None:
            fields["content"] = "\n".join(part_texts)
    return fields


def _part_texts(parts: list[object]) -> list[str] | None:
    """The texts of OpenAI's content parts; None where one of them is no text."""
    part_texts = list[str]()
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        text = part.get("text")
        if not isinstance(text, str):
            return None
        part_texts.append(text)
    return part_texts
