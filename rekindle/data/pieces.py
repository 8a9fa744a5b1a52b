"""A source in pieces, each of which one worker reads alone: files, or a part of a large one.

Of CSV and JSON lines a part are lines, of Parquet row groups; a compressed file is one piece, and
so is a CSV file in which a row may span lines. Which pieces there are follows from names, sizes and
bytes alone. A piece holds files of one partition only, so that a window that moves on finds the
pieces of the months that stay.

Two rounds: blocks of files are measured (hash, newlines, quotes), which cuts the files and gives
each piece a key by what it will read; then pieces are read, if their files are still as listed."""

import dataclasses
import datetime as dt
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import fsspec
import numpy as np
import pyarrow.parquet

from rekindle.data import files
from rekindle.data.columns import Source
from rekindle.data.executor import Executor, Order
from rekindle.data.files import ContentHash, Files, SourceFile, combined
from rekindle.data.hub import HubSource
from rekindle.data.source import FileSource, open_source
from rekindle.data.window import parse_window
from rekindle.errors import DataError
from rekindle.spec.heartbeat import beat
from rekindle.spec.identity import digest
from rekindle.spec.model import DataSpec

_READ_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Block:
    """What was measured of a block of a file. `newlines` and `quotes` only of files of lines that
    have several: whether quotes are even before the first newline, on a line, behind the last."""

    sha256: str
    newlines: int = 0
    quotes: tuple[bool, bool, bool] = (True, True, True)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Files, a part of one, or of a data set of the hub: what `source_of` takes, and what its rows
    depend on."""

    facts: Mapping[str, Any]
    content: Sequence[Any]

    @classmethod
    def of(cls, files: Sequence[SourceFile], hashes: Sequence[str]) -> Self:
        facts, read = [], []
        for f in files:
            partition = f.partition.isoformat() if f.partition else ""
            part = [f.start, f.end, f.line]
            facts.append([f.path, f.name, f.size, partition, f.split, *part, f.version])
            read.append([f.name, f.split, *part, str(f.partition)])
        return cls({"files": facts}, [read, list(hashes)])

    def item(self, settings: Any = None) -> dict[str, Any]:
        """As JSON, for a worker; `key` identifies what reading it with these settings gives."""
        return {"key": digest([settings, *self.content]), **self.facts}


def source_of(order: Order, item: Mapping[str, Any], data: DataSpec, modality: str) -> Source:
    """The source that reads only the piece `item`; all of one that has none."""
    if "hub" in item:
        return HubSource(data, modality, item["hub"])
    if "files" not in item:
        return open_source(data, modality, parse_window(order["window"]))
    filesystem, named = fsspec.url_to_fs(data.source)[0], hashlib.sha256()
    found = tuple(
        SourceFile(
            filesystem,
            order["root"],
            path,
            name,
            size,
            dt.datetime.fromisoformat(partition) if partition else None,
            split,
            data.delimiter,
            data.encoding,
            named,
            *part,
        )
        for path, name, size, partition, split, *part in item["files"]
    )
    return FileSource(data, modality, files=Files(found, order["format"]))


def cut(
    source: Source, data: DataSpec, executor: Executor
) -> tuple[list[Piece], dict[str, str], dict[str, Any]]:
    """The pieces of a source, none if it has none; the hash of each of its files by path, and the
    order for workers that read a piece by `source_of`."""
    if isinstance(source, HubSource):
        return [Piece({"hub": part}, [part]) for part in source.parts()], {}, {}
    if not isinstance(source, FileSource):
        return [], {}, {}
    blocks, located = measured(source, data.source, executor), source.files
    order = {"root": located.files[0].root, "format": located.format}
    return pieces(source, blocks), contents(blocks), order


def check_versions(source: Source) -> None:
    """Raise DataError where a file is not the one that was listed, and then measured."""
    for file in source.files.files if isinstance(source, FileSource) else ():
        if not file.is_as_listed():
            raise _written_to(file.path)


def _written_to(path: str) -> DataError:
    return DataError(
        "the file was written to while it was read",
        where=path,
        fix="write files aside and rename them when they are complete; then run again",
    )


def measured(source: FileSource, uri: str, executor: Executor) -> dict[str, list[Block]]:
    """The blocks of every file, by path."""
    cuts = list[list[Any]]()
    for file in source.files.files:
        for start in range(0, max(file.size, 1), files.PIECE_BYTES):
            end = min(start + files.PIECE_BYTES, file.size)
            cuts.append([file.path, start, end, file.size, _lines_of(file, source)])
    items = [*files.grouped(cuts, (lambda cut: cut[2] - cut[1], files.PIECE_BYTES))]
    work = digest(["measure", uri, [[f.path, f.version] for f in source.files.files]])
    found = executor.map(f"{__name__}:measure", {"source": uri}, items, work)
    blocks: dict[str, list[Block]] = {}
    for (path, *_), (sha256, newlines, quotes) in zip(cuts, itertools.chain(*found), strict=True):
        blocks.setdefault(path, []).append(Block(sha256, newlines, tuple(quotes)))
    return blocks


def _lines_of(file: SourceFile, source: FileSource) -> str:
    """The format of a file that is cut between lines, or ""."""
    cut = file.size > files.PIECE_BYTES and not file.compression and file.encoding == "utf-8"
    return source.files.format if cut and source.files.format in ("csv", "jsonl") else ""


def measure(order: Order, item: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The fields of the Block of each (path, start, end, size, format of lines to count)."""
    filesystem = fsspec.url_to_fs(order["source"])[0]
    return [list(dataclasses.astuple(_measured(filesystem, *block))) for block in item]


def _measured(filesystem: Any, path: str, start: int, end: int, size: int, lines_of: str) -> Block:
    running, newlines, lines = ContentHash(), 0, _Quotes()
    with filesystem.open(path, "rb") as stream:
        stream.seek(start)
        while start < end and (text := stream.read(min(_READ_BYTES, end - start))):
            start += len(text)
            running.update(text)
            beat()
            newlines += text.count(b"\n") if lines_of else 0
            if lines_of == "csv":
                lines.update(text)
        if start < end or (end == size and stream.read(1)):
            raise _written_to(path)
    return Block(running.hexdigest(), newlines, lines.found())


class _Quotes:
    """Whether each line of a text has an even number of quotes, and ends as lines do."""

    def __init__(self) -> None:
        self._first: bool | None = None
        self._inner, self._open, self._return = True, False, False

    def update(self, text: bytes) -> None:
        letters = np.frombuffer(text, np.uint8)
        # a carriage return alone ends a row, too, and no line
        alone = text.count(b"\r") - text.count(b"\r\n") - text.endswith(b"\r")
        self._inner &= not alone and (not self._return or text.startswith(b"\n"))
        self._return = text.endswith(b"\r")
        odd = np.bitwise_xor.accumulate(letters == ord('"'))
        ends = odd[letters == ord("\n")]
        if not len(ends):
            self._open ^= bool(odd[-1])
            return
        even = not self._open ^ bool(ends[0])
        if self._first is None:
            self._first, even = even, True
        self._inner &= even and not (ends[1:] ^ ends[:-1]).any()
        self._open = bool(odd[-1] ^ ends[-1])

    def found(self) -> tuple[bool, bool, bool]:
        """Before the first newline, on each line between, behind the last."""
        inner = self._inner and not self._return
        return (not self._open if self._first is None else self._first), inner, not self._open


def contents(blocks: Mapping[str, Sequence[Block]]) -> dict[str, str]:
    """The hash of each file, by path."""
    return {path: combined([b.sha256 for b in of]) for path, of in blocks.items()}


def pieces(source: FileSource, blocks: Mapping[str, Sequence[Block]]) -> list[Piece]:
    """The pieces of a source whose files were measured, in the order of its rows."""
    groups, hashes, size = list[list[tuple[SourceFile, str]]](), contents(blocks), 0
    for file in source.files.files:
        parts = [*_parts(file, source, blocks[file.path], hashes[file.path])]
        if len(parts) > 1:
            groups += [[part] for part in parts]
            size = files.PIECE_BYTES  # nothing joins the last one
            continue
        size += file.size
        if not groups or size > files.PIECE_BYTES or groups[-1][0][0].partition != file.partition:
            groups.append([])
            size = file.size
        groups[-1].append((file, hashes[file.path]))
    return [Piece.of(*zip(*group, strict=True)) for group in groups]


def _parts(
    file: SourceFile, source: FileSource, blocks: Sequence[Block], content: str
) -> Iterator[tuple[SourceFile, str]]:
    """Parts of a file of several blocks, and what the rows of each depend on; none if not cut."""
    kind, size = _lines_of(file, source), files.PIECE_BYTES
    if source.files.format == "parquet" and len(blocks) > 1 and not file.compression:
        yield from _row_groups(file, content)
    elif kind == "jsonl" or (kind == "csv" and _one_line_a_row(blocks)):
        line = 1
        for number, block in enumerate(blocks):
            start, end = number * size, min((number + 1) * size, file.size)
            # the last line may end in the next block; a CSV file's first has the names of columns
            read = [b.sha256 for b in (*blocks[number : number + 2], blocks[0])]
            begin = line
            if start and file.filesystem.cat_file(file.path, start=start - 1, end=start) != b"\n":
                begin += 1  # the block begins within a line, which is the one before's
            yield dataclasses.replace(file, start=start, end=end, line=begin), digest(read)
            line += block.newlines


def _one_line_a_row(blocks: Sequence[Block]) -> bool:
    """Whether no line of a CSV file has an odd number of quotes: then none begins inside of one."""
    is_open = False
    for block in blocks:
        first, inner, last = block.quotes
        if not inner or (block.newlines and is_open == first):
            return False
        is_open = not last if block.newlines else is_open ^ (not last)
    return not is_open


def _row_groups(file: SourceFile, content: str) -> Iterator[tuple[SourceFile, str]]:
    """Runs of row groups that take at most a piece of the file, or one that takes more."""
    with file.filesystem.open(file.path, "rb") as stream:
        try:
            about = pyarrow.parquet.ParquetFile(stream).metadata
        except (pyarrow.ArrowInvalid, OSError):
            return  # its reader says what is wrong
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
    share = file.size / max(sum(group.total_byte_size for group in groups), 1)
    start, line = 0, 1
    about_bytes = (lambda group: group.total_byte_size * share, files.PIECE_BYTES)
    for run in files.grouped(groups, about_bytes):
        end = start + len(run)
        yield dataclasses.replace(file, start=start, end=end, line=line), content
        start, line = end, line + sum(group.num_rows for group in run)
