"""What an artifact holds: the files under it with sizes and hashes, and one digest of all.

The digest of a file is the sha256 of its bytes; that of a folder hashes one line a file and empty
folder (relative path, size, sha256), sorted by path, so that neither times nor the place on disk
count. Links to files count as the file, links to folders as their target's name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class FileFact:
    """One file: `mtime_ns` only says whether the hash has to be taken again."""

    size: int
    mtime_ns: int
    sha256: str


def describe(path: Path, known: Mapping[str, FileFact] | None = None) -> dict[str, FileFact]:
    """Every file under `path` by its relative name ("" where `path` is a file; empty where it is
    not there).

    A file whose size and time are as in `known` keeps the hash it has there.
    """
    known = known or {}
    facts: dict[str, FileFact] = {}
    for name, entry in sorted(_walk(path)):
        if isinstance(entry, str):
            facts[name] = FileFact(0, 0, entry)
            continue
        before = known.get(name)
        if before and (before.size, before.mtime_ns) == (entry.st_size, entry.st_mtime_ns):
            facts[name] = before
        else:
            file = path / name if name else path
            facts[name] = FileFact(entry.st_size, entry.st_mtime_ns, _sha256(file))
    return facts


def digest(facts: Mapping[str, FileFact]) -> str:
    """One hash for `describe`'s result; "" for nothing at all."""
    if not facts:
        return ""
    if list(facts) == [""]:
        return facts[""].sha256
    lines = (f"{name}\0{fact.size}\0{fact.sha256}\n" for name, fact in sorted(facts.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def difference(recorded: Mapping[str, FileFact], path: Path) -> str:
    """How what is at `path` now differs from what was recorded: "gone", "changed", or "" if it does
    not."""
    if not recorded:
        return ""
    now = describe(path, recorded)
    if not now or recorded.keys() - now.keys():
        return "gone" if not now else "changed"
    return "" if digest(now) == digest(recorded) else "changed"


def local_path(uri: str) -> Path | None:
    """The path that a URI names on this machine; None for a remote one."""
    if uri.startswith("file://"):
        return Path(uri.removeprefix("file://"))
    return None if "://" in uri or not uri else Path(uri)


def _walk(path: Path) -> Iterator[tuple[str, os.stat_result | str]]:
    """Relative names with their stat, or with a text for what is no file: an empty folder, a linked
    one."""
    if path.is_file():
        yield "", path.stat()
        return
    pending = [(path, "")] if path.is_dir() else []
    while pending:
        folder, prefix = pending.pop()
        empty = True
        with os.scandir(folder) as entries:
            for entry in entries:
                empty = False
                name = prefix + entry.name
                if entry.is_file():
                    yield name, entry.stat()
                elif entry.is_dir(follow_symlinks=False):
                    pending.append((Path(entry.path), name + "/"))
                else:
                    yield (
                        name,
                        _kind_of(Path(entry.path)),
                    )
        if empty:
            yield prefix or "/", "empty"


def _kind_of(path: Path) -> str:
    return f"link:{path.readlink()}" if path.is_symlink() else "special"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
