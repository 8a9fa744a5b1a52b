"""What every kind of input can say of itself: the protocol `Modality`, and its two helpers.

One content goes through four forms, and a modality knows the ways between them:

    values of a source  --Reader-->   stored    what the column of examples holds, in Arrow
    stored             <--Modality--> content   what a server's model gets, in Python
    content             --Modality--> evidence  text that a server proves itself by
    value of a request  --Question--> content   by HTTP, in a file, in a CSV

`Reader` is made for one reading of a source: it may remember the first image's shape. `Question`
is made for one served model: it knows the column in which clients send the content.

**A modality of two texts, on paper.** `pair` would hold what preference tuning needs (a prompt, the
chosen and the rejected answer) or what similarity needs (two sentences and a number). Its reader's
columns are the two or three texts, its `stored` is JSON of them, which hashes, copies and the log
take as they are; `label_type` is None for a preference, whose label is the order of the texts, and
a string for a similarity, so there are two modalities that share a reader. Their question differs:
a model that preferences have tuned is asked as a `document` is, so `question` returns that one's.
A similarity is asked with two values: `Question.column` names one, so `pair` either takes a list of
two in one column, as words do (in a file each text has a column of its own: `Question.columns`), or
adds the second name here and in the wire forms that have no names of columns (CSV, the Open
Inference Protocol). What it adds elsewhere: its columns in `ColumnsSpec`, its kinds of faults in
rows/findings.py, and its name in the registry."""

from __future__ import annotations

import abc
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

import pyarrow as pa

from rekindle.modalities.vocabulary import word_hashes
from rekindle.rows import Columns
from rekindle.rows.columns import Mask, RawBatch, encodable
from rekindle.rows.findings import Findings
from rekindle.spec.model import ColumnsSpec, DataSpec

Shape = tuple[int, int, int]
"""Height, width and channels of all images of a source."""
JsonType = Literal["string", "array"]
Content = TypeVar("Content")
Stored = TypeVar("Stored", str, bytes)


class InstanceError(ValueError):
    """A value of a request that is no content; the message says where and why."""


class Modality(abc.ABC, Generic[Content, Stored]):
    """One kind of input. Its instances hold no state."""

    field: ClassVar[pa.Field]
    """The column of examples that holds the content; its name is the modality's name."""
    label_type: ClassVar[pa.DataType | None]
    """What a row has as its label: a string, or a list of them, one for each part of the
    content. None: rows have no label of their own."""
    is_list: ClassVar[bool] = False
    """Whether its content is a list of texts, as tables of MLflow have it."""

    @abc.abstractmethod
    def reader(self, data: DataSpec, shape: Shape | None = None) -> Reader:
        """What reads a source of `data`. `shape`: that of its first image, where it is known."""

    @abc.abstractmethod
    def stored(self, content: Content) -> Stored:
        """What the column of examples holds for a content."""

    @abc.abstractmethod
    def content(self, stored: Stored, shape: Shape | None = None) -> Content:
        """What a request for an example holds; images have this shape."""

    @abc.abstractmethod
    def evidence(self, content: Content) -> str:
        """The content as text, from which `Question.value` makes a request."""

    @abc.abstractmethod
    def question(
        self,
        names: ColumnsSpec,
        settings: Mapping[str, Any],
        image_size: tuple[int, int] | None = None,
    ) -> Question[Content]:
        """How a model with these settings is asked. `image_size`: the config's, None where
        images are not scaled. Raises RequestError where the config names other columns than the
        model was trained on."""

    @abc.abstractmethod
    def signals(self, content: Content, known: Collection[int]) -> dict[str, float]:
        """What a monitor compares over time, by name. `known` are hashes of the words that the
        model was trained on (see vocabulary.py)."""


class Written(Modality[Content, str]):
    """A modality whose content consists of texts: it has words, and copies that differ in
    spelling alone can be told."""

    @abc.abstractmethod
    def texts(self, content: Content) -> list[str]:
        """The texts whose words are counted."""

    def strings(self, stored: str) -> list[str]:
        """All that tells two examples apart, such as the roles of turns beside their texts."""
        strings: list[str] = []
        for part in json.loads(stored):
            strings += [part] if isinstance(part, str) else part
        return strings

    def stored(self, content: Content) -> str:
        return json_of(content)

    def evidence(self, content: Content) -> str:
        return self.stored(content)

    def signals(self, content: Content, known: Collection[int]) -> dict[str, float]:
        """The `length` in words, and the share of them that is `unknown`; without any known
        words there is no such share."""
        hashes = word_hashes(self.texts(content))
        values = {"length": float(len(hashes))}
        if known:
            unknown = sum(1 for word in hashes if word not in known)
            values["unknown"] = unknown / max(1, len(hashes))
        return values


class Reader(abc.ABC):
    """Reads the batches of one source, one after the other."""

    columns: Columns
    """What is read of the source: the content, and the label if rows have one."""

    @property
    def shape(self) -> Shape | None:
        """That of the images so far; None for what has no shape, or before the first image."""
        return None

    @abc.abstractmethod
    def content(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask]:
        """What examples store of each row, and where it is fit; the rest is noted."""

    @abc.abstractmethod
    def labels(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask] | None:
        """The label of each row, and where it is fit; None where rows have no labels."""


class Question(abc.ABC, Generic[Content]):
    """How one served model is asked."""

    column: str
    """The column of an instance that holds the content."""
    json_type: ClassVar[JsonType]
    """What the column's value is in JSON. Where a wire form has texts alone, an array is JSON in
    a text."""
    in_csv: ClassVar[bool]
    """Whether a row of a CSV can hold the value."""
    is_slow: ClassVar[bool] = False
    """Whether a server reads it aside, as it takes a while to decode."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a file from which `values` makes each value, that of a request first."""
        return (self.column,)

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """What a client sends, in words: models of one kind take the same values."""

    @abc.abstractmethod
    def content(self, value: object, place: str) -> Content:
        """The content in a value. Raises InstanceError."""

    @abc.abstractmethod
    def values(self, raw: RawBatch, findings: Findings) -> Iterable[object]:
        """The value of each row of a batch, as `content` takes it."""

    @abc.abstractmethod
    def value(self, evidence: str) -> object:
        """What a request sends for a text that `Modality.evidence` made."""


def json_of(value: object) -> str:
    """Compact JSON, as examples store lists."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def sent_text(value: object, place: str) -> str:
    """A text of a request. Raises InstanceError for what is none, or empty."""
    if not isinstance(value, str) or not value.strip() or not encodable(value):
        raise InstanceError(f"{place}: a text that is not empty is needed")
    return value
