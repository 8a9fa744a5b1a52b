"""What identifies work: canonical hashes of settings, of files, and of rekindle's own
sources.

A hash here is the first 16 bytes of SHA-256, in hex: short enough for a folder name, long
enough that two different works never share one (a collision among a billion works has a
chance below 1e-20)."""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rekindle.records import canonical_json
from rekindle.spec.heartbeat import beat

_BELOW = (
    "protojson.py",
    "errors.py",
    "records",
    "storage",
    "tables.py",
    "families",
    "objectives",
    "spec",
)
TRAINING = (*_BELOW, "rows", "modalities", "data", "tasks", "launch", "engines", "train")
DATA_PLANE = (*TRAINING, "evaluate", "registry")
_PIECE_BYTES = 1 << 20
_LARGE_BYTES = 64 << 20


def digest(value: Any) -> str:
    """Hash of a JSON value that does not depend on the order of keys."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex, read in pieces, with a heartbeat for each."""
    sha256 = hashlib.sha256()
    buffer = bytearray(_PIECE_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            sha256.update(view[:size])
            beat()
    return sha256.hexdigest()


def large_file_sha256(path: Path) -> str:
    """The same, read once a process while a file's size, times and inode stay as they are."""
    state = path.stat()
    if state.st_size < _LARGE_BYTES:
        return file_sha256(path)
    return _remembered(path, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)


@functools.lru_cache(maxsize=1024)
def _remembered(path: Path, *_: int) -> str:
    return file_sha256(path)


@functools.cache
def source_hash(parts: Iterable[str] = DATA_PLANE) -> str:
    """Hash of rekindle's own sources under `parts`: changed code must not get an old result."""
    package = Path(__file__).resolve().parent.parent
    files: list[Path] = []
    for path in [package / part for part in parts]:
        if path.suffix == ".py":
            files.append(path)
        else:
            files += sorted(file for file in path.rglob("*") if file.suffix in (".py", ".yaml"))
    return digest([[file.relative_to(package).as_posix(), file_sha256(file)] for file in files])
