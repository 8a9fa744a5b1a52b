"""Columns whose rows are more than one text. A row that is not what its column has to hold is noted
and left out.

What a language model reads has one form whatever its source: JSON, a list of [role, content]. A
plain text has the role `text`, a pair `prompt` and `completion`, and the turns of a chat have their
own roles. What a tagger reads are lists of words, and a tag for each word."""

import json
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.data.columns import (
    Mask,
    RawBatch,
    as_python,
    encodable,
    scalar_text,
    texts,
    with_mask,
)
from rekindle.data.validate import Findings
from rekindle.spec.model import ColumnsSpec, DataSpec
from rekindle.tasks.chat import ROLES


def documents(raw: RawBatch, names: ColumnsSpec, findings: Findings) -> tuple[pa.Array, Mask]:
    """The documents of a batch, null where there is none, and where there is one."""
    if names.messages is not None:
        made = [_chat(raw, i, v, findings) for i, v in enumerate(raw.columns[names.messages])]
    elif names.prompt is not None and names.completion is not None:
        made = _joined(raw, findings, prompt=names.prompt, completion=names.completion)
    else:
        made = _joined(raw, findings, text=names.text)
    return with_mask(made, pa.string())


def _joined(raw: RawBatch, findings: Findings, **parts: str) -> list[str | None]:
    """Documents of one content for each role; `parts` names the columns."""
    fit = np.ones(len(raw), bool)
    found = {}
    for role, column in parts.items():
        content = texts(raw, column, "text", findings)
        for row in np.flatnonzero(content.blank).tolist():
            findings.add(f"empty {role}", raw.place(row))
        fit &= ~(content.noted | content.blank)
        found[role] = content.values.to_pylist()
    rows = zip(*found.values(), strict=True)
    return [
        _json(list(zip(found, row, strict=True))) if good else None
        for row, good in zip(rows, fit.tolist(), strict=True)
    ]


def _chat(raw: RawBatch, row: int, value: Any, findings: Findings) -> str | None:
    value = as_python(value)
    fault, detail = _chat_fault(value)
    if fault:
        findings.add(fault, raw.place(row), detail)
        return None
    return _json([(turn["role"], turn["content"]) for turn in value])


def _chat_fault(turns: Any) -> tuple[str, Any]:
    """What keeps a value from being a chat, and the part at fault; "" for nothing."""
    if not isinstance(turns, list) or not turns:
        return "chat", turns
    for number, turn in enumerate(turns):
        given = {k for k, v in turn.items() if v is not None} if isinstance(turn, dict) else set()
        if given != {"role", "content"} or not isinstance(turn["content"], str):
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


def words(raw: RawBatch, column: str, findings: Findings) -> tuple[pa.Array, Mask]:
    """JSON of each row's words, null where it has none, and where it has some."""
    made: list[str | None] = []
    for row, value in enumerate(map(as_python, raw.columns[column])):
        fault, detail = _words_fault(value)
        if fault:
            findings.add(fault, raw.place(row), detail)
        made.append(None if fault else _json(value))
    return with_mask(made, pa.string())


def tags(raw: RawBatch, data: DataSpec, findings: Findings) -> tuple[pa.Array, Mask]:
    """Each row's tags, and where they are one for each word."""
    both = (raw.columns[name] for name in (data.columns.label, data.columns.words))
    known, made = frozenset(data.labels), list[list[str | None] | None]()
    for row, pair in enumerate(zip(*both, strict=True)):
        value, said = map(as_python, pair)
        each = [scalar_text(tag) for tag in value] if isinstance(value, list) else None
        fault, detail = _tags_fault(each, said, known)
        if fault and not _words_fault(said)[0]:  # else noted already
            findings.add(fault, raw.place(row), detail)
        made.append(None if fault else each)
    return with_mask(made, pa.list_(pa.string()))


def _tags_fault(
    tags: list[str | None] | None, words: Any, known: frozenset[str]
) -> tuple[str, Any]:
    """What keeps `tags` from being one for each word, and the part at fault; "" for nothing."""
    if tags is None or not isinstance(words, list) or len(tags) != len(words):
        count = "none" if tags is None else len(tags)
        return "tags", f"{count} for {len(words) if isinstance(words, list) else 'no'} words"
    for number, tag in enumerate(tags):
        if tag is None or not tag.strip():
            return "tags", f"none for word {number + 1}"
        if not encodable(tag):
            return "undecodable", ascii(tag)
        if known and tag not in known:
            return "unknown label", tag
    return "", None


def _words_fault(words: Any) -> tuple[str, Any]:
    """What keeps a value from being words, and the part at fault; "" for nothing."""
    if not isinstance(words, list) or not words:
        return "words", words
    for word in words:
        if not isinstance(word, str) or not word.strip():
            return "words", word
        if not encodable(word):
            return "undecodable", ascii(word)
    return "", None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
