"""The folder between `ingest` and `shard`: Arrow files of normalised examples, one for
each split of each piece of the source (`train-00000.arrow`), and `summary.json`, written
last.

A batch ends after `BATCH_ROWS` rows or `BATCH_BYTES` bytes of content, counted row by
row, so that the bytes of a file depend on the examples alone. A batch is what a worker
encodes at once and what is in memory at once. Files are lz4-compressed."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pydantic
from pydantic import Field

from rekindle.errors import DataError
from rekindle.modalities import MODALITIES, load_modality
from rekindle.modalities.base import Modality
from rekindle.records import SCHEMA_VERSION, Record

SPLITS = ("train", "validation", "test")
SUMMARY = "summary.json"
HASH_BYTES = 16
BATCH_ROWS = 2_000
BATCH_BYTES = 4 << 20


class ExamplesPart(Record):
    """A file of examples: its split, the rows of each batch, its hash,
    the number of its source."""

    path: str
    split: str
    batches: tuple[int, ...]
    sha256: str
    source: int = 0


class ExamplesSummary(Record):
    """`summary.json`: `rows` per split, `class_rows` per split and label (words, where
    each has a tag), `labels` in index order, `image_shape` as height, width, channels;
    `source` is the fingerprint; `files` by split, then in the order of their rows;
    `bad_rows` and `left_out` as in `ShardManifest`, `faulty` the rows of `bad_rows`, each
    once. `pieces` says how many there were and were new, but not in the file."""

    schema_version: int = SCHEMA_VERSION
    modality: str
    window: str
    source: str
    labels: tuple[str, ...]
    slices: tuple[str, ...]
    image_shape: tuple[int, int, int] | None = None
    rows: Mapping[str, int] = Field(default_factory=dict)
    class_rows: Mapping[str, Mapping[str, int]] = Field(default_factory=dict)
    files: tuple[ExamplesPart, ...] = ()
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    faulty: int = 0
    left_out: Mapping[str, int] = Field(default_factory=dict)
    pieces: str = Field("", exclude=True)


def schema_of(modality: str, slices: Sequence[str], numeric: bool = False) -> pa.Schema:
    """Columns of examples, as tasks/base.py lists them; `numeric`: labels are numbers."""
    fields = [
        pa.field("id", pa.string()),
        pa.field("hash", pa.binary(HASH_BYTES)),
        pa.field("split", pa.string()),
    ]
    kind = load_modality(modality)
    if kind.label_type is not None:
        fields.append(pa.field("label", pa.float64() if numeric else kind.label_type))
    fields.append(kind.field)
    fields += [pa.field(name, pa.string()) for name in slices]
    return pa.schema(fields)


def modality_in(schema: pa.Schema) -> Modality[Any, Any]:
    """The modality of examples with this schema: one of their columns is what the model
    sees, the others say something of it."""
    return next(load_modality(name) for name in MODALITIES if name in schema.names)


def label_counts(table: pa.Table) -> dict[str, int]:
    """How many examples (words, where these have
    tags) have each label; {} without classes."""
    if "label" not in table.schema.names:
        return {}
    labels = table.column("label")
    if pa.types.is_floating(labels.type):
        return {}
    if pa.types.is_list(labels.type):
        labels = pa.chunked_array([chunk.flatten() for chunk in labels.chunks], pa.string())
    return {row["values"]: row["counts"] for row in labels.value_counts().to_pylist()}


class ExamplesWriter:
    """Writes `SPLIT.arrow` files of evenly cut batches; a context manager."""

    def __init__(self, folder: Path, schema: pa.Schema, names: tuple[str, ...] = SPLITS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: _BatchFile(folder / f"{name}.arrow", schema) for name in names}

    def write(self, name: str, table: pa.Table) -> None:
        self._files[name].append(table)

    def batches(self) -> dict[str, list[int]]:
        """The rows of each batch of each file that is complete."""
        return {name: file.batches for name, file in self._files.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for file in self._files.values():
            file.close(complete=kind is None)


class _BatchFile:
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self.batches = list[int]()
        self._hold([])
        # these files are read, and not mapped as shards are
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_file(str(path), schema, options=options)

    def append(self, table: pa.Table) -> None:
        part = table.select(self.schema.names).cast(self.schema)
        self._pending.append(part)
        self._rows += len(part)
        self._bytes += part.nbytes
        if self._rows >= BATCH_ROWS or self._bytes >= BATCH_BYTES:
            self._flush(keep_last=True)

    def close(self, *, complete: bool) -> None:
        if complete:
            self._flush(keep_last=False)
        self._writer.close()

    def _hold(self, pending: list[pa.Table]) -> None:
        """Keep these rows for the next batch."""
        self._pending = pending
        self._rows = sum(len(table) for table in pending)
        self._bytes = sum(table.nbytes for table in pending)

    def _flush(self, *, keep_last: bool) -> None:
        """Write all full batches; the rows behind
        them stay pending unless the file ends."""
        if not self._rows:
            self._hold([])
            return
        table = pa.concat_tables(self._pending).combine_chunks()
        self._hold([])
        # batches are cut by the bytes of the content, however rows came in tables
        content = table.column(modality_in(table.schema).field.name)
        cuts = _cuts(np.asarray(pa.compute.binary_length(content), np.int64))
        for start, end in itertools.pairwise(cuts):
            self._write(table.slice(start, end - start))
        last_rows = table.slice(cuts[-1])
        if keep_last:
            self._hold([last_rows])
        elif len(last_rows):
            self._write(last_rows)

    def _write(self, batch: pa.Table) -> None:
        self._writer.write_table(batch, max_chunksize=BATCH_ROWS)
        self.batches.append(len(batch))


def _cuts(row_bytes: npt.NDArray[np.int64]) -> list[int]:
    """Where full batches end, from 0: after `BATCH_ROWS` rows, or `BATCH_BYTES` bytes."""
    ends = np.cumsum(row_bytes)
    cuts = [0]
    while True:
        start = cuts[-1]
        before = int(ends[start - 1]) if start else 0
        end = min(start + BATCH_ROWS, int(np.searchsorted(ends, before + BATCH_BYTES)) + 1)
        if end > len(ends):
            return cuts
        cuts.append(end)


class ExamplesFile:
    """Random access to batches of files, one in memory at a time (read, not mapped)."""

    def __init__(self, *paths: Path, columns: tuple[str, ...] = ()) -> None:
        readers = [_open_file(path, columns) for path in paths]
        self.schema: pa.Schema = readers[0].schema
        self._batches = list[tuple[pa.ipc.RecordBatchFileReader, int]]()
        for reader in readers:
            self._batches += [(reader, batch) for batch in range(reader.num_record_batches)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> pa.RecordBatch:
        reader, batch = self._batches[index]
        return reader.get_batch(batch)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return (self[i] for i in range(len(self)))


def _open_file(path: Path, columns: tuple[str, ...]) -> pa.ipc.RecordBatchFileReader:
    try:
        reader = pa.ipc.open_file(pa.OSFile(str(path)))
        if columns:
            # the names are in the file alone, and the options take their numbers
            fields = [reader.schema.get_field_index(name) for name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            reader = pa.ipc.open_file(pa.OSFile(str(path)), options=options)
    except (OSError, pa.ArrowInvalid) as error:
        message = f"{path.name} is not a file of examples: {error}"
        raise DataError(message, where=str(path), fix="run the step `ingest` again") from None
    return reader


def open_examples(folder: Path, split: str, *columns: str) -> ExamplesFile:
    """The batches of one split that `ingest` wrote; of the named columns only, if any."""
    # the name of a first file where there is none, for the message that it is missing
    paths = sorted(folder.glob(f"{split}-*.arrow")) or [folder / f"{split}-00000.arrow"]
    return ExamplesFile(*paths, columns=columns)


def read_summary(folder: Path) -> ExamplesSummary:
    """The summary of a folder that `ingest` completed; raises DataError."""
    path = folder / SUMMARY
    try:
        return ExamplesSummary.read(path)
    except (OSError, pydantic.ValidationError) as error:
        fault = f"cannot be read: {error}"
        if isinstance(error, FileNotFoundError):
            fault = "is missing"
        fix = "run the step `ingest` again"
        raise DataError(f"{SUMMARY} {fault}", where=str(path), fix=fix) from None
