"""A text with a label, or a number to predict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import pyarrow as pa

from rekindle.modalities.base import JsonType, Question, Reader, Shape, Written, sent_text
from rekindle.modalities.labels import RowLabels, note_rows
from rekindle.rows.columns import Mask, RawBatch, texts
from rekindle.rows.findings import Findings
from rekindle.spec.model import ColumnsSpec, DataSpec


class Text(Written[str]):
    """Its content is the text, as examples store it."""

    field: ClassVar[pa.Field] = pa.field("text", pa.string())
    label_type: ClassVar[pa.DataType | None] = pa.string()

    def reader(self, data: DataSpec, shape: Shape | None = None) -> Reader:
        return _TextReader(data)

    def stored(self, content: str) -> str:
        return content

    def content(self, stored: str, shape: Shape | None = None) -> str:
        return stored

    def texts(self, content: str) -> list[str]:
        return [content]

    def strings(self, stored: str) -> list[str]:
        return [stored]

    def question(
        self,
        names: ColumnsSpec,
        settings: Mapping[str, Any],
        image_size: tuple[int, int] | None = None,
    ) -> TextQuestion:
        return TextQuestion(names.text)


class _TextReader(Reader):
    def __init__(self, data: DataSpec) -> None:
        self._column = data.columns.text
        self._labels = RowLabels(data)
        self.columns = self._labels.beside(self._column, "text")

    def content(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask]:
        column = texts(raw, self._column, "text", findings)
        blank = note_rows("empty text", column.blank, raw, findings)
        return column.values, ~(column.noted | blank)

    def labels(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask]:
        return self._labels.read(raw, findings)


@dataclasses.dataclass(frozen=True)
class TextQuestion(Question[str]):
    """Asks with a text."""

    column: str
    json_type: ClassVar[JsonType] = "string"
    in_csv: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        return "a text"

    def content(self, value: object, place: str) -> str:
        return sent_text(value, place)

    def values(self, raw: RawBatch, findings: Findings) -> Iterable[object]:
        values: list[str | None] = texts(raw, self.column, "text", findings).values.to_pylist()
        return values

    def value(self, evidence: str) -> str:
        return evidence
