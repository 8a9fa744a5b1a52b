"""What an artifact holds: the files under it with sizes and hashes, and one digest of
all.

The digest of a file is the sha256 of its bytes; that of a folder hashes one line a file
and empty folder (relative path, size, sha256), sorted by path, so that neither times nor
the place on disk count. Links to files count as the file; links to folders as their
target's name, or, in data that a user imports, as the folder: what a step left may name
anything of this machine.

A recorded file is hashed again, the smallest files first, up to `_READ_AGAIN_BYTES` per
artifact. Beyond that, a file whose size, times and inode are as recorded keeps its hash:
every write changes the ctime. Only bits that the disk itself loses go unnoticed there;
files of that size are weights and shards, whose own hashes are checked where they are
loaded."""

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
    def of(cls, stat: os.stat_result, sha256: str) -> Self:
        return cls(stat.st_size, stat.st_mtime_ns, sha256, stat.st_ctime_ns, stat.st_ino)


def describe(
    path: Path, known: Mapping[str, FileFact] | None = None, *, follow: bool = False
) -> dict[str, FileFact]:
    """Every file under `path` by its relative name ("" where `path` is a file; empty
    where it is not there), links to folders followed if so asked; `known` is what was
    recorded of it."""
    facts: dict[str, FileFact] = {}
    unread_bytes = _READ_AGAIN_BYTES
    smallest_first = sorted(_walk(path, follow), key=lambda row: getattr(row[1], "st_size", 0))
    for name, entry in smallest_first:
        if isinstance(entry, str):
            facts[name] = FileFact(0, 0, entry)
            continue
        before = (known or {}).get(name)
        unread_bytes -= entry.st_size
        if unread_bytes < 0 and before and before == FileFact.of(entry, before.sha256):
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
    lines = [f"{name}\0{fact.size}\0{fact.sha256}\n" for name, fact in sorted(facts.items())]
    # fsencode: a name need not be UTF-8
    return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


def local_path(uri: str) -> Path | None:
    """The path that a URI names on this machine; None for a remote one."""
    if uri.startswith("file://"):
        return Path(uri.removeprefix("file://"))
    return None if "://" in uri or not uri else Path(uri)


def _walk(path: Path, follow: bool = False) -> Iterator[tuple[str, os.stat_result | str]]:
    """Relative names with their stat, or with a text: of an empty folder, or of a linked
    one."""
    if path.is_file():
        yield "", path.stat()
        return
    if not path.is_dir():
        return
    pending = [(path, "", {path.resolve()})]
    while pending:
        folder, prefix, parents = pending.pop()
        is_empty = True
        with os.scandir(folder) as entries:
            for entry in entries:
                is_empty = False
                name = prefix + entry.name
                path = Path(entry.path)
                if path.is_file():  # unlike the entry's, False for a link to itself
                    yield name, entry.stat()
                elif entry.is_dir(follow_symlinks=False):
                    pending.append((path, name + "/", parents))
                elif follow and path.is_dir() and path.resolve() not in parents:  # or no end
                    pending.append((path, name + "/", {*parents, path.resolve()}))
                elif path.is_symlink():
                    yield name, f"link:{path.readlink()}"
                else:
                    yield name, "special"
        if is_empty:
            yield prefix or "/", "empty"
