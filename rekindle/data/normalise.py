"""Raw rows of any source as examples; what is unfit is noted and left out."""

import re

import numpy as np
import pyarrow as pa

from rekindle.data import documents
from rekindle.data.columns import Mask, RawBatch, content_of, texts, with_mask
from rekindle.data.examples import HASH_BYTES
from rekindle.data.images import ImageColumn
from rekindle.data.split import content_hashes
from rekindle.data.validate import Findings
from rekindle.spec.model import DataSpec


class Normaliser:
    """Turns raw batches into tables of examples (all columns of tasks/base.py but the split)."""

    def __init__(self, data: DataSpec, modality: str, findings: Findings) -> None:
        self._data, self._modality, self._findings = data, modality, findings
        self._labels = pa.array(data.labels, pa.string()) if data.labels else None
        self._images = ImageColumn(data.image_size)

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of all images."""
        return self._images.shape

    def __call__(self, raw: RawBatch) -> tuple[pa.Table, Mask]:
        """The examples of a batch, and which of its rows they are."""
        content, fit = self._content(raw)
        ids, identified = self._ids(raw)
        keep = fit & identified
        slices = {name: texts(raw, name, "scalar", self._findings) for name in self._data.slices}
        filled = {name: found.values.fill_null("") for name, found in slices.items()}
        columns = {"id": ids, self._modality: content, **filled}
        if self._modality == "words":
            columns["label"], labelled = documents.tags(raw, self._data, self._findings)
            keep &= labelled
        elif self._modality != "document":
            columns["label"], labelled = self._label(raw)
            keep &= labelled
        table = pa.table(columns)
        if not keep.all():
            table = table.filter(pa.array(keep)).combine_chunks()
        return table.append_column("hash", self._hashes(table)), keep

    def split_hashes(self, table: pa.Table) -> bytes:
        """What the hash split goes by: the hash of the key, or of the content."""
        if self._data.columns.key:
            return content_hashes(_one_chunk(table.column("id")))
        hashes = _one_chunk(table.column("hash"))
        start = hashes.offset * HASH_BYTES
        return bytes(memoryview(hashes.buffers()[1])[start : start + len(hashes) * HASH_BYTES])

    def _content(self, raw: RawBatch) -> tuple[pa.Array, Mask]:
        if self._modality == "image":
            return self._image(raw)
        if self._modality == "document":
            return documents.documents(raw, self._data.columns, self._findings)
        if self._modality == "words":
            return documents.words(raw, self._data.columns.words, self._findings)
        found = texts(raw, self._data.columns.text, "text", self._findings)
        blank = self._note("empty text", found.blank, raw)
        return found.values, ~(found.noted | blank)

    def _image(self, raw: RawBatch) -> tuple[pa.Array, Mask]:
        pixels: list[bytes | None] = []
        for row, value in enumerate(raw.columns[self._data.columns.image]):
            try:
                value = content_of(raw, value)
            except (OSError, ValueError) as error:
                self._findings.add("image", raw.place(row), str(error))
                pixels.append(None)
                continue
            pixels.append(self._images.pixels(value, raw.place(row), self._findings))
        return with_mask(pixels, pa.binary())

    def _label(self, raw: RawBatch) -> tuple[pa.Array, Mask]:
        found = texts(raw, self._data.columns.label, "scalar", self._findings)
        bad = found.noted | self._note("empty label", found.blank, raw)
        if self._labels is not None:
            known = np.asarray(pa.compute.is_in(found.values, self._labels), bool)
            unknown = ~known & ~bad
            for row in np.flatnonzero(unknown).tolist():
                self._findings.add("unknown label", raw.place(row), found.values[row].as_py())
            bad |= unknown
        return found.values, ~bad

    def _ids(self, raw: RawBatch) -> tuple[pa.Array, Mask]:
        key = self._data.columns.key
        if key is None:
            return raw.ids(), np.ones(len(raw), bool)
        found = texts(raw, key, "scalar", self._findings)
        return found.values, ~(found.noted | self._note("empty key", found.blank, raw))

    def _note(self, kind: str, rows: Mask, raw: RawBatch) -> Mask:
        for row in np.flatnonzero(rows).tolist():
            self._findings.add(kind, raw.place(row))
        return rows

    def _hashes(self, table: pa.Table) -> pa.Array:
        """SHA-256 of what the model sees, cut to 16 bytes; the shape of an image is part of it."""
        prefix = repr(self.image_shape).encode() if self._modality == "image" else b""
        hashes = content_hashes(_one_chunk(table.column(self._modality)), prefix)
        buffers = [None, pa.py_buffer(hashes)]
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(HASH_BYTES), len(table), buffers)


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
