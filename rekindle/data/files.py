"""Where the files of a source are: globs, folders, formats, partitions, splits that names tell.

Any fsspec URI will do. A name is the path below the fixed part of the pattern (`data/*/x.csv` ->
`2026-03/x.csv`): the same wherever the folder lies. Hidden files (`.x`, `_x`) are left out."""

import concurrent.futures
import contextlib
import dataclasses
import datetime as dt
import hashlib
import io
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self, TypeVar

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from rekindle.data import reference
from rekindle.data.encodings import as_utf8, encodable
from rekindle.data.window import Partitions, Window
from rekindle.errors import DataError, RequestError
from rekindle.spec.identity import digest
from rekindle.spec.model import DataSpec
from rekindle.tables import rows

log = logging.getLogger(__name__)
T = TypeVar("T")

_TABLES = rows(Path(__file__).with_suffix(".yaml"))
_COMPRESSED: dict[str, str] = _TABLES["compressed"]
_FORMATS: dict[str, list[str]] = _TABLES["formats"]
_SPLIT_WORDS: dict[str, str] = _TABLES["splits"]
# what people leave beside data
_NOTE = re.compile(r"(?i)(^|/)((README|LICENSE)(\.(txt|md|rst))?|Thumbs\.db|desktop\.ini)$")
_READ_BYTES, _AT_ONCE = 1 << 20, 8
if "zstd" not in fsspec.available_compressions():  # where a package that fsspec knows is missing
    fsspec.compression.register_compression(
        "zstd", lambda file, **_: io.BufferedReader(pa.CompressedInputStream(file, "zstd")), "zst"
    )
PIECE_BYTES = 256 << 20
"""Most bytes of a source that one worker reads at a time."""
_STRONG = ("ETag", "etag", "generation", "version_id")
_WEAK = ("mtime", "created", "ino", "LastModified", "last_modified")


class ContentHash:
    """SHA-256 of a file's bytes; where these are more than `PIECE_BYTES`, a hash of the SHA-256 of
    each block of so many, which several workers find at once."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._block, self._size = hashlib.sha256(), 0

    def update(self, data: bytes) -> None:
        while len(data) > (room := PIECE_BYTES - self._size):
            self._block.update(data[:room])
            self._blocks.append(self._block.hexdigest())
            self._block, self._size, data = hashlib.sha256(), 0, data[room:]
        self._block.update(data)
        self._size += len(data)

    def hexdigest(self) -> str:
        return combined([*self._blocks, self._block.hexdigest()])


def combined(hashes: Sequence[str]) -> str:
    """The hash of blocks of a file, or of sources, that are read together."""
    return hashes[0] if len(hashes) == 1 else digest(list(hashes))


def grouped(items: Iterable[T], *limits: tuple[Callable[[T], float], float]) -> Iterator[list[T]]:
    """Items in runs, as long as the sum of no measure exceeds its limit; an item alone may."""
    group, sums = list[T](), [0.0] * len(limits)
    for item in items:
        sizes = [measure(item) for measure, _ in limits]
        sums = [held + size for held, size in zip(sums, sizes, strict=True)]
        if group and any(held > most for held, (_, most) in zip(sums, limits, strict=True)):
            yield group
            group, sums = [], sizes
        group.append(item)
    if group:
        yield group


def _version(info: Mapping[str, Any]) -> str:
    """What a listing says of a file and what changes when it is written: its size, and its
    ETag or generation, else its time."""
    marks = [f"{info[name]}" for name in _STRONG if info.get(name)]
    if not marks:  # some stores list a number, and answer for one file with a date
        times = (info[name] for name in _WEAK if info.get(name))
        marks = [f"{t.timestamp() if isinstance(t, dt.datetime) else t}" for t in times]
    return "|".join([f"{info.get('size')}", *marks])


class _LineRange(io.RawIOBase):
    """`head`, then the lines of a stream that begin in its bytes from `start` to `end`."""

    def __init__(self, stream: BinaryIO, start: int, end: int, head: bytes) -> None:
        self._stream, self._end, self._ready = stream, end, head
        self._at, self._over = max(start - 1, 0), False
        self._skips = start > 0  # up to the end of the line before
        stream.seek(self._at)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._over:
            self._ready = self._next(len(buffer))
        piece, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def _next(self, size: int) -> bytes:
        """What of the next bytes of the stream belongs to lines that begin in the range."""
        piece, begin = self._stream.read(size), self._at
        self._at += len(piece)
        if not piece:  # also of a file that became shorter
            self._over = True
        elif self._skips:
            cut = piece.find(b"\n") + 1
            self._skips, piece, begin = not cut, piece[cut:] if cut else b"", begin + cut
            self._over = (self._at if self._skips else begin) >= self._end
        if self._over or begin + len(piece) < self._end:
            return b"" if self._over else piece
        last = piece.find(b"\n", max(self._end - 1 - begin, 0)) + 1
        self._over = bool(last)
        return piece[:last] if last else piece


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One file: `path` within `filesystem`, `name` for people, its path below the source's `root`,
    `partition` where the URI has one, `split` where told; `named` hashes files that its rows name;
    `delimiter` and `encoding` as in the config; `version` as listed. Of a part of one, `start` and
    `end` are bytes (of Parquet row groups), and `line` its first."""

    filesystem: Any = dataclasses.field(repr=False, compare=False)
    root: str
    path: str
    name: str
    size: int
    partition: dt.datetime | None = None
    split: str = ""
    delimiter: str = "auto"
    encoding: str = "utf-8"
    named: Any = dataclasses.field(default_factory=hashlib.sha256, repr=False, compare=False)
    start: int = 0
    end: int | None = None
    line: int = 1
    version: str = ""

    @contextlib.contextmanager
    def open(self, head: bytes = b"") -> Iterator[BinaryIO]:
        """The content from front to back, decompressed, texts as UTF-8; of a part the lines that
        begin in it, behind `head`."""
        with self.filesystem.open(self.path, "rb") as stored:
            if self.end is not None:
                lines = _LineRange(stored, self.start, self.end, head)
                yield io.BufferedReader(lines, _READ_BYTES)
                return
            # as fsspec's own `open` does
            plain = fsspec.compression.compr[self.compression](stored, mode="rb")
            yield as_utf8(plain, self.encoding)

    @contextlib.contextmanager
    def open_anywhere(self) -> Iterator[BinaryIO]:
        """To read here and there: the file, or a copy of a whole one that lies elsewhere."""
        with contextlib.ExitStack() as opened:
            stream = opened.enter_context(self.filesystem.open(self.path, "rb"))
            if self.end is None and not isinstance(self.filesystem, LocalFileSystem):
                copy = opened.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(stream, copy, _READ_BYTES)
                copy.seek(0)
                stream = copy
            yield fsspec.compression.compr[self.compression](stream, mode="rb")

    def head(self, size: int) -> bytes:
        """The first bytes, decompressed, texts as UTF-8."""
        asked = {"compression": self.compression, "block_size": size}  # stores bring 50 MB, else
        with self.filesystem.open(self.path, "rb", **asked) as stream:
            return bytes(as_utf8(stream, self.encoding).read(size))

    def is_as_listed(self) -> bool:
        """Whether the file was not written since."""
        self.filesystem.invalidate_cache()
        return _version(self.filesystem.info(self.path)) == self.version

    @property
    def compression(self) -> str | None:
        return _COMPRESSED.get(PurePosixPath(self.name).suffix.lower())

    def fetch(self, path: str) -> bytes:
        """The bytes of a file that a row of this one names; ValueError where it must not."""
        named = reference.path_of(self.filesystem, self.root, _parent(self.path), path)
        content = reference.read(self.filesystem, named)
        self.named.update(f"{path}\0{hashlib.sha256(content).hexdigest()}\n".encode())
        return content

    def sha256(self) -> str:
        """Hash of the bytes as they are stored."""
        running = ContentHash()
        with self.filesystem.open(self.path, "rb") as stream:
            while piece := stream.read(_READ_BYTES):
                running.update(piece)
        return running.hexdigest()


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a source, by name, all of one format; `unit` is the length of a partition."""

    files: tuple[SourceFile, ...]
    format: str
    unit: str = ""

    @property
    def newest(self) -> dt.datetime | None:
        return max((file.partition for file in self.files if file.partition), default=None)

    def within(self, window: Window) -> Self:
        """The files whose partition starts in the window; raises DataError if none does."""
        chosen = tuple(file for file in self.files if file.partition and file.partition in window)
        if not chosen:
            starts = sorted(file.partition for file in self.files if file.partition)
            span = f"{starts[0].isoformat()} to {starts[-1].isoformat()}"
            raise DataError(
                f"the window {window} holds none of the partitions, which start {span}",
                where="data.window",
                fix="move data.window.end, or lower data.window.offset",
            )
        return dataclasses.replace(self, files=chosen)

    def fingerprint(self, *, named: bool, known: Mapping[str, str] | None = None) -> str:
        """Hash of bytes in order of name, and of `named` names: of contents whose hash is `known`
        by path, and of the others as they are now."""
        running, known = hashlib.sha256(), known or {}
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            unknown = [file for file in self.files if file.path not in known]
            found = dict(zip(unknown, pool.map(SourceFile.sha256, unknown), strict=True))
        for file in self.files:
            partition = file.partition.isoformat() if file.partition else ""
            content = known.get(file.path) or found[file]
            running.update(f"{file.name if named else ''}\0{partition}\0{content}\n".encode())
        return running.hexdigest()[:32]


def locate(data: DataSpec) -> Files:
    """The files that `data.source` names; raises DataError for none, RequestError for a bad URI."""
    try:
        filesystem, path = fsspec.core.url_to_fs(data.source)
    except (ValueError, ImportError) as error:
        raise RequestError(
            f"cannot open {data.source}: {error}",
            where="data.source",
            fix="use a path or an fsspec URI, and install the driver of its protocol",
        ) from None
    partitions = Partitions.of(path, data.window) if data.window and "{window" in path else None
    try:
        found, root = _list(filesystem, partitions.glob if partitions else path)
    except Exception as error:  # fsspec lets the errors of its stores' clients through
        raise DataError(
            f"cannot list {data.source}: {error}",
            where="data.source",
            fix="check the path, the credentials and the network",
        ) from error
    files = [f for f in _source_files(filesystem, found, root) if not _NOTE.search(f.name)]
    if partitions:
        times = ((file, partitions.time_of(file.path)) for file in files)
        files = [dataclasses.replace(file, partition=time) for file, time in times if time]
    if not files:
        names_no = "names no partition that exists" if partitions else "names no file"
        raise DataError(
            f"{data.source} {names_no}",
            where="data.source",
            fix="check the path; * stands for any name",
        )
    delimiter, encoding = data.delimiter, data.encoding
    files = [dataclasses.replace(f, delimiter=delimiter, encoding=encoding) for f in files]
    if data.split.by == "source":
        files = [dataclasses.replace(file, split=split_of(file.name)) for file in files]
    kind = _format_of(files, data)
    if kind == "images" and data.format == "auto":
        if odd := [file.name for file in files if _suffix_format(file.name) != kind]:
            log.warning("%d files beside the images are ignored, such as %s", len(odd), odd[0])
        files = [file for file in files if _suffix_format(file.name) == kind]
    names = (file.name for file in files)
    if bad := next((name for name in names if not encodable(name)), ""):
        raise DataError(
            "the name of a file is not UTF-8",
            where=ascii(bad).strip("'"),
            fix="rename it, such as with convmv",
        )
    return Files(tuple(files), kind, partitions.unit if partitions else "")


def delimiter_of(name: str, head: bytes) -> str:
    """What is between the columns of a CSV or TSV file with this beginning: `;` or a tab where its
    first line has some and no comma, as spreadsheets of many countries write it."""
    if ".tsv" in name.lower():
        return "\t"
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n").partition(b"\n")[0]
    others = (mark for mark in (";", "\t") if mark.encode() in first)
    return "," if b"," in first else next(others, ",")


def content_hash(uri: str) -> str:
    """Hash of the files below a path or URI, names and bytes; raises DataError for none."""
    filesystem, path = fsspec.core.url_to_fs(uri)
    found, root = _list(filesystem, path)
    files = _source_files(filesystem, found, root)
    if not files:
        raise DataError(f"no such file or folder: {uri}", fix="check the path")
    return Files(tuple(files), "").fingerprint(named=True)


def split_of(name: str) -> str:
    """The split that a name tells, such as `train/cat/1.png`, `sst2-test.csv`; or empty."""
    for part in name.split("/"):
        words = [word for word in re.split(r"[^a-z]+", part.lower()) if word in _SPLIT_WORDS]
        if words:
            return _SPLIT_WORDS[words[0]]
    return ""


def _list(filesystem: Any, path: str) -> tuple[list[dict[str, Any]], str]:
    """The files that a path, folder or pattern stands for, and where their names start."""
    if filesystem.isfile(path):
        return [filesystem.info(path)], _parent(path)
    if filesystem.isdir(path):
        details = filesystem.find(path, detail=True).values()
        found = [info for info in details if is_visible(_below(info["name"], path))]
        for info in found if isinstance(filesystem, LocalFileSystem) else ():
            place = Path(info["name"])
            if not place.is_file():  # a pipe would be waited for, a link may lead nowhere
                raise DataError("this is not a file", where=str(place), fix="move it elsewhere")
        return found, path
    fixed = re.split(r"[*?\[]", path, maxsplit=1)[0]
    if fixed == path:
        return [], path
    root = _parent(fixed)
    details = filesystem.glob(path, detail=True).values()
    files = [info for info in details if info["type"] == "file"]
    return [info for info in files if is_visible(_below(info["name"], root))], root


def _source_files(filesystem: Any, found: list[dict[str, Any]], root: str) -> list[SourceFile]:
    named, places = hashlib.sha256(), [(_below(info["name"], root), info) for info in found]
    return [
        SourceFile(
            filesystem,
            root,
            info["name"],
            name,
            int(info.get("size") or 0),
            named=named,
            version=_version(info),
        )
        for name, info in sorted(places, key=lambda place: place[0])
    ]


def _parent(path: str) -> str:
    return path.rsplit("/", 1)[0] if "/" in path else ""


def _below(path: str, root: str) -> str:
    root = root.rstrip("/")
    return path[len(root) :].lstrip("/") if path.startswith(root) else path


def is_visible(name: str) -> bool:
    """Whether a file below the root of a source, `name`, is one of the source's."""
    return not any(part.startswith((".", "_")) for part in name.split("/"))


def _suffix_format(name: str) -> str:
    path = PurePosixPath(name.lower())
    suffix = path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
    return next((kind for kind, suffixes in _FORMATS.items() if suffix in suffixes), "unknown")


def _format_of(files: list[SourceFile], data: DataSpec) -> str:
    if data.format != "auto":
        return data.format
    formats = {file.name: _suffix_format(file.name) for file in files}
    found = sorted(set(formats.values()))
    # files of no format beside images are notes, thumbnails' caches and the like
    if found in (["images", "unknown"], [found[0]]) and found != ["unknown"]:
        return found[0]
    odd = next(name for name, kind in formats.items() if kind == found[-1])
    what = "a mixture of " + ", ".join(found) if len(found) > 1 else "of no known format"
    fix = "set data.format, or narrow the pattern to one of csv, jsonl, parquet, images"
    raise DataError(f"the files are {what}", where=odd, fix=fix)
