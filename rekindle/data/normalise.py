"""Raw rows of any source as examples; what is unfit is noted and left out.

A language model reads JSON, a list of [role, content]: a plain text has the role `text`, a pair
`prompt` and `completion`, a chat its own. A tagger reads lists of words, and a tag for each."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.data import columns
from rekindle.data.columns import Mask, RawBatch, as_python, number_of, texts, with_mask
from rekindle.data.encodings import encodable
from rekindle.data.examples import HASH_BYTES
from rekindle.data.images import ImageColumn
from rekindle.data.split import content_hashes, stored_hashes
from rekindle.data.validate import Findings
from rekindle.spec.model import ColumnsSpec, DataSpec
from rekindle.tasks.chat import ROLES

Shape = tuple[int, int, int]
_GROUP = "_rekindle_group"
_SHAREGPT = {"human": "user", "gpt": "assistant"}  # what it calls them


class Normaliser:
    """Turns raw batches into tables of examples: tasks/base.py's columns, without the split."""

    def __init__(
        self, data: DataSpec, modality: str, findings: Findings, image_shape: Shape | None = None
    ) -> None:
        """`image_shape`: that of the first image, where it lies in an earlier piece."""
        self._data, self._modality, self._all, self._findings = data, modality, findings, findings
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
        self._all.include(self._findings, int(np.count_nonzero(~keep)))
        return table, keep

    def _examples(self, raw: RawBatch) -> tuple[pa.Table, Mask]:
        content, fit = self._content(raw)
        if (key := self._data.columns.key) is None:
            ids, keep = raw.ids(), fit
        else:
            found = texts(raw, key, "scalar", self._findings)
            keep = fit & ~(found.noted | self._note("empty key", found.blank, raw))
            ids = found.values
        groups = {}
        if (group := self._data.columns.group) is not None:
            found = texts(raw, group, "scalar", self._findings)
            keep &= ~(found.noted | self._note("empty group", found.blank, raw))
            groups[_GROUP] = found.values
        slices = {name: texts(raw, name, "scalar", self._findings) for name in self._data.slices}
        for column in slices.values():
            keep &= ~column.noted
        filled = {name: column.values.fill_null("") for name, column in slices.items()}
        made = {"id": ids, self._modality: content, **filled, **groups}
        if self._modality == "words":
            made["label"], labelled = tags(raw, self._data, self._findings)
            keep &= labelled
        elif self._modality != "document":
            made["label"], labelled = self._label(raw)
            keep &= labelled
        table = pa.table(made)
        if not keep.all():
            table = table.filter(pa.array(keep)).combine_chunks()
        # SHA-256 of what the model sees; the shape of an image is part of it
        prefix = repr(self.image_shape).encode() if self._modality == "image" else b""
        hashes = content_hashes(_one_chunk(table.column(self._modality)), prefix)
        buffers = [None, pa.py_buffer(hashes)]
        column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(HASH_BYTES), len(table), buffers)
        return table.append_column("hash", column), keep

    def split_hashes(self, table: pa.Table) -> bytes:
        """What the hash split goes by: the hash of the group, of the key, or of the content."""
        if self._data.columns.group:
            return content_hashes(_one_chunk(table.column(_GROUP)))
        if self._data.columns.key:
            return content_hashes(_one_chunk(table.column("id")))
        return stored_hashes(_one_chunk(table.column("hash")))

    def _content(self, raw: RawBatch) -> tuple[pa.Array, Mask]:
        if self._modality == "image":
            return self._image(raw)
        if self._modality == "document":
            return documents(raw, self._data.columns, self._findings)
        if self._modality == "words":
            made = _checked(raw, self._data.columns.words, _words_fault, self._findings)
            return with_mask(made, pa.string())
        found = texts(raw, self._data.columns.text, "text", self._findings)
        blank = self._note("empty text", found.blank, raw)
        return found.values, ~(found.noted | blank)

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
        given = list(map(as_python, raw.columns[target]))
        values = np.array(list(map(number_of, given)), np.float64)
        fit = np.isfinite(values)
        for row in np.flatnonzero(~fit).tolist():
            value = given[row]
            value = value.decode(errors="replace") if isinstance(value, bytes) else value
            self._findings.add("no number", raw.place(row), f"{target}: {value!r}")
        return pa.array(values), fit

    def _label(self, raw: RawBatch) -> tuple[pa.Array, Mask]:
        if (target := self._data.columns.target) is not None:
            return self._number(raw, target)
        found = texts(raw, self._data.columns.label, "scalar", self._findings)
        bad = found.noted | self._note("empty label", found.blank, raw)
        if self._labels is not None:
            unknown = ~np.asarray(pa.compute.is_in(found.values, self._labels), bool) & ~bad
            for row in np.flatnonzero(unknown).tolist():
                self._findings.add("unknown label", raw.place(row), found.values[row].as_py())
            bad |= unknown
        return found.values, ~bad

    def _note(self, kind: str, rows: Mask, raw: RawBatch) -> Mask:
        for row in np.flatnonzero(rows).tolist():
            self._findings.add(kind, raw.place(row))
        return rows


def label_order(labels: tuple[str, ...], found: set[str]) -> tuple[str, ...]:
    """The classes in index order: as given, else sorted, whole numbers by their value."""
    if labels:
        return labels
    if all(re.fullmatch(r"-?[0-9]{1,18}", label) for label in found):
        return tuple(sorted(found, key=lambda label: (int(label), label)))
    return tuple(sorted(found))


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def documents(raw: RawBatch, names: ColumnsSpec, findings: Findings) -> tuple[pa.Array, Mask]:
    """The documents of a batch, null where there is none, and where there is one."""
    if names.messages is not None:
        made = _checked(raw, names.messages, _chat_fault, findings)
    elif names.prompt is not None and names.completion is not None:
        made = _joined(raw, findings, names, prompt=names.prompt, completion=names.completion)
    else:
        made = _joined(raw, findings, names, text=names.text)
    return with_mask(made, pa.string())


def prompts(
    raw: RawBatch, given: pa.Array, column: str | None, findings: Findings
) -> tuple[list[str | None], Mask]:
    """Prompts with the text of `column` below, if any; and which of these texts were refused."""
    if column is None:
        return given.to_pylist(), np.zeros(len(given), bool)
    below = texts(raw, column, "text", findings)
    pairs = zip(given.to_pylist(), below.values.to_pylist(), strict=True)
    return [f"{a}\n\n{b}" if a and b and b.strip() else a for a, b in pairs], below.noted


def _joined(
    raw: RawBatch, findings: Findings, names: ColumnsSpec, **parts: str
) -> list[str | None]:
    """Documents of one content for each role; `parts` names the columns."""
    fit = np.ones(len(raw), bool)
    found = {}
    for role, column in parts.items():
        content = texts(raw, column, "text", findings)
        for row in np.flatnonzero(content.blank).tolist():
            findings.add(f"empty {role}", raw.place(row))
        below = names.input if role == "prompt" else None
        found[role], refused = prompts(raw, content.values, below, findings)
        fit &= ~(content.noted | content.blank | refused)
    rows = zip(zip(*found.values(), strict=True), fit.tolist(), strict=True)
    return [_json(list(zip(found, row, strict=True))) if good else None for row, good in rows]


def _checked(
    raw: RawBatch, column: str, fault_of: Callable[[Any], tuple[str, Any]], findings: Findings
) -> list[str | None]:
    """JSON of each value of a column in which `fault_of` finds nothing; turns as pairs."""
    made: list[str | None] = []
    for row, value in enumerate(map(with_roles, map(as_python, raw.columns[column]))):
        fault, detail = fault_of(value)
        if fault:
            findings.add(fault, raw.place(row), detail)
        elif isinstance(value[0], dict):
            value = [(turn["role"], turn["content"]) for turn in value]
        made.append(None if fault else _json(value))
    return made


def with_roles(value: Any) -> Any:
    """A list of ShareGPT's turns as `{role, content}`; all else as it is."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return value
    if any({k for k, v in turn.items() if v is not None} != {"from", "value"} for turn in value):
        return value
    roles = ((str(turn["from"]), turn["value"]) for turn in value)
    return [{"role": _SHAREGPT.get(role, role), "content": content} for role, content in roles]


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


def tags(raw: RawBatch, data: DataSpec, findings: Findings) -> tuple[pa.Array, Mask]:
    """Each row's tags, and where they are one for each word."""
    both = (raw.columns[name] for name in (data.columns.label, data.columns.words))
    known, made = frozenset(data.labels), list[list[str | None] | None]()
    for row, pair in enumerate(zip(*both, strict=True)):
        value, said = map(as_python, pair)
        each = [columns.scalar_text(tag) for tag in value] if isinstance(value, list) else None
        fault, detail = _tag_fault(each, said, known)
        if fault and not _words_fault(said)[0]:  # else noted already
            findings.add(fault, raw.place(row), detail)
        made.append(None if fault else each)
    return with_mask(made, pa.list_(pa.string()))


def _tag_fault(tags: list[str | None] | None, words: Any, known: frozenset[str]) -> tuple[str, Any]:
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
