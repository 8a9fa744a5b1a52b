"""Where the files of a source are: globs, folders, formats, partitions, and the splits that names
tell.

Any fsspec URI will do. A name is the path below the fixed part of the pattern (`data/*/x.csv` ->
`2026-03/x.csv`): what rows are called by, the same wherever the folder lies. Files are sorted by
name. Hidden files (`.x`, `_x`) are left out of folders and globs.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import re
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec

from rekindle.data import reference
from rekindle.data.window import Partitions, Window
from rekindle.errors import DataError, RequestError
from rekindle.spec.model import DataSpec

_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_FORMATS = {
    "csv": (".csv", ".tsv"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
}
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_PIECE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One file: `path` within `filesystem`, `name` for people, its path below the source's `root`,
    `partition` where the URI has one, `split` where told."""

    filesystem: Any = dataclasses.field(repr=False, compare=False)
    root: str
    path: str
    name: str
    size: int
    partition: dt.datetime | None = None
    split: str = ""

    def open(self) -> BinaryIO:
        """The content, decompressed where the suffix says so."""
        compression = _COMPRESSED.get(PurePosixPath(self.name).suffix.lower())
        return cast(BinaryIO, self.filesystem.open(self.path, "rb", compression=compression))

    def fetch(self, path: str) -> bytes:
        """The bytes of a file that a row of this one names; ValueError where it must not."""
        named = reference.path_of(self.filesystem, self.root, _parent(self.path), path)
        return reference.read(self.filesystem, named)

    def sha256(self) -> str:
        """Hash of the bytes as they are stored."""
        running = hashlib.sha256()
        with self.filesystem.open(self.path, "rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
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
        """The start of the newest partition."""
        return max((file.partition for file in self.files if file.partition), default=None)

    def within(self, window: Window) -> Files:
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

    def fingerprint(self, *, named: bool) -> str:
        """Hash of the bytes, in order of name; of the names too where they mean something."""
        running = hashlib.sha256()
        for file in self.files:
            partition = file.partition.isoformat() if file.partition else ""
            running.update(f"{file.name if named else ''}\0{partition}\0{file.sha256()}\n".encode())
        return running.hexdigest()[:32]


def locate(data: DataSpec) -> Files:
    """The files that `data.source` names; raises DataError for none, RequestError for a bad URI."""
    try:
        filesystem, path = fsspec.core.url_to_fs(data.source)
    except (ValueError, ImportError) as error:
        fix = "use a path or an fsspec URI, and install the driver of its protocol"
        raise RequestError(
            f"cannot open {data.source}: {error}", where="data.source", fix=fix
        ) from None
    partitions = Partitions.of(path, data.window) if data.window and "{window" in path else None
    try:
        found, root = _list(filesystem, partitions.glob if partitions else path)
    except OSError as error:
        fix = "check the path, the credentials and the network"
        raise DataError(
            f"cannot list {data.source}: {error}", where="data.source", fix=fix
        ) from error
    files = _source_files(filesystem, found, root)
    if partitions:
        files = _partitioned(files, partitions)
    if not files:
        what = "names no partition that exists" if partitions else "names no file"
        raise DataError(
            f"{data.source} {what}",
            where="data.source",
            fix="check the path; * stands for any name",
        )
    if data.split.by == "source":
        files = [dataclasses.replace(file, split=split_of(file.name)) for file in files]
    kind = _format_of(files, data)
    ordered = tuple(sorted(files, key=lambda file: file.name))
    return Files(ordered, kind, partitions.unit if partitions else "")


def content_hash(uri: str) -> str:
    """Hash of the files below a path or URI, names and bytes; raises DataError for none."""
    filesystem, path = fsspec.core.url_to_fs(uri)
    found, root = _list(filesystem, path)
    files = _source_files(filesystem, found, root)
    if not files:
        raise DataError(f"there is nothing at {uri}", fix="check the path")
    return Files(tuple(sorted(files, key=lambda file: file.name)), "").fingerprint(named=True)


def split_of(name: str) -> str:
    """The split that a name tells: `train/cat/1.png`, `sst2-test.csv`,
    `validation-00000-of-00002.parquet`; or empty."""
    for part in name.split("/"):
        words = [word for word in re.split(r"[^a-z]+", part.lower()) if word in _SPLIT_WORDS]
        if words:
            return _SPLIT_WORDS[words[0]]
    return ""


def _list(filesystem: Any, path: str) -> tuple[list[dict[str, Any]], str]:
    """Details of the files that a path, folder or pattern stands for, and the folder that their
    names start below."""
    if filesystem.isfile(path):
        return [filesystem.info(path)], _parent(path)
    if filesystem.isdir(path):
        details = filesystem.find(path, detail=True).values()
        return [info for info in details if _visible(_below(info["name"], path))], path
    fixed = re.split(r"[*?\[]", path, maxsplit=1)[0]
    if fixed == path:
        return [], path
    root = _parent(fixed)
    details = filesystem.glob(path, detail=True).values()
    files = [
        info for info in details if info["type"] == "file" and _visible(_below(info["name"], root))
    ]
    return files, root


def _source_files(filesystem: Any, found: list[dict[str, Any]], root: str) -> list[SourceFile]:
    return [
        SourceFile(
            filesystem, root, info["name"], _below(info["name"], root), int(info.get("size") or 0)
        )
        for info in found
    ]


def _parent(path: str) -> str:
    """The folder of a path or URL."""
    return path.rsplit("/", 1)[0] if "/" in path else ""


def _partitioned(files: list[SourceFile], partitions: Partitions) -> list[SourceFile]:
    dated = [dataclasses.replace(file, partition=partitions.time_of(file.path)) for file in files]
    return [file for file in dated if file.partition]


def _below(path: str, root: str) -> str:
    root = root.rstrip("/")
    return path[len(root) :].lstrip("/") if path.startswith(root) else path


def _visible(name: str) -> bool:
    return not any(part.startswith((".", "_")) for part in name.split("/"))


def _format_of(files: list[SourceFile], data: DataSpec) -> str:
    if data.format != "auto":
        return data.format
    formats = {file.name: _suffix_format(file.name) for file in files}
    found = sorted({kind or "unknown" for kind in formats.values()})
    if len(found) == 1 and found[0] != "unknown":
        return found[0]
    odd = next(name for name, kind in formats.items() if (kind or "unknown") == found[-1])
    what = "a mixture of " + ", ".join(found) if len(found) > 1 else "of no known format"
    fix = "set data.format, or narrow the pattern to one of csv, jsonl, parquet, images"
    raise DataError(f"the files are {what}", where=odd, fix=fix)


def _suffix_format(name: str) -> str | None:
    path = PurePosixPath(name.lower())
    suffix = path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
    return next((kind for kind, suffixes in _FORMATS.items() if suffix in suffixes), None)
