"""Where the files of a source are: globs, folders, formats, partitions, splits by name.

Any fsspec URI will do. A name is the path below the fixed part of the pattern
(`data/*/x.csv` -> `2026-03/x.csv`): the same wherever the folder lies. Hidden files
(`.x`, `_x`) are left out."""

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
from rekindle.data.encodings import as_utf8
from rekindle.data.window import Partitions, Window
from rekindle.errors import DataError, RequestError
from rekindle.rows.columns import encodable
from rekindle.spec.identity import digest
from rekindle.spec.model import DataSpec

log = logging.getLogger(__name__)
T = TypeVar("T")
FileInfo = Mapping[str, Any]
"""What a file system of fsspec lists of a file."""

# suffixes of compressed files, and what fsspec calls the compression
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_FORMATS = {
    "csv": (".csv", ".tsv"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
}
# words in names of files and folders, and the split that they tell
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
# what people leave beside data
_NOTE = re.compile(r"(?i)(^|/)((README|LICENSE)(\.(txt|md|rst))?|Thumbs\.db|desktop\.ini)$")
MOST_ROW_BYTES = 64 << 20  # of one row, in memory
_READ_BYTES = 1 << 20
_AT_ONCE = 8
if "zstd" not in fsspec.available_compressions():  # where a package that fsspec knows is missing
    fsspec.compression.register_compression(
        "zstd", lambda file, **_: io.BufferedReader(pa.CompressedInputStream(file, "zstd")), "zst"
    )
PIECE_BYTES = 256 << 20
"""Most bytes of a source that one worker reads at a time."""
# what a listing says that changes with each write, and what says so only where clocks do
_STRONG = ("ETag", "etag", "generation", "version_id")
_WEAK = ("mtime", "created", "ino", "LastModified", "last_modified")


class ContentHash:
    """SHA-256 of a file's bytes; where these are more than `PIECE_BYTES`, a hash of the
    SHA-256 of each block of so many, which several workers find at once."""

    def __init__(self) -> None:
        self._hashes: list[str] = []
        self._block = hashlib.sha256()
        self._block_bytes = 0

    def update(self, data: bytes) -> None:
        while len(data) > PIECE_BYTES - self._block_bytes:
            room = PIECE_BYTES - self._block_bytes
            self._block.update(data[:room])
            self._hashes.append(self._block.hexdigest())
            self._block = hashlib.sha256()
            self._block_bytes = 0
            data = data[room:]
        self._block.update(data)
        self._block_bytes += len(data)

    def hexdigest(self) -> str:
        return combined([*self._hashes, self._block.hexdigest()])


def combined(hashes: Sequence[str]) -> str:
    """The hash of blocks of a file, or of sources, that are read together."""
    return hashes[0] if len(hashes) == 1 else digest(list(hashes))


def grouped(items: Iterable[T], *limits: tuple[Callable[[T], float], float]) -> Iterator[list[T]]:
    """Items in runs in which no measure's sum exceeds its limit; an item alone may."""
    group = list[T]()
    sums = [0.0] * len(limits)
    for item in items:
        sizes = [measure(item) for measure, _ in limits]
        sums = [total + size for total, size in zip(sums, sizes, strict=True)]
        if group and any(total > most for total, (_, most) in zip(sums, limits, strict=True)):
            yield group
            group = []
            sums = sizes
        group.append(item)
    if group:
        yield group


def _version(info: FileInfo) -> str:
    """What a listing says of a file and what changes when it is written: its size, and
    its ETag or generation, else its time."""
    marks = [f"{info[name]}" for name in _STRONG if info.get(name)]
    if not marks:
        for name in _WEAK:
            time = info.get(name)
            if not time:
                continue
            # some stores list a number, and answer for one file with a date
            if isinstance(time, dt.datetime):
                time = time.timestamp()
            marks.append(f"{time}")
    return "|".join([f"{info.get('size')}", *marks])


class _LineRange(io.RawIOBase):
    """`head`, then the lines of a stream that begin in bytes `start` to `end`."""

    def __init__(self, stream: BinaryIO, start: int, end: int, head: bytes) -> None:
        self._stream = stream
        self._end = end
        self._ready = head
        # one byte before, which tells whether a line begins at `start`
        self._position = max(start - 1, 0)
        self._is_over = False
        self._skips_line = start > 0
        stream.seek(self._position)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._is_over:
            self._ready = self._next(len(buffer))
        piece = self._ready[: len(buffer)]
        self._ready = self._ready[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def _next(self, size: int) -> bytes:
        """Those of the stream's next bytes that
        belong to lines which begin in the range."""
        piece = self._stream.read(size)
        begin = self._position
        self._position += len(piece)
        if not piece:  # also of a file that became shorter
            self._is_over = True
            return b""
        if self._skips_line:
            cut = piece.find(b"\n") + 1
            if not cut:
                self._is_over = self._position >= self._end
                return b""
            self._skips_line = False
            piece = piece[cut:]
            begin += cut
            if begin >= self._end:
                self._is_over = True
                return b""
        if begin + len(piece) < self._end:
            return piece
        # up to the end of the line that holds the last byte of the range
        last = piece.find(b"\n", max(self._end - 1 - begin, 0)) + 1
        if not last:
            return piece
        self._is_over = True
        return piece[:last]


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One file: `path` within `filesystem`, `name` for people, its path below the
    source's `root`, `partition` where the URI has one, `split` where told; `named` hashes
    files that its rows name; `delimiter` and `encoding` as in the config; `version` as
    listed. Of a part of one, `start` and `end` are bytes (of Parquet row groups), and
    `line` its first."""

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
        """The content from front to back, decompressed, texts as UTF-8; of a part the
        lines that begin in it, behind `head`."""
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
        """For reading at any place: the file,
        or a copy of a whole one that lies elsewhere."""
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
        # stores bring blocks of 50 MB, else
        with self.filesystem.open(
            self.path, "rb", compression=self.compression, block_size=size
        ) as stream:
            return bytes(as_utf8(stream, self.encoding).read(size))

    def is_as_listed(self) -> bool:
        """Whether the file was not written since."""
        # fsspec would answer from its listing
        self.filesystem.invalidate_cache()
        return _version(self.filesystem.info(self.path)) == self.version

    @property
    def compression(self) -> str | None:
        return _COMPRESSED.get(PurePosixPath(self.name).suffix.lower())

    def fetch(self, path: str) -> bytes:
        """The bytes of a file that a row of this one names.
        ValueError where it must not."""
        # a row is data of others: it names files below the source only
        named = reference.path_of(self.filesystem, self.root, _parent(self.path), path)
        content = reference.read(self.filesystem, named)
        # in the order of the rows, which is that of their content
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
    """Files of a source, by name, all of one format;
    `unit` is the length of a partition."""

    files: tuple[SourceFile, ...]
    format: str
    unit: str = ""

    @property
    def newest(self) -> dt.datetime | None:
        return max((file.partition for file in self.files if file.partition), default=None)

    def within(self, window: Window) -> Self:
        """The files whose partition starts in the window.
        Raises DataError if none does."""
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
        """Hash of bytes in order of name, and of `named` names: of contents whose hash is
        `known` by path, and of the others as they are now."""
        known = known or {}
        # side by side: a store answers each request slowly, and several at once
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            unknown_files = [file for file in self.files if file.path not in known]
            hashes = pool.map(SourceFile.sha256, unknown_files)
            hash_of = dict(zip(unknown_files, hashes, strict=True))
        running = hashlib.sha256()
        for file in self.files:
            name = file.name if named else ""
            partition = file.partition.isoformat() if file.partition else ""
            content = known.get(file.path) or hash_of[file]
            running.update(f"{name}\0{partition}\0{content}\n".encode())
        return running.hexdigest()[:32]


def locate(data: DataSpec) -> Files:
    """The files that `data.source` names.
    Raises DataError for none, RequestError for a bad URI."""
    try:
        filesystem, path = fsspec.core.url_to_fs(data.source)
    except (ValueError, ImportError) as error:
        raise RequestError(
            f"cannot open {data.source}: {error}",
            where="data.source",
            fix="use a path or an fsspec URI, and install the driver of its protocol",
        ) from None
    partitions = None
    pattern = path
    if data.window and "{window" in path:
        partitions = Partitions.of(path, data.window)
        pattern = partitions.glob
    try:
        infos, root = _list(filesystem, pattern)
    except Exception as error:  # fsspec lets the errors of its stores' clients through
        raise DataError(
            f"cannot list {data.source}: {error}",
            where="data.source",
            fix="check the path, the credentials and the network",
        ) from error
    files = [
        dataclasses.replace(file, delimiter=data.delimiter, encoding=data.encoding)
        for file in _source_files(filesystem, infos, root)
        if not _NOTE.search(file.name)
    ]
    if partitions:
        files = _with_partition(files, partitions)
    if not files:
        names_no = "names no partition that exists" if partitions else "names no file"
        raise DataError(
            f"{data.source} {names_no}",
            where="data.source",
            fix="check the path; * stands for any name",
        )
    if data.split.by == "source":
        files = [dataclasses.replace(file, split=split_of(file.name)) for file in files]
    kind = _format_of(files, data)
    if kind == "images" and data.format == "auto":
        files = _images_among(files)
    for file in files:
        if not encodable(file.name):
            raise DataError(
                "the name of a file is not UTF-8",
                where=ascii(file.name).strip("'"),
                fix="rename it, such as with convmv",
            )
    unit = partitions.unit if partitions else ""
    return Files(tuple(files), kind, unit)


def _with_partition(files: Sequence[SourceFile], partitions: Partitions) -> list[SourceFile]:
    """The files that lie in a partition, with its time."""
    partitioned = []
    for file in files:
        time = partitions.time_of(file.path)
        if time:
            partitioned.append(dataclasses.replace(file, partition=time))
    return partitioned


def _images_among(files: Sequence[SourceFile]) -> list[SourceFile]:
    """The images; the log says how many other files are left out."""
    others = [file.name for file in files if _suffix_format(file.name) != "images"]
    if others:
        log.warning("%d files beside the images are ignored, such as %s", len(others), others[0])
    return [file for file in files if _suffix_format(file.name) == "images"]


def delimiter_of(name: str, head: bytes) -> str:
    """What is between the columns of a CSV or TSV file with this beginning: `;` or a tab
    where its first line has some and no comma, as spreadsheets of many countries write
    it."""
    if ".tsv" in name.lower():
        return "\t"
    first_line = head.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n").partition(b"\n")[0]
    if b"," in first_line:
        return ","
    for mark in (";", "\t"):
        if mark.encode() in first_line:
            return mark
    return ","


def content_hash(uri: str) -> str:
    """Hash of names and bytes of the files below a path or URI.
    Raises DataError for none."""
    filesystem, path = fsspec.core.url_to_fs(uri)
    infos, root = _list(filesystem, path)
    files = _source_files(filesystem, infos, root)
    if not files:
        raise DataError(f"no such file or folder: {uri}", fix="check the path")
    return Files(tuple(files), "").fingerprint(named=True)


def split_of(name: str) -> str:
    """The split in a name such as `train/cat/1.png` or `sst2-test.csv`; "" for none."""
    # from the outermost folder inwards: the first word that tells a split counts
    for part in name.split("/"):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return ""


def _list(filesystem: Any, path: str) -> tuple[list[FileInfo], str]:
    """The files that a path, folder or pattern names, and where their names start."""
    if filesystem.isfile(path):
        return [filesystem.info(path)], _parent(path)
    if filesystem.isdir(path):
        details = filesystem.find(path, detail=True).values()
        infos = [info for info in details if is_visible(_below(info["name"], path))]
        if isinstance(filesystem, LocalFileSystem):
            _check_are_files(infos)
        return infos, path
    # what stands before the first wildcard
    fixed = re.split(r"[*?\[]", path, maxsplit=1)[0]
    if fixed == path:
        return [], path
    root = _parent(fixed)
    details = filesystem.glob(path, detail=True).values()
    files = [info for info in details if info["type"] == "file"]
    return [info for info in files if is_visible(_below(info["name"], root))], root


def _check_are_files(infos: Iterable[FileInfo]) -> None:
    """Raise DataError for a path here that is not a file: a pipe would be waited for, and
    a link may lead nowhere."""
    for info in infos:
        path = Path(info["name"])
        if not path.is_file():
            raise DataError("this is not a file", where=str(path), fix="move it elsewhere")


def _source_files(filesystem: Any, infos: Sequence[FileInfo], root: str) -> list[SourceFile]:
    """The listed files in order of name."""
    named = hashlib.sha256()  # one for all: it hashes the files that their rows name
    files = []
    for info in infos:
        file = SourceFile(
            filesystem,
            root,
            info["name"],
            _below(info["name"], root),
            int(info.get("size") or 0),
            named=named,
            version=_version(info),
        )
        files.append(file)
    # stores list in orders of their own
    return sorted(files, key=lambda file: file.name)


def _parent(path: str) -> str:
    return path.rsplit("/", 1)[0] if "/" in path else ""


def _below(path: str, root: str) -> str:
    root = root.rstrip("/")
    return path[len(root) :].lstrip("/") if path.startswith(root) else path


def is_visible(name: str) -> bool:
    """Whether a file below the root of a source, `name`, is one of the source's."""
    return not any(part.startswith((".", "_")) for part in name.split("/"))


def _suffix_format(name: str) -> str:
    """The format by a name's suffix, before that of a compression; "unknown" for none."""
    path = PurePosixPath(name.lower())
    suffix = path.suffix
    if suffix in _COMPRESSED:
        suffix = path.with_suffix("").suffix
    for kind, suffixes in _FORMATS.items():
        if suffix in suffixes:
            return kind
    return "unknown"


def _format_of(files: list[SourceFile], data: DataSpec) -> str:
    """The one format of the files.
    Raises DataError for several, or for an unknown one."""
    if data.format != "auto":
        return data.format
    format_of = {file.name: _suffix_format(file.name) for file in files}
    formats = sorted(set(format_of.values()))
    # files of no format beside images are notes, thumbnails' caches and the like
    if formats == ["images", "unknown"]:
        return "images"
    if len(formats) == 1 and formats != ["unknown"]:
        return formats[0]
    are = "of no known format"
    if len(formats) > 1:
        are = "a mixture of " + ", ".join(formats)
    raise DataError(
        f"the files are {are}",
        where=next(name for name, kind in format_of.items() if kind == formats[-1]),
        fix="set data.format, or narrow the pattern to one of csv, jsonl, parquet, images",
    )
