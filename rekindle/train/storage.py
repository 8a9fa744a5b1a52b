"""Where checkpoints lie: a folder, or a prefix of an object store under any fsspec URI.

Both write whole files, list folders, and have one operation that commits: `put_new`. A
folder commits by an atomic rename; it belongs to one attempt at a time (the lock of
launch.process). An object store has neither renames nor locks: it commits by a put that
fails when the object exists (`If-None-Match` on S3), and a request that fails is repeated
a few times with growing pauses. S3 is tested against moto; gs:// takes the same path
through gcsfs and is unproven."""

import contextlib
import datetime as dt
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

import fsspec

from rekindle.errors import CheckpointError

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_SECONDS = (1.0, 4.0, 15.0)  # between the tries of one request to a store
PART_BYTES = 32 << 20  # of an upload in parts, and of reading ahead
_ROOM = "make room there or lower train.checkpoint.keep"
_GOES_ON = "the same command goes on from the checkpoint before"
DEAD_AFTER = dt.timedelta(hours=24)  # an upload this old has no living attempt behind it


def storage_of(root: str | Path) -> "Storage":
    """The folder or object store of a path or URI."""
    text = str(root).removeprefix("file://")
    return ObjectStore(text) if "://" in text else Folder(Path(text))


def no_room(root: str, needed_bytes: int, free_bytes: int | None = None) -> CheckpointError:
    """The error of a disk that is full."""
    message = f"No space left on device: a checkpoint in {root} needs {needed_bytes:,} bytes"
    if free_bytes is not None:
        message += f", {free_bytes:,} are free"
    return CheckpointError(message, where=root, fix=f"{_ROOM}; {_GOES_ON}")


def write_error(error: OSError, root: str, needed_bytes: int) -> CheckpointError:
    """What `error` means for a checkpoint of so many bytes."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_room(root, needed_bytes)
    message = f"cannot write a checkpoint to {root}: {error.strerror or error}"
    return CheckpointError(message, where=root, fix=_GOES_ON)


class Folder:
    """Files by their path below a folder that all machines mount; paths use "/"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = str(path)

    def folders(self) -> list[str]:
        """Names of the folders directly below the root; none where there is no root."""
        if not self.path.is_dir():
            return []
        return [entry.name for entry in self.path.iterdir() if entry.is_dir()]

    def read(self, path: str) -> bytes | None:
        """A small file's content, or None where there is no such file."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / path).read_bytes()
        return None

    def size(self, path: str) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return (self.path / path).stat().st_size
        return None

    def reader(self, path: str) -> BinaryIO:
        return (self.path / path).open("rb")

    def write(self, path: str, produce: Callable[[BinaryIO], T]) -> T:
        """Make a durable file of what `produce` writes; a failed write may be repeated."""
        target = self.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb", buffering=1 << 20) as file:
            result = produce(file)
            file.flush()
            os.fdatasync(file.fileno())
        return result

    def put_new(self, path: str, content: bytes) -> None:
        """Store a small file in one instant; raises CheckpointError where it exists already."""
        target = self.path / path
        if target.exists():
            raise _exists(self.root, path)
        draft = f"{path}.draft"
        self.write(draft, lambda file: file.write(content))
        (self.path / draft).replace(target)
        for folder in (target.parent, self.path):  # make the names in them durable
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            except OSError as error:
                if error.errno != errno.EINVAL:  # some network file systems have no such thing
                    raise
            finally:
                os.close(handle)

    def check_room(self, needed_bytes: int) -> None:
        """Raises CheckpointError where it is known that so much does not fit."""
        self.path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path).free
        if free < needed_bytes:
            raise no_room(self.root, needed_bytes, free)

    def remove(self, folder: str, last: str) -> None:
        """Delete a folder with its files, the file `last` before all others."""
        (self.path / folder / last).unlink(missing_ok=True)
        shutil.rmtree(self.path / folder, ignore_errors=True)

    def abandoned(self, folder: str) -> bool:
        """Whether no process can be writing into `folder` any more."""
        return True


class ObjectStore:
    """What `Folder` has, under a prefix of an object store, through its fsspec driver."""

    def __init__(self, uri: str) -> None:
        self.root = uri.rstrip("/")
        try:
            # a listing from a cache would hide what another machine did
            self.fs, path = fsspec.core.url_to_fs(self.root, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            fix = "use a path or an fsspec URI, and install the driver of its protocol"
            raise CheckpointError(f"cannot open {uri}: {error}", where=uri, fix=fix) from None
        self.prefix = str(path).rstrip("/")

    def folders(self) -> list[str]:
        entries = self._unless_missing(lambda: self.fs.ls(self.prefix, detail=True)) or []
        names = []
        for entry in entries:
            if entry["type"] == "directory":
                names.append(entry["name"].rstrip("/").rpartition("/")[2])
        return names

    def read(self, path: str) -> bytes | None:
        return self._unless_missing(lambda: bytes(self.fs.cat_file(self._path(path))))

    def size(self, path: str) -> int | None:
        return self._unless_missing(lambda: int(self.fs.info(self._path(path))["size"]))

    @contextlib.contextmanager
    def reader(self, path: str) -> Iterator[BinaryIO]:
        file = self._patiently(lambda: self.fs.open(self._path(path), "rb", block_size=PART_BYTES))
        with file:
            yield _PatientFile(file, self._patiently)  # type: ignore[misc]

    def write(self, path: str, produce: Callable[[BinaryIO], T]) -> T:
        def upload() -> T:
            file = self.fs.open(self._path(path), "wb", block_size=PART_BYTES)
            try:
                result = produce(file)
            except BaseException:
                file.discard()  # closing it would leave half of it under its name
                raise
            file.close()
            return result

        return self._patiently(upload)

    def put_new(self, path: str, content: bytes) -> None:
        def put() -> None:
            try:
                self.fs.pipe_file(self._path(path), content, mode="create")
            except FileExistsError:
                # perhaps by the try before, whose answer was lost
                if self.fs.cat_file(self._path(path)) != content:
                    raise _exists(self.root, path) from None

        self._patiently(put)

    def check_room(self, needed_bytes: int) -> None:
        """Stores are as large as the bill."""

    def remove(self, folder: str, last: str) -> None:
        def delete() -> None:
            names = self.fs.find(self._path(folder))
            names.sort(key=lambda name: not name.endswith(f"/{last}"))
            for name in names:
                self.fs.rm_file(name)

        self._patiently(delete)

    def abandoned(self, folder: str) -> bool:
        def latest_changes() -> list[dt.datetime]:
            return [self.fs.modified(path) for path in self.fs.find(self._path(folder))]

        dead_before = dt.datetime.now(dt.UTC) - DEAD_AFTER
        for changed_at in self._patiently(latest_changes):
            if changed_at.tzinfo is None:  # some drivers give times of UTC that do not say so
                changed_at = changed_at.replace(tzinfo=dt.UTC)
            if changed_at >= dead_before:
                return False
        return True

    def _path(self, path: str) -> str:
        return f"{self.prefix}/{path}"

    def _unless_missing(self, request: Callable[[], T]) -> T | None:
        with contextlib.suppress(FileNotFoundError):
            return self._patiently(request)
        return None

    def _patiently(self, request: Callable[[], T]) -> T:
        """Do it, with retries if need be; what a retry cannot solve is raised at once."""
        for pause in (*PAUSES_SECONDS, None):
            try:
                return request()
            except (FileNotFoundError, CheckpointError):
                raise
            except Exception as error:  # drivers raise their SDK's own errors, of no common kind
                if pause is None or isinstance(error, PermissionError):
                    cause = type(error).__name__
                    if str(error):
                        cause += f": {error}"
                    message = f"the checkpoint store {self.root} cannot be used: {cause}"
                    fix = "check that it can be reached and written from here; "
                    fix += "the same command goes on from the last checkpoint"
                    raise CheckpointError(message, where=self.root, fix=fix) from error
                log.warning("%s: %s; trying again in %g s", self.root, error, pause)
                time.sleep(pause)
        raise AssertionError  # the last round returns or raises


class _PatientFile:
    """A file of a store, whose reads are tried again."""

    def __init__(self, file: Any, patiently: Callable[[Callable[[], Any]], Any]) -> None:
        self.file = file
        self.patiently = patiently

    def seek(self, offset: int) -> None:
        self.file.seek(offset)

    def read(self, size: int = -1) -> bytes:
        start = self.file.tell()

        def again() -> bytes:
            self.file.seek(start)
            return bytes(self.file.read(size))

        return bytes(self.patiently(again))


Storage: TypeAlias = Folder | ObjectStore


def put_file(storage: Storage, path: str, file: Path) -> None:
    """Store a file of this machine."""

    def copy(target: BinaryIO) -> None:
        with file.open("rb") as source:
            shutil.copyfileobj(source, target, 1 << 20)

    storage.write(path, copy)


def _exists(root: str, path: str) -> CheckpointError:
    message = f"{root}/{path} was written by another attempt"
    return CheckpointError(message, where=root, fix="stop the other attempt at the same work")
