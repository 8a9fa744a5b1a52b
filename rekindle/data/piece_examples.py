"""One piece of a source becomes examples: the work of a worker, for ingest.py.

A worker reads a piece into a file for each split, and returns what it found and counted.
Only a split by time needs the times of all records before it can place any: then pieces
are written undivided, with their times, and divided once the cuts are known."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.data import examples
from rekindle.data.examples import SPLITS, ExamplesWriter
from rekindle.data.executor import Order
from rekindle.data.normalise import Normaliser
from rekindle.data.pieces import check_versions, source_of
from rekindle.data.records import RecordsHash, Span, inside, read_times
from rekindle.data.roles import time_column, wanted_columns
from rekindle.data.source import FileSource
from rekindle.data.split import Times, digit_counts, hash_splits, time_splits
from rekindle.data.store import Entry, PieceStore, made_once
from rekindle.data.window import Window, parse_window
from rekindle.modalities.base import Shape
from rekindle.rows.columns import Source
from rekindle.rows.findings import Findings
from rekindle.spec.model import DataSpec

_TIME = "_rekindle_time"  # the column of times of an undivided piece
_TIMES = "times.npy"  # the same times, for `count_times`, which reads nothing else
UNDIVIDED = "all"  # the name of the one split of an undivided piece


@made_once
def ingest_piece(order: Order, item: Entry, store: PieceStore, folder: Path) -> dict[str, Any]:
    """Read a piece of the source, or all of it, into `folder`; returns `Piece.to_json`.

    Raises DataError where files are not those that were measured."""
    data = DataSpec.model_validate(order["data"])
    window = parse_window(order["window"])
    source = source_of(order, item, data, order["modality"])
    piece = Piece(data, order["modality"], window, order["shape"])
    check_versions(source)
    # before and after, because a file may change while it is read
    piece.write(source, folder)
    check_versions(source)
    if isinstance(source, FileSource) and not filters_rows(data, window):
        piece.hash_as_read = source.named
    return piece.to_json()


def filters_rows(data: DataSpec, window: Window | None) -> bool:
    """Whether a column says which records lie in the window; with `{window}` in the
    source, its partitions do."""
    return window is not None and "{window" not in data.source


def shape_of(values: Sequence[int] | None) -> Shape | None:
    """The shape that JSON holds as a list."""
    if not values:
        return None
    height, width, channels = values
    return height, width, channels


class _Splits:
    """Writes rows into a file for each split, and counts the rows of each class."""

    def __init__(self, writer: ExamplesWriter) -> None:
        self.writer = writer
        self.class_rows = {split: collections.Counter[str]() for split in SPLITS}

    def add(self, table: pa.Table, split_N: npt.NDArray[np.int8]) -> None:
        """Write the rows, each into the split with its number."""
        names = pa.DictionaryArray.from_arrays(pa.array(split_N), pa.array(SPLITS))
        table = table.append_column("split", names.cast(pa.string()))
        for number, split in enumerate(SPLITS):
            is_in_N = split_N == number
            if is_in_N.any():
                part = table if is_in_N.all() else table.filter(pa.array(is_in_N))
                self.writer.write(split, part)
                self.class_rows[split].update(examples.label_counts(part))


class Piece:
    """A worker's reading of one piece into files, and what it found."""

    span: Span
    """The times of all records, also of those outside the window."""
    hash_as_read: str
    """The piece's part of the fingerprint: a hash of the records in the window where a
    column says which these are, of the files that rows name otherwise; "" for neither."""
    batches: dict[str, list[int]]
    """The rows of each batch, by split."""

    def __init__(
        self, data: DataSpec, modality: str, window: Window | None, shape: Sequence[int] | None
    ) -> None:
        self.data = data
        self.modality = modality
        self.window = window
        self.findings = Findings()
        self.span = Span()
        self.hash_as_read = ""
        self.normaliser = Normaliser(data, modality, self.findings, shape_of(shape))
        self.batches = {}
        self.class_rows: Mapping[str, Mapping[str, int]] = {}

    def write(self, source: Source, folder: Path) -> None:
        """Write the examples of `source` by split; with their times where these divide them."""
        schema = examples.schema_of(self.modality, self.data.slices, self.data.is_numeric)
        if self.data.split.by == "time":
            self._write_undivided(source, folder, schema)
            return
        with ExamplesWriter(folder, schema) as writer:
            splits = _Splits(writer)
            for table, _, own_split in self.examples(source):
                if self.data.split.by == "source":
                    split_N = np.full(len(table), SPLITS.index(own_split or "train"), np.int8)
                else:
                    split_N = hash_splits(self.normaliser.split_hashes(table), self.data.split)
                splits.add(table, split_N)
        self.batches = writer.batches()
        self.class_rows = splits.class_rows

    def _write_undivided(self, source: Source, folder: Path, schema: pa.Schema) -> None:
        """Write the examples with their times, for `divide_piece` to divide."""
        without_split = schema.remove(schema.get_field_index("split"))
        timed = without_split.append(pa.field(_TIME, pa.int64()))
        all_times = [np.zeros(0, np.int64)]
        with ExamplesWriter(folder, timed, (UNDIVIDED,)) as writer:
            for table, times, _ in self.examples(source):
                writer.write(UNDIVIDED, table.append_column(_TIME, pa.array(times)))
                all_times.append(times)
        np.save(folder / _TIMES, np.concatenate(all_times))
        self.batches = writer.batches()

    def to_json(self) -> dict[str, Any]:
        """All that is known of the piece but the files."""
        return {
            "findings": self.findings.to_json(),
            "span": dataclasses.astuple(self.span),
            "shape": self.normaliser.image_shape,
            "seen": self.hash_as_read,
            "batches": self.batches,
            "class_rows": self.class_rows,
        }

    def examples(self, source: Source) -> Iterator[tuple[pa.Table, Times, str]]:
        """Tables of examples in the window, their times or zeros,
        and the source's own split."""
        column = time_column(self.data)
        columns = wanted_columns(self.data, self.modality)
        is_filtered = filters_rows(self.data, self.window)
        records = RecordsHash(columns)
        for raw in source.read(columns, self.findings):
            times = np.zeros(len(raw), np.int64)
            if column is not None:
                times, keep = read_times(raw, column, self.findings)
                self.span.include(times[keep])
                if is_filtered:
                    assert self.window is not None
                    keep &= inside(times, self.window)
                raw = raw.filter(keep)
                times = times[keep]
            if is_filtered:
                records.update(raw)
            if len(raw):
                table, is_example = self.normaliser(raw)
                yield table, times[is_example], raw.split
        self.hash_as_read = records.digest() if records.rows else ""


def count_times(order: Order, item: Entry) -> list[list[int]]:
    """The digits that occur in the times of an undivided piece, and how often each does
    (see `digit_counts`)."""
    with PieceStore(order["store"]).reading(item["key"], _TIMES) as path:
        total = digit_counts(np.load(path), order["prefix"], order["bits"])
    # as most of the 65,536 digits do not occur, this is shorter than a count of each
    (digits,) = np.nonzero(total)
    return [digits.tolist(), total[digits].tolist()]


@made_once
def divide_piece(order: Order, item: Entry, store: PieceStore, folder: Path) -> dict[str, Any]:
    """Divide an undivided piece at the cuts, into one file a split in `folder`."""
    data = DataSpec.model_validate(order["data"])
    schema = examples.schema_of(order["modality"], data.slices, data.is_numeric)
    cuts = tuple(order["cuts"])
    undivided = store.reading(item["from"], f"{UNDIVIDED}.arrow")
    with undivided as path, ExamplesWriter(folder, schema) as writer:
        splits = _Splits(writer)
        gap_rows = 0
        for batch in examples.ExamplesFile(path):
            split_N = time_splits(np.asarray(batch.column(_TIME)), cuts, order["gaps"])
            is_inside_N = split_N >= 0
            gap_rows += int(np.count_nonzero(~is_inside_N))
            table = pa.table(batch).filter(pa.array(is_inside_N))
            splits.add(table, split_N[is_inside_N])
    return {"batches": writer.batches(), "class_rows": splits.class_rows, "gap": gap_rows}
