"""Raw rows of any source as examples; what is unfit is noted and left out.

A language model reads JSON, a list of [role, content]: a plain text has the role `text`,
a pair `prompt` and `completion`, a chat its own. A tagger reads lists of words, and a tag
for each."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.data.examples import HASH_BYTES
from rekindle.data.images import ImageColumn
from rekindle.data.split import content_hashes, stored_hashes
from rekindle.rows import columns
from rekindle.rows.columns import Mask, RawBatch, as_python, encodable, number_of, texts, with_mask
from rekindle.rows.findings import Findings
from rekindle.spec.model import ColumnsSpec, DataSpec
from rekindle.tasks.chat import ROLES

Shape = tuple[int, int, int]
_GROUP = "_rekindle_group"
_SHAREGPT = {"human": "user", "gpt": "assistant"}  # what it calls them


class Normaliser:
    """Turns raw batches into tables of examples:
    the columns of tasks/base.py but `split`."""

    def __init__(
        self, data: DataSpec, modality: str, findings: Findings, image_shape: Shape | None = None
    ) -> None:
        """`image_shape`: that of the first image, where it lies in an earlier piece."""
        self._data = data
        self._modality = modality
        self._all_findings = findings
        self._findings = findings
        self._labels = pa.array(data.labels, pa.string()) if data.labels else None
        self._images = ImageColumn(data.image_size)
        self._images.shape = image_shape

    @property
    def image_shape(self) -> Shape | None:
        return self._images.shape

    def __call__(self, raw: RawBatch) -> tuple[pa.Table, Mask]:
        """The examples of a batch, and which of its rows they are."""
        self._findings = Findings()  # of this batch: a row may have several faults
        table, keep = self._examples(raw)
        self._all_findings.include(self._findings, int(np.count_nonzero(~keep)))
        return table, keep

    def _examples(self, raw: RawBatch) -> tuple[pa.Table, Mask]:
        content, keep = self._content(raw)
        # a row keeps its id wherever it stands only if it has a key
        key = self._data.columns.key
        if key is None:
            ids = raw.ids()
        else:
            column = texts(raw, key, "scalar", self._findings)
            keep &= ~(column.noted | self._note("empty key", column.blank, raw))
            ids = column.values
        values: dict[str, pa.Array] = {"id": ids, self._modality: content}
        groups = None
        group = self._data.columns.group
        if group is not None:
            groups = texts(raw, group, "scalar", self._findings)
            keep &= ~(groups.noted | self._note("empty group", groups.blank, raw))
        for name in self._data.slices:
            column = texts(raw, name, "scalar", self._findings)
            keep &= ~column.noted
            values[name] = column.values.fill_null("")
        if groups is not None:
            values[_GROUP] = groups.values
        if self._modality != "document":
            if self._modality == "words":
                values["label"], is_labelled = tags(raw, self._data, self._findings)
            else:
                values["label"], is_labelled = self._label(raw)
            keep &= is_labelled
        table = pa.table(values)
        if not keep.all():
            table = table.filter(pa.array(keep)).combine_chunks()
        return table.append_column("hash", self._hashes(table)), keep

    def _hashes(self, table: pa.Table) -> pa.Array:
        """SHA-256 of what the model sees of each row; an image's shape is part of it."""
        prefix = repr(self.image_shape).encode() if self._modality == "image" else b""
        # two images of other shapes may have the same bytes
        hashes = content_hashes(_one_chunk(table.column(self._modality)), prefix)
        buffers = [None, pa.py_buffer(hashes)]
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(HASH_BYTES), len(table), buffers)

    def split_hashes(self, table: pa.Table) -> bytes:
        """What the hash split goes by: the hash of the group, the key, or the content."""
        if self._data.columns.group:
            return content_hashes(_one_chunk(table.column(_GROUP)))
        if self._data.columns.key:
            return content_hashes(_one_chunk(table.column("id")))
        return stored_hashes(_one_chunk(table.column("hash")))

    def _content(self, raw: RawBatch) -> tuple[pa.Array, Mask]:
        """What the model reads of each row, and where it is fit."""
        if self._modality == "image":
            return self._image(raw)
        if self._modality == "document":
            return documents(raw, self._data.columns, self._findings)
        if self._modality == "words":
            lists = _checked(raw, self._data.columns.words, _words_fault, self._findings)
            return with_mask(lists, pa.string())
        column = texts(raw, self._data.columns.text, "text", self._findings)
        blank = self._note("empty text", column.blank, raw)
        return column.values, ~(column.noted | blank)

    def _image(self, raw: RawBatch) -> tuple[pa.Array, Mask]:
        pixels: list[bytes | None] = []
        for row, value in enumerate(raw.columns[self._data.columns.image]):
            try:
                value = columns.content_of(raw, value)
            except (OSError, ValueError) as error:
                self._findings.add("image", raw.place(row), str(error))
                pixels.append(None)
                continue
            pixels.append(self._images.pixels(value, raw.place(row), self._findings))
        return with_mask(pixels, pa.binary())

    def _number(self, raw: RawBatch, target: str) -> tuple[pa.Array, Mask]:
        """The numbers of the column `target`, and where they are finite."""
        objects = [as_python(value) for value in raw.columns[target]]
        numbers = np.array([number_of(value) for value in objects], np.float64)
        fit = np.isfinite(numbers)
        for row in np.flatnonzero(~fit).tolist():
            value = objects[row]
            if isinstance(value, bytes):
                value = value.decode(errors="replace")
            self._findings.add("no number", raw.place(row), f"{target}: {value!r}")
        return pa.array(numbers), fit

    def _label(self, raw: RawBatch) -> tuple[pa.Array, Mask]:
        """The label of each row, or its number, and where it is fit."""
        target = self._data.columns.target
        if target is not None:
            return self._number(raw, target)
        column = texts(raw, self._data.columns.label, "scalar", self._findings)
        bad = column.noted | self._note("empty label", column.blank, raw)
        if self._labels is not None:
            unknown = ~np.asarray(pa.compute.is_in(column.values, self._labels), bool) & ~bad
            for row in np.flatnonzero(unknown).tolist():
                self._findings.add("unknown label", raw.place(row), column.values[row].as_py())
            bad |= unknown
        return column.values, ~bad

    def _note(self, kind: str, rows: Mask, raw: RawBatch) -> Mask:
        for row in np.flatnonzero(rows).tolist():
            self._findings.add(kind, raw.place(row))
        return rows


def label_order(labels: tuple[str, ...], found: set[str]) -> tuple[str, ...]:
    """The classes in index order: as given, else sorted, whole numbers by their value."""
    if labels:
        return labels
    # `10` behind `9`, as people who number classes expect; 18 digits fit into 64 bits
    if all(re.fullmatch(r"-?[0-9]{1,18}", label) for label in found):
        return tuple(sorted(found, key=lambda label: (int(label), label)))
    return tuple(sorted(found))


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def documents(raw: RawBatch, names: ColumnsSpec, findings: Findings) -> tuple[pa.Array, Mask]:
    """The documents of a batch, null where there is none, and where there is one."""
    if names.messages is not None:
        contents = _checked(raw, names.messages, _chat_fault, findings)
    elif names.prompt is not None and names.completion is not None:
        contents = _joined(raw, findings, names, prompt=names.prompt, completion=names.completion)
    else:
        contents = _joined(raw, findings, names, text=names.text)
    return with_mask(contents, pa.string())


def prompts(
    raw: RawBatch, given: pa.Array, column: str | None, findings: Findings
) -> tuple[list[str | None], Mask]:
    """Prompts, the text of `column` below each, if any; and which texts were refused."""
    if column is None:
        return given.to_pylist(), np.zeros(len(given), bool)
    inputs = texts(raw, column, "text", findings)
    joined = []
    for prompt, below in zip(given.to_pylist(), inputs.values.to_pylist(), strict=True):
        if prompt and below and below.strip():
            # as templates of instruction data put the input below the instruction
            prompt = f"{prompt}\n\n{below}"
        joined.append(prompt)
    return joined, inputs.noted


def _joined(
    raw: RawBatch, findings: Findings, names: ColumnsSpec, **parts: str
) -> list[str | None]:
    """Documents of one content for each role; `parts` names the columns."""
    fit = np.ones(len(raw), bool)
    contents = {}
    for role, column in parts.items():
        content = texts(raw, column, "text", findings)
        for row in np.flatnonzero(content.blank).tolist():
            findings.add(f"empty {role}", raw.place(row))
        below = names.input if role == "prompt" else None
        contents[role], refused = prompts(raw, content.values, below, findings)
        fit &= ~(content.noted | content.blank | refused)
    joined: list[str | None] = []
    for row, is_fit in enumerate(fit.tolist()):
        turns = [(role, contents[role][row]) for role in contents]
        joined.append(_json(turns) if is_fit else None)
    return joined


def _checked(
    raw: RawBatch, column: str, fault_of: Callable[[Any], tuple[str, Any]], findings: Findings
) -> list[str | None]:
    """JSON of each value of a column in which
    `fault_of` finds nothing; turns as pairs."""
    checked: list[str | None] = []
    for row, value in enumerate(raw.columns[column]):
        content = with_roles(as_python(value))
        fault, detail = fault_of(content)
        if fault:
            findings.add(fault, raw.place(row), detail)
            checked.append(None)
            continue
        if isinstance(content[0], dict):
            content = [(turn["role"], turn["content"]) for turn in content]
        checked.append(_json(content))
    return checked


def with_roles(value: Any) -> Any:
    """A list of ShareGPT's turns as `{role, content}`; all else as it is."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        return value
    if any(_keys_with_value(turn) != {"from", "value"} for turn in value):
        return value
    turns = []
    for turn in value:
        role = str(turn["from"])
        turns.append({"role": _SHAREGPT.get(role, role), "content": turn["value"]})
    return turns


def _keys_with_value(turn: dict[str, object]) -> set[str]:
    """The keys of a turn with a value: Arrow gives every turn the keys of all of them."""
    return {key for key, value in turn.items() if value is not None}


def _chat_fault(turns: Any) -> tuple[str, Any]:
    """What keeps a value from being a chat, and the part at fault; "" for nothing."""
    if not isinstance(turns, list) or not turns:
        return "chat", turns
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or _keys_with_value(turn) != {"role", "content"}:
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


def tags(raw: RawBatch, data: DataSpec, findings: Findings) -> tuple[pa.Array, Mask]:
    """Each row's tags, and where they are one for each word."""
    labels = raw.columns[data.columns.label]
    words = raw.columns[data.columns.words]
    known_labels = frozenset(data.labels)
    checked = list[list[str | None] | None]()
    for row, (row_label, row_words) in enumerate(zip(labels, words, strict=True)):
        value = as_python(row_label)
        row_words = as_python(row_words)
        row_tags = None
        if isinstance(value, list):
            row_tags = [columns.scalar_text(tag) for tag in value]
        fault, detail = _tag_fault(row_tags, row_words, known_labels)
        if fault and not _words_fault(row_words)[0]:  # else noted already
            findings.add(fault, raw.place(row), detail)
        checked.append(None if fault else row_tags)
    return with_mask(checked, pa.list_(pa.string()))


def _tag_fault(
    tags: list[str | None] | None, words: object, known_labels: frozenset[str]
) -> tuple[str, Any]:
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
