"""What an artifact holds: the files under it with sizes and hashes, and one digest of all.

The digest of a file is the sha256 of its bytes; that of a folder hashes one line a file and empty
folder (relative path, size, sha256), sorted by path, so that neither times nor the place on disk
count. Links to files count as the file; links to folders as their target's name, or, in data that
a user imports, as the folder: what a step left may name anything of this machine.

A recorded file is hashed again, the smallest files first, up to `_READ_AGAIN_BYTES` per artifact.
Beyond that, a file whose size, times and inode are as recorded keeps its hash: every write changes
the ctime. Only bits that the disk itself loses go unnoticed there; files of that size are weights
and shards, whose own hashes are checked where they are loaded."""

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from rekindle.spec.identity import file_sha256

_READ_AGAIN_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class FileFact:
    """One file: all but size and hash only say whether the hash has to be taken again."""

    size: int
    mtime_ns: int
    sha256: str
    ctime_ns: int = 0
    inode: int = 0

    @classmethod
    def of(cls, found: os.stat_result, sha256: str) -> Self:
        return cls(found.st_size, found.st_mtime_ns, sha256, found.st_ctime_ns, found.st_ino)


def describe(
    path: Path, known: Mapping[str, FileFact] | None = None, *, follow: bool = False
) -> dict[str, FileFact]:
    """Every file under `path` by its relative name ("" where `path` is a file; empty where it is
    not there), links to folders followed if so asked; `known` is what was recorded of it."""
    facts: dict[str, FileFact] = {}
    left = _READ_AGAIN_BYTES
    for name, entry in sorted(_walk(path, follow), key=lambda each: getattr(each[1], "st_size", 0)):
        if isinstance(entry, str):
            facts[name] = FileFact(0, 0, entry)
            continue
        before = (known or {}).get(name)
        left -= entry.st_size
        if left < 0 and before and before == FileFact.of(entry, before.sha256):
            facts[name] = before
        else:
            facts[name] = FileFact.of(entry, file_sha256(path / name if name else path))
    return dict(sorted(facts.items()))


def digest(facts: Mapping[str, FileFact]) -> str:
    """One hash for `describe`'s result; "" for nothing at all."""
    if not facts:
        return ""
    if list(facts) == [""]:
        return facts[""].sha256
    lines = (f"{name}\0{fact.size}\0{fact.sha256}\n" for name, fact in sorted(facts.items()))
    return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


def local_path(uri: str) -> Path | None:
    """The path that a URI names on this machine; None for a remote one."""
    if uri.startswith("file://"):
        return Path(uri.removeprefix("file://"))
    return None if "://" in uri or not uri else Path(uri)


def _walk(path: Path, follow: bool = False) -> Iterator[tuple[str, os.stat_result | str]]:
    """Relative names with their stat, or with a text: of an empty folder, or of a linked one."""
    if path.is_file():
        yield "", path.stat()
        return
    pending = [(path, "", {path.resolve()})] if path.is_dir() else []
    while pending:
        folder, prefix, around = pending.pop()
        empty = True
        with os.scandir(folder) as entries:
            for entry in entries:
                empty = False
                name, path = prefix + entry.name, Path(entry.path)
                if path.is_file():  # unlike the entry's, False for a link to itself
                    yield name, entry.stat()
                elif entry.is_dir(follow_symlinks=False):
                    pending.append((path, name + "/", around))
                elif follow and path.is_dir() and path.resolve() not in around:  # or it has no end
                    pending.append((path, name + "/", {*around, path.resolve()}))
                else:
                    yield name, f"link:{path.readlink()}" if path.is_symlink() else "special"
        if empty:
            yield prefix or "/", "empty"
