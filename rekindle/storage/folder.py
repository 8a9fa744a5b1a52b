"""A storage in a folder that all machines which use it mount.

A file is committed by a hard link to a draft beside it. What several files make up is
protected by the locks of launch.process, which leave a folder to one attempt at a time."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from rekindle.errors import RekindleError
from rekindle.storage.protocol import Action, Explain, Failure, about, reason_of

T = TypeVar("T")

# what file systems without hard links answer, such as those of gcsfuse, blobfuse and SMB
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_COPY_BYTES = 1 << 20


class Folder:
    """The files below a folder; see `Storage`."""

    def __init__(self, path: Path, explain: Explain | None = None) -> None:
        self.path = path
        self.root = str(path)
        self.explain = explain or about("the files")

    def folders(self) -> list[str]:
        with self._explained("list", ""):
            if not self.path.is_dir():
                return []
            return [entry.name for entry in self.path.iterdir() if entry.is_dir()]

    def files(self, folder: str = "") -> dict[str, int]:
        sizes: dict[str, int] = {}
        top = self.path / folder
        with self._explained("list", folder):
            for file in files_below(top):
                name = "" if file == top else file.relative_to(top).as_posix()
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    sizes[name] = file.stat().st_size
        return sizes

    def size(self, path: str) -> int | None:
        with self._explained("read", path), contextlib.suppress(FileNotFoundError):
            return (self.path / path).stat().st_size
        return None

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes | None:
        with (
            self._explained("read", path),
            contextlib.suppress(FileNotFoundError),
            (self.path / path).open("rb") as file,
        ):
            begin = start or 0
            file.seek(begin)
            return file.read() if end is None else file.read(end - begin)
        return None

    def reader(self, path: str, *, ahead: bool = True) -> BinaryIO:
        return (self.path / path).open("rb")

    def write(
        self, path: str, produce: Callable[[BinaryIO], T], total_bytes: int | None = None
    ) -> T:
        target = self.path / path
        with self._explained("write", path, total_bytes):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb", buffering=_COPY_BYTES) as file:
                result = produce(file)
                file.flush()
                os.fdatasync(file.fileno())
        return result

    def put(self, path: str, content: bytes, mode: int = 0o666) -> None:
        target = self.path / path
        with self._explained("write", path), _draft_of(target, content, mode) as draft:
            draft.replace(target)

    def put_new(self, path: str, content: bytes, total_bytes: int | None = None) -> None:
        target = self.path / path
        with self._explained("write", path, total_bytes):
            if target.exists():  # most often it has been for long, and no draft is needed
                raise self._exists(path)
            with _draft_of(target, content) as draft:
                try:
                    os.link(draft, target)
                except FileExistsError:
                    raise self._exists(path) from None
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    # here two processes at once may both succeed: what keeps others away is
                    # the lock of the process that writes
                    draft.replace(target)
            for folder in (target.parent, self.path):
                _make_names_durable(folder)

    def upload(self, source: Path, path: str) -> None:
        if source.is_file():
            self._copy_in(source, path)
            return
        for file in files_below(source):
            self._copy_in(file, Path(path, file.relative_to(source)).as_posix())

    def _copy_in(self, source: Path, path: str) -> None:
        def copy(target: BinaryIO) -> None:
            with source.open("rb") as file:
                shutil.copyfileobj(file, target, _COPY_BYTES)

        self.write(path, copy)

    def download(self, path: str, target: Path) -> bool:
        source = self.path / path
        with self._explained("read", path):
            files = files_below(source)
            for file in files:
                copy = target / file.relative_to(source)  # itself, where the source is a file
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        return bool(files)

    def remove_file(self, path: str) -> None:
        with self._explained("remove", path):
            (self.path / path).unlink(missing_ok=True)

    def remove(self, path: str, first: str = "") -> None:
        target = self.path / path
        with self._explained("remove", path):
            if first:
                (target / first).unlink(missing_ok=True)
            if target.is_dir():
                shutil.rmtree(target, ignore_errors=bool(first))
            else:
                target.unlink(missing_ok=True)

    def check_room(self, needed_bytes: int) -> None:
        with self._explained("write", ""):
            self.path.mkdir(parents=True, exist_ok=True)
            free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < needed_bytes:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.root)
            failure = Failure(self.root, "", "write", "full", error, needed_bytes, free_bytes)
            raise self.explain(failure)

    def abandoned(self, folder: str) -> bool:
        return True

    def _exists(self, path: str) -> RekindleError:
        error = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return self.explain(Failure(self.root, path, "write", "exists", error))

    @contextlib.contextmanager
    def _explained(
        self, action: Action, path: str, needed_bytes: int | None = None
    ) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            failure = Failure(self.root, path, action, reason_of(error), error, needed_bytes)
            raise self.explain(failure) from error


def files_below(place: Path) -> list[Path]:
    """The file, or all files of the folder, at `place`, in order."""
    if place.is_file():
        return [place]
    return sorted(path for path in place.rglob("*") if path.is_file())


@contextlib.contextmanager
def _draft_of(target: Path, content: bytes, mode: int = 0o666) -> Iterator[Path]:
    """A durable file beside `target`, with a name of its own; removed afterwards."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        # it has its mode from the start: content may be a secret
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _make_names_durable(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing
            raise
    finally:
        os.close(handle)
