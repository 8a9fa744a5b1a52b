"""Row groups of Parquet as batches of bounded size.

A file holds a repeated value once, so that a small one may take any memory when it is
read. Sizes are therefore known before anything is decoded, and a row or a row group that
is too large is refused."""

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from rekindle.data.files import MOST_ROW_BYTES, grouped
from rekindle.data.manifest import list_sums

_PARQUET_ROWS = 4_096
_LEAST_PARQUET_ROWS = 16
_PARQUET_BYTES = 128 << 20  # that one read may take, if a row group has one value in all rows
_HELD_BYTES = 64 << 20
_VALUES_AT_ONCE = 4 << 20  # of lists
_MOST_VALUES = 256 << 20  # of lists, in a row group
_STRING_BYTES = 50  # that a string takes in Python beside its letters

_LONG_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)


class TooLargeError(Exception):
    """A row, counted from 0, or all of a row group takes more memory than it may."""

    def __init__(self, what: str, row: int | None) -> None:
        super().__init__(what)
        self.row = row


def parquet_batches(
    parquet: pa.parquet.ParquetFile, stream: BinaryIO, columns: list[str], numbers: range
) -> Iterator[pa.RecordBatch]:
    """Batches of `_PARQUET_ROWS` rows of the row groups with these numbers, fewer if
    large: files hold repeated values once."""
    groups = [parquet.metadata.row_group(number) for number in numbers]
    # a row group that holds one value in all rows once may be as large when it is read
    largest = max((group.total_byte_size for group in groups), default=0)  # not compressed
    at_once = _PARQUET_BYTES // max(largest, 1)
    at_once = min(max(at_once, _LEAST_PARQUET_ROWS), _PARQUET_ROWS)
    leaves = []
    for number, leaf in enumerate(parquet.schema):
        if leaf.path.split(".")[0] in columns:
            leaves.append((number, leaf))
    for group in groups:
        values = max((group.column(number).num_values for number, _ in leaves), default=0)
        if values > _MOST_VALUES:
            raise TooLargeError(f"{values:,} values in one row group", None)
        rows_of_values = _VALUES_AT_ONCE * max(group.num_rows, 1) // max(values, 1)
        at_once = min(at_once, max(1, rows_of_values))
    strings = [leaf.path for _, leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    nested = [path for path in strings if "." in path]
    if nested:
        # as dictionaries, which hold a repeated value once, until `_plain` decodes them
        file = pa.PythonFile(stream, mode="r")
        parquet = pa.parquet.ParquetFile(file, pre_buffer=False, read_dictionary=nested)

    def pieces() -> Iterator[pa.RecordBatch]:
        first_row = 0
        for number in numbers:  # pyarrow joins no dictionaries in lists
            for batch in parquet.iter_batches(at_once, [number], columns, use_threads=False):
                yield from _plain(batch, first_row)
                first_row += len(batch)

    runs = grouped(pieces(), (len, _PARQUET_ROWS), (lambda piece: piece.nbytes, _HELD_BYTES))
    return map(_joined, runs)  # which keeps no group while the next one is read


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


def _plain(batch: pa.RecordBatch, first: int) -> Iterator[pa.RecordBatch]:
    """The batch, which begins with the row `first`, without dictionaries, in pieces of
    some `_HELD_BYTES`. Raises TooLargeError for a row that would take more than
    `MOST_ROW_BYTES`."""
    fields = enumerate(batch.schema)
    with_dictionary = [number for number, field in fields if _has_dictionary(field.type)]
    if not with_dictionary or not len(batch):
        yield batch
        return
    sizes = np.sum([_decoded_bytes(batch.column(number)) for number in with_dictionary], axis=0)
    too_large = np.flatnonzero(sizes > MOST_ROW_BYTES)
    if too_large.size:
        row = first + int(too_large[0])
        raise TooLargeError(f"a row of over {MOST_ROW_BYTES >> 20} MiB", row)
    ends = np.cumsum(sizes)
    start = 0
    while start < len(batch):
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + _HELD_BYTES, side="right"))
        stop = max(stop, start + 1)
        piece = batch.slice(start, stop - start)
        for number in with_dictionary:
            column = _decoded(piece.column(number))
            field = piece.schema.field(number).with_type(column.type)
            piece = piece.set_column(number, field, column)
        yield piece
        start = stop


def _has_dictionary(kind: pa.DataType) -> bool:
    """Whether a type is of dictionaries, or holds one within lists and structs."""
    if pa.types.is_struct(kind):
        return any(_has_dictionary(field.type) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _has_dictionary(kind.value_type)
    return bool(pa.types.is_dictionary(kind))


def _decoded(column: pa.Array) -> pa.Array:
    """Without dictionaries; a cast of a slice would cast what lies beside it, too."""
    kind = column.type
    if not _has_dictionary(kind):
        return column
    if pa.types.is_dictionary(kind):
        return column.dictionary_decode()
    absent = column.is_null()
    if pa.types.is_struct(kind):
        parts = [_decoded(part) for part in column.flatten()]
        return pa.StructArray.from_arrays(parts, [field.name for field in kind], mask=absent)
    lengths = np.asarray(column.value_lengths().fill_null(0), np.int64)
    starts = np.append(np.int64(0), np.cumsum(lengths))
    values = _decoded(column.flatten())
    if pa.types.is_large_list(kind):
        offsets = pa.array(starts.astype(np.int64))
        return pa.LargeListArray.from_arrays(offsets, values, mask=absent)
    offsets = pa.array(starts.astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values, mask=absent)


def _decoded_bytes(column: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of each value once dictionaries are gone."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        values = column.dictionary
        if not any(is_text(values.type) for is_text in _LONG_TYPES):
            return np.full(len(column), 8, np.int64)
        lengths = pc.binary_length(values).take(column.indices)
        return np.asarray(lengths.fill_null(0), np.int64) + _STRING_BYTES
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return list_sums(column, _decoded_bytes(column.flatten()))
    if pa.types.is_struct(kind):
        parts = [_decoded_bytes(part) for part in column.flatten()]
        if not parts:
            return np.zeros(len(column), np.int64)
        total: npt.NDArray[np.int64] = np.sum(parts, axis=0, dtype=np.int64)
        return total
    bytes_each = -(-column.nbytes // max(len(column), 1))  # rounded up
    return np.full(len(column), bytes_each, np.int64)
