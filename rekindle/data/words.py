"""Texts as lists of words, and a tag for each word. A row without either is noted and left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.data.columns import Mask, RawBatch, encodable, scalar_text
from rekindle.data.validate import Findings
from rekindle.spec.model import DataSpec


class WordColumns:
    """The columns of words and of tags, in the roles that `data.columns` gives them."""

    def __init__(self, data: DataSpec, findings: Findings) -> None:
        self._columns, self._labels = data.columns, frozenset(data.labels)
        self._findings = findings

    def words(self, raw: RawBatch) -> tuple[pa.StringArray, Mask]:
        """JSON of each row's words, null where it has none, and where it has some."""
        made: list[str | None] = []
        for row, value in enumerate(raw.columns[self._columns.words]):
            words = _plain(value)
            fault, detail = _words_fault(words)
            if fault:
                self._findings.add(fault, raw.place(row), detail)
            made.append(None if fault else _json(words))
        return pa.array(made, pa.string()), _present(made)

    def tags(self, raw: RawBatch) -> tuple[pa.ListArray, Mask]:
        """Each row's tags, and where they are one for each word."""
        both = (raw.columns[name] for name in (self._columns.label, self._columns.words))
        made: list[list[str | None] | None] = []
        for row, (given, value) in enumerate(zip(*both, strict=True)):
            tags, words = _texts(_plain(given)), _plain(value)
            fault, detail = self._fault(tags, words)
            if fault and not _words_fault(words)[0]:  # else noted already
                self._findings.add(fault, raw.place(row), detail)
            made.append(None if fault else tags)
        return pa.array(made, pa.list_(pa.string())), _present(made)

    def _fault(self, tags: list[str | None] | None, words: Any) -> tuple[str, Any]:
        """What keeps `tags` from being one for each word, and the part at fault; "" for nothing."""
        if tags is None or not isinstance(words, list) or len(tags) != len(words):
            count = "none" if tags is None else len(tags)
            return "tags", f"{count} for {len(words) if isinstance(words, list) else 'no'} words"
        for number, tag in enumerate(tags):
            if tag is None or not tag.strip():
                return "tags", f"none for word {number + 1}"
            if not encodable(tag):
                return "undecodable", ascii(tag)
            if self._labels and tag not in self._labels:
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


def _texts(tags: Any) -> list[str | None] | None:
    return [scalar_text(tag) for tag in tags] if isinstance(tags, list) else None


def _json(words: list[str]) -> str:
    return json.dumps(words, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    return value.as_py() if isinstance(value, pa.Scalar) else value


def _present(values: Sequence[object]) -> Mask:
    return np.array([value is not None for value in values], bool)
