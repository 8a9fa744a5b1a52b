"""The words of a text, each with a tag. Examples store them as JSON, a list of strings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import pyarrow as pa

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
from rekindle.rows.columns import Mask, RawBatch, as_python, encodable, scalar_text, with_mask
from rekindle.rows.findings import Findings
from rekindle.spec.model import ColumnsSpec, DataSpec


class Words(Written[list[str]]):
    """Its content is the list of words."""

    field: ClassVar[pa.Field] = pa.field("words", pa.string())
    label_type: ClassVar[pa.DataType | None] = pa.list_(pa.string())
    is_list: ClassVar[bool] = True

    def reader(self, data: DataSpec, shape: Shape | None = None) -> Reader:
        return _WordsReader(data)

    def stored(self, content: list[str]) -> str:
        return json_of(list(content))

    def content(self, stored: str, shape: Shape | None = None) -> list[str]:
        words: list[str] = json.loads(stored)
        return words

    def texts(self, content: list[str]) -> list[str]:
        return content

    def question(
        self,
        names: ColumnsSpec,
        settings: Mapping[str, Any],
        image_size: tuple[int, int] | None = None,
    ) -> WordsQuestion:
        return WordsQuestion(names.words)


class _WordsReader(Reader):
    def __init__(self, data: DataSpec) -> None:
        self._words = data.columns.words
        self._tags = data.columns.label
        self._known_labels = frozenset(data.labels)
        self.columns = {self._words: "list", self._tags: "list"}

    def content(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask]:
        lists: list[str | None] = []
        for row, value in enumerate(raw.columns[self._words]):
            words = as_python(value)
            fault, detail = _words_fault(words)
            if fault:
                findings.add(fault, raw.place(row), detail)
            lists.append(None if fault else json_of(words))
        return with_mask(lists, pa.string())

    def labels(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask]:
        """Each row's tags, and where they are one for each word."""
        checked = list[list[str | None] | None]()
        columns = (raw.columns[self._tags], raw.columns[self._words])
        for row, (row_tags, row_words) in enumerate(zip(*columns, strict=True)):
            value = as_python(row_tags)
            words = as_python(row_words)
            tags = None
            if isinstance(value, list):
                tags = [scalar_text(tag) for tag in value]
            fault, detail = _tag_fault(tags, words, self._known_labels)
            if fault and not _words_fault(words)[0]:  # else noted already
                findings.add(fault, raw.place(row), detail)
            checked.append(None if fault else tags)
        return with_mask(checked, pa.list_(pa.string()))


def _words_fault(words: object) -> tuple[str, object]:
    """What keeps a value from being words, and the part at fault; "" for nothing."""
    if not isinstance(words, list) or not words:
        return "words", words
    for word in words:
        if not isinstance(word, str) or not word.strip():
            return "words", word
        if not encodable(word):
            return "undecodable", ascii(word)
    return "", None


def _tag_fault(
    tags: list[str | None] | None, words: object, known_labels: frozenset[str]
) -> tuple[str, object]:
    """Why `tags` are not one for each word, and the part at fault; "" where they are."""
    if tags is None or not isinstance(words, list) or len(tags) != len(words):
        tag_count = "none" if tags is None else len(tags)
        word_count = len(words) if isinstance(words, list) else "no"
        return "tags", f"{tag_count} for {word_count} words"
    for number, tag in enumerate(tags):
        if tag is None or not tag.strip():
            return "tags", f"none for word {number + 1}"
        if not encodable(tag):
            return "undecodable", ascii(tag)
        if known_labels and tag not in known_labels:
            return "unknown label", tag
    return "", None


@dataclasses.dataclass(frozen=True)
class WordsQuestion(Question[list[str]]):
    """Asks with a list of words."""

    column: str
    json_type: ClassVar[JsonType] = "array"
    in_csv: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return "a list of words"

    def content(self, value: object, place: str) -> list[str]:
        if not isinstance(value, list) or not value:
            raise InstanceError(f"{place}: a list of words is needed")
        return [sent_text(word, place) for word in value]

    def values(self, raw: RawBatch, findings: Findings) -> Iterable[object]:
        return map(as_python, raw.columns[self.column])

    def value(self, evidence: str) -> object:
        return json.loads(evidence)
