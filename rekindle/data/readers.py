"""Files as raw batches: CSV and Parquet by pyarrow, and JSON lines where it can read them.

A file is read in blocks of `BLOCK_BYTES`, of the wanted columns only. A block of JSON
lines that is not regular (one object a line, each column of one type) is parsed by
Python, which gives the same values and knows which line is at fault. What cannot be
parsed is noted and skipped.

DuckDB's reader was tried on 2026-11-30 (2.0.1, `store_rejects`): it counts rows where a
quoted value has line ends, gives no line for good rows, and ends in an error for files that
are read here, with mixed line ends or blank lines before the header."""

import csv
import io
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from rekindle.data.encodings import encoding_of
from rekindle.data.files import SourceFile, delimiter_of, grouped
from rekindle.data.manifest import list_sums
from rekindle.rows import Columns
from rekindle.rows.columns import RawBatch
from rekindle.rows.findings import Findings

BLOCK_BYTES = 4 << 20
MOST_LINE_BYTES = 64 << 20
_PARQUET_ROWS = 4_096
_LEAST_PARQUET_ROWS = 16
_PARQUET_BYTES = 128 << 20  # that one read may take, if a row group has one value in all rows
_HELD_BYTES = 64 << 20
_VALUES_AT_ONCE = 4 << 20  # of lists
_MOST_VALUES = 256 << 20  # of lists, in a row group
_STRING_BYTES = 50  # that a string takes in Python beside its letters
_UTF8_MARK = b"\xef\xbb\xbf"
_HEADER_BYTES = 1 << 20
_PROBED_LINES = 100
_DELIMITERS = ",;\t|"

_LONG_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)

Reader = Callable[[SourceFile, Columns, Findings], Iterator[RawBatch]]


def read_csv(file: SourceFile, columns: Columns, findings: Findings) -> Iterator[RawBatch]:
    """The rows of a CSV or TSV file, each with its first line;
    blank lines are skipped."""
    head = file.head(_HEADER_BYTES)
    delimiter = file.delimiter
    if delimiter == "auto":
        delimiter = delimiter_of(file.name, head)
    if not _csv_header_fits(file, head, delimiter, columns, findings):
        return
    header = _header_line(head) if file.start else b""
    with file.open(header) as stream:
        lines = _RowLines(stream, delimiter, file.line - header.count(b"\n"))

        def skip(row: pa.csv.InvalidRow) -> str:
            fault = f"{row.actual_columns} values for {row.expected_columns} columns: {row.text}"
            findings.add("malformed", f"{file.name}:{lines.skip(row.number)}", fault)
            return "skip"

        try:
            for batch in _csv_batches(lines, delimiter, columns, skip):
                yield _raw(batch, lines.take(len(batch)), file)
        except pa.ArrowInvalid as error:
            place = file.name
            fault = str(error)
            # the message of pyarrow is all that tells this fault from others
            if "straddling" in fault:  # pyarrow's word for a row that fits into no block
                place = f"{file.name}:{lines.next_line()}"
                fault = f"a quote that is never closed, or a row of over {BLOCK_BYTES:,} bytes"
            findings.add("malformed", place, fault, cut=True)
        if lines.quote_at_the_end > 0:
            findings.cut = True
        unclosed = lines.unclosed()
        if unclosed:
            findings.add("malformed", f"{file.name}:{unclosed}", "a quote that is never closed")


def _header_line(head: bytes) -> bytes:
    """The line that names the columns, with the mark and the blank lines before it."""
    begin = len(head) - len(head.removeprefix(_UTF8_MARK).lstrip(b"\r\n"))
    return head[: head.find(b"\n", begin) + 1]


def _csv_batches(
    lines: "_RowLines",
    delimiter: str,
    columns: Columns,
    skip: Callable[[pa.csv.InvalidRow], str],
) -> Iterator[pa.RecordBatch]:
    """The columns by pyarrow; rows with too few or too many values go to `skip`."""
    types = {}
    for name, kind in columns.items():
        # texts are checked for UTF-8 later, row by row; an image is the path of one
        types[name] = pa.string() if kind == "image" else pa.binary()
    # one thread: the workers share the cores
    read = pa.csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)
    parse = pa.csv.ParseOptions(
        delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip
    )
    convert = pa.csv.ConvertOptions(include_columns=list(columns), column_types=types)
    yield from pa.csv.open_csv(pa.PythonFile(lines, mode="r"), read, parse, convert)


class _RowLines(io.RawIOBase):
    """A CSV stream that knows the line where each row begins;
    pyarrow reads it in a thread."""

    def __init__(self, stream: BinaryIO, delimiter: str, line: int) -> None:
        self._row = _row_pattern(delimiter)
        self._stream = stream
        self._partial_row = b""
        self._line = line
        self._held_back = b""
        self._at_start = True
        self._lock = threading.Lock()
        # lines of the rows from `_first` on, and those
        # rows that are left out, the header first
        self._lines = np.empty(0, np.int64)
        self._first = 1
        self._skipped = [1]
        self.quote_at_the_end = 0
        """The line of a quote that takes all after it; 0 for none."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, once the rows that end in them are known."""
        if size > 0:
            size -= len(self._held_back)
        piece = self._held_back + self._stream.read(size)
        self._held_back = b""
        # pyarrow drops a newline that begins a block
        # behind a carriage return, within quotes, too
        if len(piece) > 1 and piece.endswith(b"\r"):
            self._held_back = b"\r"
            piece = piece[:-1]
        text = self._partial_row + piece
        if self._partial_row and not piece:  # at the end of the file, which may lack a newline
            text += b"\n"
        if self._at_start:
            text = text.removeprefix(_UTF8_MARK)
        self._at_start = False
        lengths, heights, is_filled = self._measured(text)
        self._partial_row = text[int(lengths.sum()) :]
        first_lines = (self._line + np.cumsum(heights) - heights)[is_filled]
        self._line += int(heights.sum())
        if not piece and self._partial_row:
            self.quote_at_the_end = self._line
            self._partial_row = b""
            first_lines = np.append(first_lines, self._line)
        with self._lock:
            self._lines = np.append(self._lines, first_lines)
        return piece

    def _measured(
        self, text: bytes
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Of the rows that end in `text`: their bytes, their lines, and whether they hold
        more than the end of a line."""
        ends = _ends_of_lines(text)
        if ends is None:
            rows = [row for row in self._row.findall(text) if row]
            lengths = np.array([len(row) for row in rows], np.int64)
            heights = np.array([row.count(b"\n") or 1 for row in rows], np.int64)
            is_filled = np.array([bool(row.strip(b"\r\n")) for row in rows], bool)
            return lengths, heights, is_filled
        lengths = np.diff(ends, prepend=0)
        is_filled = lengths > 1
        if b"\r" in text:
            before_newline = np.frombuffer(b"\n" + text, np.uint8)[ends - 1]
            is_filled = lengths > 1 + (before_newline == ord("\r"))
        return lengths, np.ones(len(ends), np.int64), is_filled

    def skip(self, row: int) -> int:
        """Leave out a row, 1 being the header; returns its line."""
        with self._lock:
            self._skipped.append(row)
            return int(self._lines[row - self._first])

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The lines of the next so many rows that are not left out."""
        with self._lock:
            rows = np.arange(self._first, self._first + count + len(self._skipped))
            rows = np.setdiff1d(rows, self._skipped, assume_unique=True)[:count]
            lines: npt.NDArray[np.int64] = self._lines[rows - self._first]
            after = int(rows[-1]) + 1 if count else self._first
            self._lines = self._lines[after - self._first :]
            self._first = after
            self._skipped = [row for row in self._skipped if row >= after]
            return lines

    def next_line(self) -> int:
        """The line of the row that `take` would begin with,
        which may still be incomplete."""
        with self._lock:
            rows = np.arange(self._first, self._first + len(self._lines))
            remaining_rows = np.setdiff1d(rows, self._skipped, assume_unique=True)
            if not len(remaining_rows):
                return self._line
            return int(self._lines[remaining_rows[0] - self._first])

    def unclosed(self) -> int:
        """At the end, the line of a last row whose quote is not closed; 0 for none."""
        return 0 if self._skipped else self.quote_at_the_end


def _row_pattern(delimiter: str) -> re.Pattern[bytes]:
    """A group that holds one row of a CSV file with the end of its line, and is empty for
    what follows the last row that ends; quotes within a quoted value are doubled."""
    delimiter = re.escape(delimiter)
    # possessive: a row that does not end is not tried again in shorter parts
    plain = f"[^{delimiter}\r\n]*+"
    quoted = '"(?:[^"]++|"")*+"'
    value = f'(?:(?!"){plain}|{quoted}{plain})'
    row = f"({value}(?:{delimiter}{value})*+(?:\r\n|\n|\r(?=.)))|.+"
    return re.compile(row.encode(), re.DOTALL)


def _ends_of_lines(text: bytes) -> npt.NDArray[np.int64] | None:
    """Where lines end, if each row is one:
    an even number of quotes is before each end."""
    if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
        return None
    letters = np.frombuffer(text, np.uint8)
    # the fast way, for the many files without a newline in quotes
    ends = np.flatnonzero(letters == ord("\n"))
    if len(ends) and b'"' in text:
        quotes = (letters == ord('"')).view(np.uint8)[: ends[-1]]
        starts = np.append(0, ends[:-1] + 1)
        if np.bitwise_xor.reduceat(np.append(quotes, np.uint8(0)), starts).any():
            return None
    return ends + 1


def read_parquet(file: SourceFile, columns: Columns, findings: Findings) -> Iterator[RawBatch]:
    """The rows of a Parquet file, numbered from 1."""
    with file.open_anywhere() as stream:
        try:
            # pre-buffering would hold whole row groups in memory
            parquet = pa.parquet.ParquetFile(pa.PythonFile(stream, mode="r"), pre_buffer=False)
            names = parquet.schema_arrow.names
            if findings.missing_columns(file.name, columns, names):
                return
            if _note_duplicate_columns(file, columns, names, findings):
                return
            row = file.line
            groups = range(file.start, file.end or parquet.num_row_groups)
            for batch in _parquet_batches(parquet, stream, list(columns), groups):
                yield _raw(batch, np.arange(row, row + len(batch)), file)
                row += len(batch)
        except _TooLargeError as error:
            place = file.name if error.row is None else f"{file.name}:{error.row + file.line}"
            findings.add("malformed", place, str(error), cut=True)
        except (pa.ArrowInvalid, OSError) as error:
            findings.add("malformed", file.name, f"no Parquet file: {error}", cut=True)


class _TooLargeError(Exception):
    """A row, counted from 0, or all of a row group takes more memory than it may."""

    def __init__(self, what: str, row: int | None) -> None:
        super().__init__(what)
        self.row = row


def _parquet_batches(
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
            raise _TooLargeError(f"{values:,} values in one row group", None)
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
    some `_HELD_BYTES`. Raises _TooLargeError for a row that would take more than
    `MOST_LINE_BYTES`."""
    fields = enumerate(batch.schema)
    with_dictionary = [number for number, field in fields if _has_dictionary(field.type)]
    if not with_dictionary or not len(batch):
        yield batch
        return
    sizes = np.sum([_decoded_bytes(batch.column(number)) for number in with_dictionary], axis=0)
    too_large = np.flatnonzero(sizes > MOST_LINE_BYTES)
    if too_large.size:
        row = first + int(too_large[0])
        raise _TooLargeError(f"a row of over {MOST_LINE_BYTES >> 20} MiB", row)
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


def read_jsonl(file: SourceFile, columns: Columns, findings: Findings) -> Iterator[RawBatch]:
    """The rows of JSON objects, one a line; blank lines are skipped, absent keys null."""
    schema: pa.Schema | None = None
    line = file.line
    with file.open() as stream:
        for number, block in enumerate(_line_blocks(stream)):
            if len(block) > MOST_LINE_BYTES:
                fault = f"a line of over {MOST_LINE_BYTES >> 20} MiB"
                findings.add("malformed", f"{file.name}:{line}", fault, cut=True)
                return
            if number == 0:
                if _is_utf16(file, block, findings):
                    return
                block = block.removeprefix(_UTF8_MARK)
                keys, schema = _probe(block, columns)
                # a part may lack what the beginning of the file has
                if keys and not file.start and findings.missing_columns(file.name, columns, keys):
                    return
            regular = _regular_block(block, schema) if schema is not None else None
            if regular is not None:
                yield _raw(regular, np.arange(line, line + len(regular)), file)
            else:
                yield _irregular_block(block, line, file, columns, findings)
            line += block.count(b"\n")


READERS: dict[str, Reader] = {"csv": read_csv, "jsonl": read_jsonl, "parquet": read_parquet}


def _raw(batch: pa.RecordBatch, lines: npt.NDArray[np.int64], file: SourceFile) -> RawBatch:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    return RawBatch(columns, lines, file.name, file.split, fetch=file.fetch)


def _csv_header_fits(
    file: SourceFile, head: bytes, delimiter: str, columns: Columns, findings: Findings
) -> bool:
    """Whether the header names each wanted column once; notes what it lacks."""
    if _is_utf16(file, head, findings):
        return False
    if len(head) >= _HEADER_BYTES and b"\n" not in head:
        findings.note(
            f"the first line, which names the columns, is over {_HEADER_BYTES >> 20} MiB long",
            where=file.name,
            fix="keep only the columns that are needed",
        )
        return False
    text = head.decode("utf-8-sig", errors="replace")
    try:
        header = _header(text, delimiter)
    except csv.Error as error:
        findings.note(
            f"the header cannot be read: {error}",
            where=file.name,
            fix="close the quote, or name the columns in shorter words",
        )
        return False
    if header is None:
        findings.note(
            "the file is empty",
            where=file.name,
            fix="the first line must name the columns",
        )
        return False
    if any("\ufffd" in name for name in header):
        findings.note(
            "the names of the columns are not UTF-8",
            where=file.name,
            fix=f"set data.encoding, such as to {encoding_of(head)}, or convert the file, "
            "such as by iconv -f CP1252 -t UTF-8",
        )
        return False
    if not set(columns) & set(header):
        for mark in _DELIMITERS.replace(delimiter, ""):
            if set(columns) & set(_header(text, mark) or ()):
                findings.note(
                    f"its columns are divided by {mark!r}, and were read with {delimiter!r}",
                    where=file.name,
                    fix=f"set data.delimiter: {json.dumps(mark)}",
                )
                return False
    if findings.missing_columns(file.name, columns, header):
        return False
    return not _note_duplicate_columns(file, columns, header, findings)


def _header(text: str, delimiter: str) -> list[str] | None:
    """The names of the columns in the first line that is not empty."""
    for values in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
        if values:
            return values
    return None


def _note_duplicate_columns(
    file: SourceFile, columns: Columns, present: Sequence[str], findings: Findings
) -> bool:
    """Whether wanted columns stand in the file more than once, each noted."""
    duplicates = sorted(name for name in columns if present.count(name) > 1)
    for name in duplicates:
        findings.note(f"duplicate column `{name}`", where=file.name, fix="rename one")
    return bool(duplicates)


def _is_utf16(file: SourceFile, head: bytes, findings: Findings) -> bool:
    """Whether a file begins as UTF-16 or UTF-32 does: with its mark, or null bytes."""
    if not head.startswith((b"\xff\xfe", b"\xfe\xff")) and b"\0" not in head[:4]:
        return False
    findings.note(
        "the file is not UTF-8 but UTF-16 or UTF-32",
        where=file.name,
        fix=f"set data.encoding: {encoding_of(head)}, or convert it: iconv -f UTF-16 -t UTF-8",
    )
    return True


def _line_blocks(stream: BinaryIO) -> Iterator[bytes]:
    """The stream in pieces that end with a newline, but for the last,
    or an overlong one."""
    unfinished = list[bytes]()
    unfinished_bytes = 0
    while data := stream.read(BLOCK_BYTES):
        end = data.rfind(b"\n") + 1
        if end:
            yield b"".join((*unfinished, data[:end]))
            unfinished = []
            unfinished_bytes = 0
        unfinished.append(data[end:])
        unfinished_bytes += len(data) - end
        if unfinished_bytes > MOST_LINE_BYTES:
            break
    if unfinished_bytes:
        yield b"".join(unfinished)


def _probe(block: bytes, columns: Columns) -> tuple[list[str], pa.Schema | None]:
    """The keys of the first objects,
    and the types of wanted columns that have one kind."""
    objects = []
    for text in block.split(b"\n", _PROBED_LINES)[:_PROBED_LINES]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    keys = list(dict.fromkeys(key for value in objects for key in value))
    fields = []
    for name in columns:
        kinds = {type(value.get(name)) for value in objects} - {type(None)}
        # other kinds are left to Python's parser, which keeps each value as it is
        if kinds not in ({str}, {int}):
            return keys, None
        fields.append(pa.field(name, pa.string() if kinds == {str} else pa.int64()))
    return keys, pa.schema(fields)


def _regular_block(block: bytes, schema: pa.Schema) -> pa.RecordBatch | None:
    """The block by pyarrow; None unless a line is an object,
    and a column has one type."""
    lines = block.count(b"\n")
    if not block.endswith(b"\n"):
        lines += 1
    try:
        read = pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
        parse = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        table = pa.json.read_json(pa.BufferReader(block), read, parse)
        table.validate(full=True)
    except pa.ArrowInvalid:
        return None
    # a blank line, or two objects in one, would shift the lines of the rows behind it
    if len(table) != lines:
        return None
    return table.combine_chunks().to_batches()[0]


def _object(pairs: list[tuple[str, object]], columns: Columns) -> dict[str, object]:
    """A JSON object; raises ValueError where it has a wanted key twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        for name in columns:
            if names.count(name) > 1:
                raise ValueError(f"duplicate key `{name}`")
    return value


def _irregular_block(
    block: bytes, line: int, file: SourceFile, columns: Columns, findings: Findings
) -> RawBatch:
    """The block by Python's parser, line by line; lines that hold no object are noted."""
    values: dict[str, list[object]] = {name: [] for name in columns}
    lines = []
    for number, text in enumerate(block.split(b"\n"), line):
        if not text.strip():
            continue
        try:
            row = json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, columns))
            if not isinstance(row, dict):
                raise ValueError("no object")
        except UnicodeDecodeError:
            findings.add("undecodable", f"{file.name}:{number}", repr(text))
            continue
        except (ValueError, RecursionError) as error:
            fault = f"{error}: {text.decode(errors='replace')}"
            findings.add("malformed", f"{file.name}:{number}", fault)
            continue
        lines.append(number)
        for name, column in values.items():
            column.append(row.get(name))
    return RawBatch(values, np.asarray(lines, np.int64), file.name, file.split, fetch=file.fetch)
