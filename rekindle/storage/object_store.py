"""A storage under a prefix of an object store, through its fsspec driver.

A store has neither renames nor locks. It commits by a put that fails when the object
exists, and a request that fails is repeated a few times with growing pauses."""

import contextlib
import datetime as dt
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import fsspec

from rekindle.errors import RekindleError
from rekindle.storage.folder import files_below
from rekindle.storage.protocol import Action, Explain, Failure, about, reason_of

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_SECONDS = (1.0, 4.0, 15.0)  # between the tries of one request to a store
PART_BYTES = 32 << 20  # of an upload in parts, and of reading ahead
DEAD_AFTER = dt.timedelta(hours=24)  # an upload this old has no living attempt behind it


class ObjectStore:
    """The objects below a prefix; see `Storage`."""

    def __init__(self, uri: str, explain: Explain | None = None) -> None:
        self.root = uri.rstrip("/")
        self.explain = explain or about("the files")
        try:
            # a listing from a cache would hide what another machine did
            self.fs, path = fsspec.core.url_to_fs(self.root, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise self.explain(Failure(uri, "", "open", "other", error)) from None
        self.prefix = str(path).rstrip("/")

    def folders(self) -> list[str]:
        def list_entries() -> list[dict[str, Any]]:
            return list(self.fs.ls(self.prefix, detail=True))

        names = []
        for entry in self._unless_missing("list", "", list_entries) or []:
            if entry["type"] == "directory":
                names.append(entry["name"].rstrip("/").rpartition("/")[2])
        return names

    def files(self, folder: str = "") -> dict[str, int]:
        top = self._path(folder)

        def find() -> dict[str, int]:
            sizes = {}
            for name, entry in self.fs.find(top, detail=True).items():
                # some drivers list a file that is named itself without its size
                info = entry or self.fs.info(name)
                sizes[name.removeprefix(top).lstrip("/")] = int(info["size"])
            return sizes

        return self._unless_missing("list", folder, find) or {}

    def size(self, path: str) -> int | None:
        def ask() -> int:
            return int(self.fs.info(self._path(path))["size"])

        return self._unless_missing("read", path, ask)

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes | None:
        def fetch() -> bytes:
            return bytes(self.fs.cat_file(self._path(path), start=start, end=end))

        return self._unless_missing("read", path, fetch)

    @contextlib.contextmanager
    def reader(self, path: str, *, ahead: bool = True) -> Iterator[BinaryIO]:
        cache: dict[str, str] = {} if ahead else {"cache_type": "none"}

        def open_file() -> Any:
            return self.fs.open(self._path(path), "rb", block_size=PART_BYTES, **cache)

        patiently = functools.partial(self._patiently, "read", path)
        with patiently(open_file) as file:
            yield _PatientFile(file, patiently)  # type: ignore[misc]

    def write(
        self, path: str, produce: Callable[[BinaryIO], T], total_bytes: int | None = None
    ) -> T:
        def send() -> T:
            file = self.fs.open(self._path(path), "wb", block_size=PART_BYTES)
            try:
                result = produce(file)
            except BaseException:
                file.discard()  # closing it would leave half of it under its name
                raise
            file.close()
            return result

        return self._patiently("write", path, send)

    def put(self, path: str, content: bytes, mode: int = 0o666) -> None:
        def send() -> None:
            self.fs.pipe_file(self._path(path), content)

        self._patiently("write", path, send)

    def put_new(self, path: str, content: bytes, total_bytes: int | None = None) -> None:
        def send() -> None:
            try:
                self.fs.pipe_file(self._path(path), content, mode="create")
            except FileExistsError as error:
                # perhaps by the try before, whose answer was lost
                if self.fs.cat_file(self._path(path)) != content:
                    failure = Failure(self.root, path, "write", "exists", error)
                    raise self.explain(failure) from None

        self._patiently("write", path, send)

    def upload(self, source: Path, path: str) -> None:
        targets = {}
        for file in files_below(source):
            name = "" if file == source else f"/{file.relative_to(source).as_posix()}"
            targets[str(file)] = self._path(path) + name

        def send() -> None:
            self.fs.put(list(targets), list(targets.values()))

        if targets:
            self._patiently("write", path, send)

    def download(self, path: str, target: Path) -> bool:
        # asked first: a file may be read where nothing may be listed
        names = [""] if self.fs.isfile(self._path(path)) else list(self.files(path))
        for name in names:
            if ".." in name.split("/"):  # a key may have any characters; a path has steps
                error = ValueError(f"the name {name} leads out of the folder")
                raise self.explain(Failure(self.root, path, "read", "other", error))

        def fetch() -> None:
            sources = []
            copies = []
            for name in names:
                # "" is the file at the path itself
                sources.append(self._path(path) + (f"/{name}" if name else ""))
                copies.append(target / name if name else target)
            for copy in copies:
                copy.parent.mkdir(parents=True, exist_ok=True)
            self.fs.get(sources, [str(copy) for copy in copies])

        if names:
            self._patiently("read", path, fetch)
        return bool(names)

    def remove_file(self, path: str) -> None:
        def delete() -> None:
            self.fs.rm_file(self._path(path))

        self._unless_missing("remove", path, delete)

    def remove(self, path: str, first: str = "") -> None:
        def delete() -> None:
            names = self.fs.find(self._path(path))
            names.sort(key=lambda name: not (first and name.endswith(f"/{first}")))
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # by another process
                    self.fs.rm_file(name)

        with contextlib.suppress(FileNotFoundError):
            self._patiently("remove", path, delete)

    def check_room(self, needed_bytes: int) -> None:
        """Stores are as large as the bill."""

    def abandoned(self, folder: str) -> bool:
        def latest_changes() -> list[dt.datetime]:
            return [self.fs.modified(path) for path in self.fs.find(self._path(folder))]

        dead_before = dt.datetime.now(dt.UTC) - DEAD_AFTER
        for changed_at in self._patiently("list", folder, latest_changes):
            if changed_at.tzinfo is None:  # some drivers give times of UTC that do not say so
                changed_at = changed_at.replace(tzinfo=dt.UTC)
            if changed_at >= dead_before:
                return False
        return True

    def _path(self, path: str) -> str:
        return f"{self.prefix}/{path}" if path else self.prefix

    def _unless_missing(self, action: Action, path: str, request: Callable[[], T]) -> T | None:
        with contextlib.suppress(FileNotFoundError):
            return self._patiently(action, path, request)
        return None

    def _patiently(self, action: Action, path: str, request: Callable[[], T]) -> T:
        """Do it, with retries if need be; what a retry cannot solve is raised at once.

        FileNotFoundError is an answer where something is read, and a failure of what
        writes: the bucket is missing."""
        for pause in (*PAUSES_SECONDS, None):
            try:
                return request()
            except RekindleError:
                raise
            except Exception as error:  # drivers raise their SDK's own errors, of no common kind
                reason = reason_of(error)
                if reason == "missing" and action != "write":
                    raise
                if pause is None or reason != "other":
                    raise self.explain(Failure(self.root, path, action, reason, error)) from error
                log.warning("%s: %s; trying again in %g s", self.root, error, pause)
                time.sleep(pause)
        raise AssertionError  # the last round returns or raises


class _PatientFile:
    """A file of a store, whose reads are tried again."""

    closed = False

    def __init__(self, file: Any, patiently: Callable[[Callable[[], Any]], Any]) -> None:
        self.file = file
        self.patiently = patiently

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self.file.seek(offset, whence))

    def tell(self) -> int:
        return int(self.file.tell())

    def read(self, size: int = -1) -> bytes:
        start = self.file.tell()

        def again() -> bytes:
            self.file.seek(start)
            return bytes(self.file.read(size))

        return bytes(self.patiently(again))
