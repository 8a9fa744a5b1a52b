"""How a source is cut into pieces, each of which one worker reads: several files, or a
part of a large one.

A part of a CSV or JSON lines file is a range of lines, a part of a Parquet file some of
its row groups. A compressed file is never cut, nor is a CSV file in which a row may span
lines. Names, sizes and bytes alone decide which pieces there are. A piece holds files of
one partition only, so that a window that moves on finds the pieces of the months that
stay.

There are two rounds. First blocks of files are measured (hash, newlines, quotes): from
that follow the cuts, and for each piece a key by what it will read. Then the pieces are
read, if their files are still as listed.

A file that changes while it is read ends the step at the first other version, with its
name; pieces that were read stay, and the next run begins with the file as it is then.
Reading it again within the step is rejected: `fingerprint` has hashed what is gone, so
rows would be trained on that the run key does not describe, and two runs of one key would
differ. The cost is that such a run has to be started again, by the next turn of `rekindle
watch` or a schedule where there is one."""

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
from rekindle.data.executor import Executor, Order
from rekindle.data.files import ContentHash, Files, SourceFile, combined
from rekindle.data.hub import HubSource
from rekindle.data.source import FileSource, open_source
from rekindle.data.window import parse_window
from rekindle.errors import DataError
from rekindle.rows.columns import Source
from rekindle.spec.heartbeat import beat
from rekindle.spec.identity import digest
from rekindle.spec.model import DataSpec

_READ_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Block:
    """What was measured of a block of a file."""

    sha256: str
    newlines: int = 0
    """How many there are; counted only in a file of lines that is cut between them."""
    quotes: tuple[bool, bool, bool] = (True, True, True)
    """Whether the number of quotes is even before the first newline, on each line between
    newlines, and after the last newline; counted only in such a file, if it is CSV."""


@dataclasses.dataclass(frozen=True)
class SourcePiece:
    """A piece: files, a part of a file, or a part of a data set of the hub."""

    facts: Mapping[str, Any]
    """What `source_of` needs to read it."""
    content: Sequence[object]
    """What its rows depend on."""

    @classmethod
    def of(cls, files: Sequence[SourceFile], hashes: Sequence[str]) -> Self:
        facts = list[list[object]]()
        identities = list[list[object]]()
        for file in files:
            partition = file.partition.isoformat() if file.partition else ""
            part = [file.start, file.end, file.line]
            # in the order of SourceFile's fields, which `source_of` fills
            facts.append(
                [file.path, file.name, file.size, partition, file.split, *part, file.version]
            )
            # without path and version: the same rows,
            # wherever they lie and when they were written
            identities.append([file.name, file.split, *part, str(file.partition)])
        return cls({"files": facts}, [identities, list(hashes)])

    def item(self, settings: Any = None) -> dict[str, object]:
        """The piece as JSON for a worker. Its `key` is a hash of what its rows depend on,
        and of the settings that they are read with."""
        return {"key": digest([settings, *self.content]), **self.facts}


def source_of(order: Order, item: Mapping[str, Any], data: DataSpec, modality: str) -> Source:
    """The source that reads only the piece `item`; the whole source if it is not cut."""
    if "hub" in item:
        return HubSource(data, modality, item["hub"])
    if "files" not in item:
        return open_source(data, modality, parse_window(order["window"]))
    filesystem, _ = fsspec.url_to_fs(data.source)
    named = hashlib.sha256()  # of the files that rows of all these files name
    source_files = list[SourceFile]()
    for path, name, size, partition, split, *part in item["files"]:
        source_files.append(
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
        )
    return FileSource(data, modality, files=Files(tuple(source_files), order["format"]))


def cut(
    source: Source, data: DataSpec, executor: Executor
) -> tuple[list[SourcePiece], dict[str, str], dict[str, Any]]:
    """The pieces of a source, the hash of each of its files by path, and what the order
    for workers has to hold for `source_of`. All are empty for a source that cannot be
    cut."""
    if isinstance(source, HubSource):
        return [SourcePiece({"hub": part}, [part]) for part in source.parts()], {}, {}
    if not isinstance(source, FileSource):
        return [], {}, {}
    blocks = measure_files(source, data.source, executor)
    order = {"root": source.files.files[0].root, "format": source.files.format}
    return pieces(source, blocks), contents(blocks), order


def check_versions(source: Source) -> None:
    """Raise DataError where a file is not the one that was listed, and then measured."""
    if not isinstance(source, FileSource):
        return
    for file in source.files.files:
        if not file.is_as_listed():
            raise _written_to(file.path)


def _written_to(path: str) -> DataError:
    return DataError(
        "the file was written to while it was read",
        where=path,
        fix="write files aside and rename them when they are complete; then run again",
    )


def measure_files(source: FileSource, uri: str, executor: Executor) -> dict[str, list[Block]]:
    """The blocks of every file, by path, as workers measure them."""
    cuts = list[list[Any]]()
    for file in source.files.files:
        for start in range(0, max(file.size, 1), files.PIECE_BYTES):
            end = min(start + files.PIECE_BYTES, file.size)
            cuts.append([file.path, start, end, file.size, _lines_of(file, source)])
    items = [*files.grouped(cuts, (lambda cut: cut[2] - cut[1], files.PIECE_BYTES))]
    work = digest(["measure", uri, [[file.path, file.version] for file in source.files.files]])
    answers = executor.map(f"{__name__}:measure", {"source": uri}, items, work)
    blocks: dict[str, list[Block]] = {}
    fields = itertools.chain(*answers)
    for (path, *_), (sha256, newlines, quotes) in zip(cuts, fields, strict=True):
        blocks.setdefault(path, []).append(Block(sha256, newlines, tuple(quotes)))
    return blocks


def _lines_of(file: SourceFile, source: FileSource) -> str:
    """The format of a file that is cut between lines, or ""."""
    if file.size <= files.PIECE_BYTES or file.compression or file.encoding != "utf-8":
        return ""
    return source.files.format if source.files.format in ("csv", "jsonl") else ""


def measure(order: Order, item: Sequence[Sequence[Any]]) -> list[list[object]]:
    """The Block's fields of each (path, start, end, size, format of lines to count)."""
    filesystem, _ = fsspec.url_to_fs(order["source"])
    return [list(dataclasses.astuple(_measure_block(filesystem, *block))) for block in item]


def _measure_block(
    filesystem: Any, path: str, start: int, end: int, size: int, lines_of: str
) -> Block:
    content = ContentHash()
    newlines = 0
    quotes = _Quotes()
    with filesystem.open(path, "rb") as stream:
        stream.seek(start)
        while start < end and (text := stream.read(min(_READ_BYTES, end - start))):
            start += len(text)
            content.update(text)
            beat()
            if lines_of:
                newlines += text.count(b"\n")
            if lines_of == "csv":
                quotes.update(text)
        # cut short, or longer than it was listed
        if start < end or (end == size and stream.read(1)):
            raise _written_to(path)
    return Block(content.hexdigest(), newlines, quotes.evenness())


class _Quotes:
    """Whether each line of a text has an even number of quotes, and ends as lines do."""

    def __init__(self) -> None:
        self._first: bool | None = None  # before the first newline; None: there was none yet
        self._inner = True
        self._open = False  # whether the line so far has an odd number
        self._return = False  # whether the text so far ends with a carriage return

    def update(self, text: bytes) -> None:
        letters = np.frombuffer(text, np.uint8)
        ends_with_return = text.endswith(b"\r")
        # a carriage return alone ends a row, too, and no line
        lone_returns = text.count(b"\r") - text.count(b"\r\n")
        if ends_with_return:  # which the next text decides on
            lone_returns -= 1
        if lone_returns or (self._return and not text.startswith(b"\n")):
            self._inner = False
        self._return = ends_with_return
        # whether an odd number of quotes stands in
        # the text up to each letter, and each newline
        odd = np.bitwise_xor.accumulate(letters == ord('"'))
        odd_at_newlines = odd[letters == ord("\n")]
        if not len(odd_at_newlines):
            self._open ^= bool(odd[-1])
            return
        is_first_even = not self._open ^ bool(odd_at_newlines[0])
        if self._first is None:
            self._first = is_first_even
        elif not is_first_even:
            self._inner = False
        # a line has an odd number where that changes from one newline to the next
        if (odd_at_newlines[1:] ^ odd_at_newlines[:-1]).any():
            self._inner = False
        self._open = bool(odd[-1] ^ odd_at_newlines[-1])

    def evenness(self) -> tuple[bool, bool, bool]:
        """Before the first newline, on each line between, behind the last."""
        last = not self._open
        first = last if self._first is None else self._first
        return first, self._inner and not self._return, last


def contents(blocks: Mapping[str, Sequence[Block]]) -> dict[str, str]:
    """The hash of each file, by path."""
    hashes = dict[str, str]()
    for path, file_blocks in blocks.items():
        hashes[path] = combined([block.sha256 for block in file_blocks])
    return hashes


def pieces(source: FileSource, blocks: Mapping[str, Sequence[Block]]) -> list[SourcePiece]:
    """The pieces of a source whose files were measured, in the order of its rows."""
    hashes = contents(blocks)
    groups = list[list[tuple[SourceFile, str]]]()
    group_bytes = 0  # of the last group
    partition: dt.datetime | None = None  # of the last group
    for file in source.files.files:
        parts = [*_parts(file, source, blocks[file.path], hashes[file.path])]
        if len(parts) > 1:
            groups += [[part] for part in parts]
            partition = file.partition
            group_bytes = files.PIECE_BYTES  # nothing joins the last one
            continue
        group_bytes += file.size
        if not groups or group_bytes > files.PIECE_BYTES or partition != file.partition:
            groups.append([])
            partition = file.partition
            group_bytes = file.size
        groups[-1].append((file, hashes[file.path]))
    return [SourcePiece.of(*zip(*group, strict=True)) for group in groups]


def _parts(
    file: SourceFile, source: FileSource, blocks: Sequence[Block], content: str
) -> Iterator[tuple[SourceFile, str]]:
    """Parts of a file, and a hash of what the rows of each depend on;
    none if it is not cut."""
    lines_of = _lines_of(file, source)
    if source.files.format == "parquet" and len(blocks) > 1 and not file.compression:
        yield from _row_groups(file, content)
    elif lines_of == "jsonl" or (lines_of == "csv" and _one_line_a_row(blocks)):
        line = 1
        for number, block in enumerate(blocks):
            start = number * files.PIECE_BYTES
            end = min(start + files.PIECE_BYTES, file.size)
            # the last line may end in the next block; a
            # CSV file's first has the names of columns
            blocks_read = (*blocks[number : number + 2], blocks[0])
            first_line = line
            if start and file.filesystem.cat_file(file.path, start=start - 1, end=start) != b"\n":
                first_line += 1  # the block begins within a line, which is the one before's
            part = dataclasses.replace(file, start=start, end=end, line=first_line)
            yield part, digest([block_read.sha256 for block_read in blocks_read])
            line += block.newlines


def _one_line_a_row(blocks: Sequence[Block]) -> bool:
    """Whether no line of a CSV file has an odd number of quotes,
    and so none begins in one."""
    is_open = False
    for block in blocks:
        first, inner, last = block.quotes
        if not inner:
            return False
        if not block.newlines:  # the line goes on
            is_open ^= not last
            continue
        # the line that ends here is closed where it was open and odd, or closed and even
        if is_open == first:
            return False
        is_open = not last
    return not is_open


def _row_groups(file: SourceFile, content: str) -> Iterator[tuple[SourceFile, str]]:
    """Runs of row groups that are at most a piece of the file; one alone may be more."""
    with file.filesystem.open(file.path, "rb") as stream:
        try:
            metadata = pyarrow.parquet.ParquetFile(stream).metadata
        except (pyarrow.ArrowInvalid, OSError):
            return  # its reader says what is wrong
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    # sizes are those before compression
    share = file.size / max(sum(group.total_byte_size for group in groups), 1)
    start = 0
    line = 1
    most_bytes = (lambda group: group.total_byte_size * share, files.PIECE_BYTES)
    for run in files.grouped(groups, most_bytes):
        end = start + len(run)
        yield dataclasses.replace(file, start=start, end=end, line=line), content
        start = end
        line += sum(group.num_rows for group in run)
