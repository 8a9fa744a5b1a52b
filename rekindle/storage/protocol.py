"""What a storage does, and what its failures are called.

Paths use "/" and are below `root`; "" is the root itself, which may be a file. What each
backend promises:

| | a folder | an object store |
|---|---|---|
| `put_new`: one of several writers wins, with its whole content | hard link | see below |
| `put`: readers see the old or the new content | rename | one request |
| `write`: a writer that is killed leaves | half a file | nothing |
| tries of one request | 1 | 4, in 20 s |

For `put_new` S3 and Azure get the header `If-None-Match: *`, Google Cloud Storage gets
`ifGenerationMatch=0`, and fsspec's memory, which tests use, looks before it puts. S3 is
tested against moto. Google Cloud Storage and Azure take the same path through gcsfs and
adlfs, and are unproven."""

import dataclasses
import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TypeAlias, TypeVar

from rekindle.errors import RekindleError, StorageError

T = TypeVar("T")
Action: TypeAlias = Literal["open", "read", "list", "write", "remove"]
Reason: TypeAlias = Literal["exists", "full", "forbidden", "missing", "other"]
HOW_TO_OPEN = "use a path or an fsspec URI, and install the driver of its protocol"
_PARTICIPLES: dict[Action, str] = {
    "open": "opened",
    "read": "read",
    "list": "listed",
    "write": "written",
    "remove": "deleted",
}


class ExistsError(StorageError):
    """`put_new` found other content under the name."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """What could not be done, for the sentence of the caller."""

    root: str
    """Of the storage."""
    path: str
    """Of the file or folder, below the root."""
    action: Action
    reason: Reason
    error: Exception
    """What the system or the driver of the store raised."""
    needed_bytes: int | None = None
    """What the work needs that the file is a part of, where the caller gave it."""
    free_bytes: int | None = None
    """What the file system has, where it was asked."""

    @property
    def place(self) -> str:
        """The path or URI of the file or folder."""
        return f"{self.root}/{self.path}" if self.path else self.root

    @property
    def cause(self) -> str:
        """The system's words, or the kind and the text of a driver's error."""
        if isinstance(self.error, OSError) and self.error.strerror:
            return self.error.strerror
        kind = type(self.error).__name__
        return f"{kind}: {self.error}" if str(self.error) else kind


Explain: TypeAlias = Callable[[Failure], RekindleError]
"""Makes the error that is raised in place of a failure."""


def about(subject: str) -> Explain:
    """Errors that say "`subject` cannot be written: Permission denied", with a fix by the
    reason; ExistsError where `put_new` was too late, else StorageError."""

    def explain(failure: Failure) -> RekindleError:
        if failure.action == "open":
            message = f"cannot open {failure.root}: {failure.error}"
            return StorageError(message, where=failure.root, fix=HOW_TO_OPEN)
        if failure.reason == "exists":
            message = f"{failure.place} was written by another process"
            fix = "stop the other process, or delete what it wrote"
            return ExistsError(message, where=failure.root, fix=fix)
        message = f"{subject} cannot be {_PARTICIPLES[failure.action]}: {failure.cause}"
        return StorageError(message, where=failure.place, fix=_fix_of(failure))

    return explain


def reason_of(error: Exception) -> Reason:
    """The reason that an error of the system or of a driver stands for, other than "exists"."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    if isinstance(error, PermissionError):
        return "forbidden"
    if isinstance(error, FileNotFoundError):
        return "missing"
    return "other"


def _fix_of(failure: Failure) -> str:
    participle = _PARTICIPLES[failure.action]
    match failure.reason:
        case "full" if failure.action == "read":
            return "make room on the disk of this machine; the same command goes on from there"
        case "full":
            return "make room there, or name another place; the same command goes on from there"
        case "forbidden":
            access = "read" if failure.action in ("read", "list") else "write"
            return f"grant {access} on {failure.root} to the process that runs this"
        case "missing":
            return f"create {failure.root}, or name another place"
        case _:
            return f"check that {failure.root} can be reached and {participle} from here"


class Storage(Protocol):
    """Files below a root.

    Every method raises what the `Explain` of the storage makes of a failure, by default
    StorageError. An object store repeats a request that fails, with growing pauses, before
    it does so. Several processes and threads may use the same root."""

    root: str
    """The path or URI."""

    def folders(self) -> list[str]:
        """Names of the folders directly below the root; none where there is no root."""

    def files(self, folder: str = "") -> dict[str, int]:
        """The bytes of all files in a folder and the folders below it, by their path in
        the folder; those of a file under "", and nothing where there is neither."""

    def size(self, path: str) -> int | None:
        """The bytes of a file, or None where there is no such file."""

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes | None:
        """The content of a file, or its bytes from `start` to `end`; None where there is
        no such file."""

    def reader(self, path: str, *, ahead: bool = True) -> AbstractContextManager[BinaryIO]:
        """A file that can be read and sought in; with `ahead`, more is fetched than is asked
        for. Raises FileNotFoundError where there is none. A folder raises the system's own
        OSError: a sector that cannot be read concerns this file, and not the storage."""

    def write(
        self, path: str, produce: Callable[[BinaryIO], T], total_bytes: int | None = None
    ) -> T:
        """Make a durable file of what `produce` writes, in place of what is there; returns
        what `produce` does, which may be called again. `total_bytes` is what the work needs
        that this file is a part of, for the error of a full disk."""

    def put(self, path: str, content: bytes, mode: int = 0o666) -> None:
        """Store a small file, whole or not at all, in place of what is there; in a folder
        with `mode`."""

    def put_new(self, path: str, content: bytes, total_bytes: int | None = None) -> None:
        """Store a small file, whole or not at all, only if there is none: of several
        processes one succeeds. For the others the reason of the Failure is "exists".

        In an object store the same content counts as put: the answer to an earlier try
        of this request may have been lost."""

    def upload(self, source: Path, path: str) -> None:
        """Copy a file, or the files of a folder, of this machine to `path`."""

    def download(self, path: str, target: Path) -> bool:
        """Copy a file, or the files of a folder, to `target` on this machine; whether there
        were any."""

    def remove_file(self, path: str) -> None:
        """Delete a file, if it is there; what else is there need not be listed."""

    def remove(self, path: str, first: str = "") -> None:
        """Delete a file, or a folder with its files, if they are there.

        The file `first` in the folder goes before all others, and what is left of an
        interrupted deletion does not count without it. So a folder here keeps then what
        the system does not delete, without an error."""

    def check_room(self, needed_bytes: int) -> None:
        """Raises a failure whose reason is "full" where it is known that so many bytes do
        not fit."""

    def abandoned(self, folder: str) -> bool:
        """Whether no process can be writing into `folder` any more."""
