"""What a language model reads, in one form whatever its source: JSON, a list of [role, content].

A plain text has the role `text`, a pair `prompt` and `completion`, and the turns of a chat have
their own roles. A row that makes no such document is noted and left out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.data.columns import Mask, RawBatch, encodable, texts
from rekindle.data.validate import Findings
from rekindle.spec.model import ColumnsSpec
from rekindle.tasks.chat import ROLES


class DocumentColumns:
    """The columns that make a document, read as `columns.form` says."""

    def __init__(self, columns: ColumnsSpec, findings: Findings) -> None:
        self._columns, self._findings = columns, findings

    def __call__(self, raw: RawBatch) -> tuple[pa.StringArray, Mask]:
        """The documents of a batch, null where there is none, and where there is one."""
        names = self._columns
        if names.messages is not None:
            made = [
                self._chat(raw, i, value) for i, value in enumerate(raw.columns[names.messages])
            ]
        elif names.prompt is not None and names.completion is not None:
            made = self._joined(raw, prompt=names.prompt, completion=names.completion)
        else:
            made = self._joined(raw, text=names.text)
        return pa.array(made, pa.string()), np.array([value is not None for value in made], bool)

    def _joined(self, raw: RawBatch, **parts: str) -> list[str | None]:
        """Documents of one content for each role; `parts` names the columns."""
        fit = np.ones(len(raw), bool)
        found = {}
        for role, column in parts.items():
            content = texts(raw, column, "text", self._findings)
            for row in np.flatnonzero(content.blank).tolist():
                self._findings.add(f"empty {role}", raw.place(row))
            fit &= ~(content.noted | content.blank)
            found[role] = content.values.to_pylist()
        rows = zip(*found.values(), strict=True)
        return [
            _document(list(zip(found, row, strict=True))) if good else None
            for row, good in zip(rows, fit.tolist(), strict=True)
        ]

    def _chat(self, raw: RawBatch, row: int, value: Any) -> str | None:
        value = value.as_py() if isinstance(value, pa.Scalar) else value
        fault, detail = _fault(value)
        if fault:
            self._findings.add(fault, raw.place(row), detail)
            return None
        return _document([(turn["role"], turn["content"]) for turn in value])


def _fault(turns: Any) -> tuple[str, Any]:
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


def _document(turns: list[tuple[str, str]]) -> str:
    return json.dumps(turns, ensure_ascii=False, separators=(",", ":"))
