"""The folder between `ingest` and `shard`: one Arrow file of normalised examples a split, and
`summary.json`, written last.

A batch ends after `BATCH_ROWS` rows or `BATCH_BYTES` bytes of content, counted row by row, so that
the bytes of a file depend on the examples alone. A batch is what a worker encodes at once and what
is in memory at once. Files are lz4-compressed."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pydantic
from pydantic import Field

from rekindle.errors import DataError
from rekindle.records import SCHEMA_VERSION, Record

SPLITS = ("train", "validation", "test")
SUMMARY = "summary.json"
CONTENT = ("text", "words", "image", "document")
"""One of these columns is what the model sees; the others say something of it."""
HASH_BYTES = 16
BATCH_ROWS = 2_000
BATCH_BYTES = 4 << 20


class ExamplesSummary(Record):
    """`summary.json`: `rows` per split, `class_rows` per split and label (words, where each has a
    tag), `labels` in index order, `image_shape` as height, width, channels; `source` is the
    fingerprint; `bad_rows` and `left_out` as in `ShardManifest`."""

    schema_version: int = SCHEMA_VERSION
    modality: str
    window: str
    source: str
    labels: tuple[str, ...]
    slices: tuple[str, ...]
    image_shape: tuple[int, int, int] | None = None
    rows: Mapping[str, int] = Field(default_factory=dict)
    class_rows: Mapping[str, Mapping[str, int]] = Field(default_factory=dict)
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    left_out: Mapping[str, int] = Field(default_factory=dict)


def schema_of(modality: str, slices: tuple[str, ...]) -> pa.Schema:
    """Columns of examples, as tasks/base.py lists them."""
    one = pa.list_(pa.string()) if modality == "words" else pa.string()
    label = [] if modality == "document" else [pa.field("label", one)]
    content = pa.field(modality, pa.binary() if modality == "image" else pa.string())
    first = [pa.field("id", pa.string()), pa.field("hash", pa.binary(HASH_BYTES))]
    split, *others = [pa.field(name, pa.string()) for name in ("split", *slices)]
    return pa.schema([*first, split, *label, content, *others])


def label_counts(table: pa.Table) -> dict[str, int]:
    """How many examples (words, where each has a tag) have each label; {} without labels."""
    if "label" not in table.schema.names:
        return {}
    labels = table.column("label")
    if pa.types.is_list(labels.type):
        labels = pa.chunked_array([chunk.flatten() for chunk in labels.chunks], pa.string())
    return {each["values"]: each["counts"] for each in labels.value_counts().to_pylist()}


class ExamplesWriter:
    """Writes `SPLIT.arrow` files of evenly cut batches; a context manager."""

    def __init__(self, folder: Path, schema: pa.Schema, names: tuple[str, ...] = SPLITS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: _BatchFile(folder / f"{name}.arrow", schema) for name in names}

    def write(self, name: str, table: pa.Table) -> None:
        self._files[name].append(table)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for file in self._files.values():
            file.close(complete=kind is None)


@dataclasses.dataclass
class _BatchFile:
    path: Path
    schema: pa.Schema
    _pending: list[pa.Table] = dataclasses.field(default_factory=list)
    _rows: int = 0
    _bytes: int = 0

    def __post_init__(self) -> None:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_file(str(self.path), self.schema, options=options)

    def append(self, table: pa.Table) -> None:
        part = table.select(self.schema.names).cast(self.schema)
        self._pending.append(part)
        self._rows, self._bytes = self._rows + len(part), self._bytes + part.nbytes
        if self._rows >= BATCH_ROWS or self._bytes >= BATCH_BYTES:
            self._flush(keep_last=True)

    def close(self, *, complete: bool) -> None:
        if complete:
            self._flush(keep_last=False)
        self._writer.close()

    def _flush(self, *, keep_last: bool) -> None:
        """Write all full batches; the rows after the last one stay pending unless the file ends."""
        table = pa.concat_tables(self._pending).combine_chunks() if self._pending else None
        self._pending, self._rows, self._bytes = [], 0, 0
        if table is None or not len(table):
            return
        content = next(table.column(name) for name in CONTENT if name in table.schema.names)
        cuts = _cuts(np.asarray(pa.compute.binary_length(content), np.int64))
        for start, end in itertools.pairwise(cuts):
            self._writer.write_table(table.slice(start, end - start), max_chunksize=BATCH_ROWS)
        rest = table.slice(cuts[-1])
        if keep_last:
            self._pending, self._rows, self._bytes = [rest], len(rest), rest.nbytes
        elif len(rest):
            self._writer.write_table(rest, max_chunksize=BATCH_ROWS)


def _cuts(row_bytes: npt.NDArray[np.int64]) -> list[int]:
    """Where full batches end, from 0: at `BATCH_ROWS` rows, or where `BATCH_BYTES` are reached."""
    ends, cuts = np.cumsum(row_bytes), [0]
    while True:
        start = cuts[-1]
        before = int(ends[start - 1]) if start else 0
        end = min(start + BATCH_ROWS, int(np.searchsorted(ends, before + BATCH_BYTES)) + 1)
        if end > len(ends):
            return cuts
        cuts.append(end)


class ExamplesFile:
    """Random access to the batches of one split, one in memory at a time (read, not mapped)."""

    def __init__(self, path: Path, columns: tuple[str, ...] = ()) -> None:
        try:
            self._reader = pa.ipc.open_file(pa.OSFile(str(path)))
            if columns:
                fields = [self._reader.schema.get_field_index(name) for name in columns]
                options = pa.ipc.IpcReadOptions(included_fields=fields)
                self._reader = pa.ipc.open_file(pa.OSFile(str(path)), options=options)
        except (OSError, pa.ArrowInvalid) as error:
            fix = "run the step `ingest` again"
            what = f"{path.name} is not a file of examples: {error}"
            raise DataError(what, where=str(path), fix=fix) from None

    def __len__(self) -> int:
        return int(self._reader.num_record_batches)

    @property
    def schema(self) -> pa.Schema:
        return self._reader.schema

    def __getitem__(self, index: int) -> pa.RecordBatch:
        return self._reader.get_batch(index)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return (self[i] for i in range(len(self)))


def open_examples(folder: Path, split: str, *columns: str) -> ExamplesFile:
    """The batches of one split that `ingest` wrote; of the named columns only, if any."""
    return ExamplesFile(folder / f"{split}.arrow", columns)


def read_summary(folder: Path) -> ExamplesSummary:
    """The summary of a folder that `ingest` completed; raises DataError."""
    path = folder / SUMMARY
    try:
        return ExamplesSummary.read(path)
    except (OSError, pydantic.ValidationError) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        fix = "run the step `ingest` again"
        raise DataError(f"{SUMMARY} {what}", where=str(path), fix=fix) from None
