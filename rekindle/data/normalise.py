"""Raw rows of any source as examples; what is unfit is noted and left out.

What the content of a row is, its modality says (rekindle/modalities)."""

import re

import numpy as np
import pyarrow as pa

from rekindle.data.examples import HASH_BYTES
from rekindle.data.split import content_hashes, stored_hashes
from rekindle.modalities import load_modality
from rekindle.modalities.base import Shape
from rekindle.modalities.labels import note_rows
from rekindle.rows.columns import Mask, RawBatch, texts
from rekindle.rows.findings import Findings
from rekindle.spec.model import DataSpec

_GROUP = "_rekindle_group"


class Normaliser:
    """Turns raw batches into tables of examples:
    the columns of tasks/base.py but `split`."""

    def __init__(
        self, data: DataSpec, modality: str, findings: Findings, image_shape: Shape | None = None
    ) -> None:
        """`image_shape`: that of the first image, where it lies in an earlier piece."""
        self._data = data
        kind = load_modality(modality)
        self._content_column = kind.field.name
        self._reader = kind.reader(data, image_shape)
        self._all_findings = findings
        self._findings = findings

    @property
    def image_shape(self) -> Shape | None:
        return self._reader.shape

    def __call__(self, raw: RawBatch) -> tuple[pa.Table, Mask]:
        """The examples of a batch, and which of its rows they are."""
        self._findings = Findings()  # of this batch: a row may have several faults
        table, keep = self._examples(raw)
        self._all_findings.include(self._findings, int(np.count_nonzero(~keep)))
        return table, keep

    def _examples(self, raw: RawBatch) -> tuple[pa.Table, Mask]:
        content, keep = self._reader.content(raw, self._findings)
        # a row keeps its id wherever it stands only if it has a key
        key = self._data.columns.key
        if key is None:
            ids = raw.ids()
        else:
            column = texts(raw, key, "scalar", self._findings)
            keep &= ~(column.noted | note_rows("empty key", column.blank, raw, self._findings))
            ids = column.values
        values: dict[str, pa.Array] = {"id": ids, self._content_column: content}
        groups = None
        group = self._data.columns.group
        if group is not None:
            groups = texts(raw, group, "scalar", self._findings)
            keep &= ~(groups.noted | note_rows("empty group", groups.blank, raw, self._findings))
        for name in self._data.slices:
            column = texts(raw, name, "scalar", self._findings)
            keep &= ~column.noted
            values[name] = column.values.fill_null("")
        if groups is not None:
            values[_GROUP] = groups.values
        labels = self._reader.labels(raw, self._findings)
        if labels is not None:
            values["label"], is_labelled = labels
            keep &= is_labelled
        table = pa.table(values)
        if not keep.all():
            table = table.filter(pa.array(keep)).combine_chunks()
        return table.append_column("hash", self._hashes(table)), keep

    def _hashes(self, table: pa.Table) -> pa.Array:
        """SHA-256 of what the model sees of each row; an image's shape is part of it."""
        # two images of other shapes may have the same bytes
        prefix = repr(self.image_shape).encode() if self.image_shape is not None else b""
        hashes = content_hashes(_one_chunk(table.column(self._content_column)), prefix)
        buffers = [None, pa.py_buffer(hashes)]
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(HASH_BYTES), len(table), buffers)

    def split_hashes(self, table: pa.Table) -> bytes:
        """What the hash split goes by: the hash of the group, the key, or the content."""
        if self._data.columns.group:
            return content_hashes(_one_chunk(table.column(_GROUP)))
        if self._data.columns.key:
            return content_hashes(_one_chunk(table.column("id")))
        return stored_hashes(_one_chunk(table.column("hash")))


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
