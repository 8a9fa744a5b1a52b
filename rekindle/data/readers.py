"""Files as raw batches: CSV and Parquet by pyarrow, and JSON lines where it can read them.

A file is read in blocks of `BLOCK_BYTES`, of the wanted columns only. A block of JSON
lines that is not regular (one object a line, each column of one type) is parsed by
Python, which gives the same values and knows which line is at fault. What cannot be
parsed is noted and skipped. csv_lines.py counts the lines of CSV, parquet_batches.py
bounds the memory of Parquet.

DuckDB's reader was tried on 2026-11-30 (2.0.1, `store_rejects`): it counts rows where a
quoted value has line ends, gives no line for good rows, and ends in an error for files that
are read here, with mixed line ends or blank lines before the header."""

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from rekindle.data.csv_lines import RowLines
from rekindle.data.encodings import encoding_of
from rekindle.data.files import MOST_ROW_BYTES, SourceFile, delimiter_of
from rekindle.data.parquet_batches import TooLargeError, parquet_batches
from rekindle.rows import Columns
from rekindle.rows.columns import RawBatch
from rekindle.rows.findings import Findings

BLOCK_BYTES = 4 << 20
_HEADER_BYTES = 1 << 20
_PROBED_LINES = 100
_DELIMITERS = ",;\t|"

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
        lines = RowLines(stream, delimiter, file.line - header.count(b"\n"))

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
    begin = len(head) - len(head.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n"))
    return head[: head.find(b"\n", begin) + 1]


def _csv_batches(
    lines: RowLines,
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
            for batch in parquet_batches(parquet, stream, list(columns), groups):
                yield _raw(batch, np.arange(row, row + len(batch)), file)
                row += len(batch)
        except TooLargeError as error:
            place = file.name if error.row is None else f"{file.name}:{error.row + file.line}"
            findings.add("malformed", place, str(error), cut=True)
        except (pa.ArrowInvalid, OSError) as error:
            findings.add("malformed", file.name, f"no Parquet file: {error}", cut=True)


def read_jsonl(file: SourceFile, columns: Columns, findings: Findings) -> Iterator[RawBatch]:
    """The rows of JSON objects, one a line; blank lines are skipped, absent keys null."""
    schema: pa.Schema | None = None
    line = file.line
    with file.open() as stream:
        for number, block in enumerate(_line_blocks(stream)):
            if len(block) > MOST_ROW_BYTES:
                fault = f"a line of over {MOST_ROW_BYTES >> 20} MiB"
                findings.add("malformed", f"{file.name}:{line}", fault, cut=True)
                return
            if number == 0:
                if _is_utf16(file, block, findings):
                    return
                block = block.removeprefix(codecs.BOM_UTF8)
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
        if unfinished_bytes > MOST_ROW_BYTES:
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
