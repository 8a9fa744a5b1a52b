"""Where pieces of data wait for a step: a folder, or an object store for all workers.

An entry is a few files and `entry.json`, which comes last and is the commit. An entry
without it, with a damaged one, without a file, or with a damaged file here, is not there,
and is made again. A folder commits by a rename; the files of one key have the same bytes,
whichever worker makes them, so a store takes repeated writes. Whole files from elsewhere
are checked against their hash."""

import atexit
import contextlib
import functools
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from rekindle.errors import DataError
from rekindle.records import write_atomically
from rekindle.spec.identity import digest, file_sha256

log = logging.getLogger(__name__)

_ENTRY = "entry.json"
# entries of stores elsewhere that this process has fetched, by key
_FETCHED: dict[str, Path] = {}


class PieceStore:
    """The entries below `root`, a path or an fsspec URI."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._fs, self._path = fsspec.url_to_fs(root)
        self._here = isinstance(self._fs, LocalFileSystem)

    def find(self, key: str) -> dict[str, Any] | None:
        """What was committed with the entry; None where there is none."""
        entry = self._entry(key)
        if entry is None:
            return None
        for name, sha256 in entry["files"].items():
            path = f"{self._path}/{key}/{name}"
            if not self._fs.isfile(path) or (self._here and file_sha256(Path(path)) != sha256):
                log.warning("%s is damaged, and is made again", path)
                return None
        return entry

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        """A folder here whose files `commit` makes
        those of the entry; removed afterwards."""
        if not self._here:
            with tempfile.TemporaryDirectory() as scratch:
                yield Path(scratch)
            return
        # a name of its own: several workers may make the same entry
        draft = Path(self._path, f"{key}-{uuid.uuid4().hex[:8]}")
        draft.mkdir(parents=True)
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def commit(self, key: str, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
        """Store the files of `folder`, which `writing` gave, with facts about them, and
        the hash of each as `files`; returns the whole entry."""
        files = sorted(folder.iterdir())
        entry = {**facts, "files": {file.name: file_sha256(file) for file in files}}
        text = json.dumps(entry)
        content = json.dumps([digest(text), text]).encode()
        if self._here:
            (folder / _ENTRY).write_bytes(content)
            target = Path(self._path, key)
            # a damaged entry, such as one of a disk that was full
            if target.exists() and self.find(key) is None:
                shutil.rmtree(target, ignore_errors=True)
            try:
                folder.rename(target)
            except OSError:
                if not target.exists():
                    raise  # else another worker was faster
            return entry
        for file in files:
            self._fs.put_file(str(file), f"{self._path}/{key}/{file.name}")
        # last: until it is there, the entry is not
        self._fs.pipe_file(f"{self._path}/{key}/{_ENTRY}", content)
        return entry

    def take(self, key: str, name: str, sha256: str, target: Path) -> None:
        """Put a file of an entry, which `find` or `commit` gave, at `target`, by a link
        where that goes; raises DataError where it is missing, or arrives with other
        bytes."""
        source = f"{self._path}/{key}/{name}"
        try:
            if not self._here:
                self._fs.get_file(source, str(target))
            else:
                try:
                    os.link(source, target)
                except OSError:  # another file system
                    shutil.copyfile(source, target)
            if self._here or file_sha256(target) == sha256:
                return
            fault = "has other bytes than when it was written"
        except FileNotFoundError:
            fault = "is missing"
        target.unlink(missing_ok=True)
        fix = f"remove {self.root}/{key}, and run the same command again"
        raise DataError(f"the piece {name} {fault}", where=f"{self.root}/{key}", fix=fix)

    def column(self, key: str, name: str, column: str) -> pa.ChunkedArray:
        """One column of an Arrow file of an entry; its other bytes are not read."""
        # without a cache, which would read ahead
        # what lies between the parts of the column
        with self._fs.open(f"{self._path}/{key}/{name}", "rb", cache_type="none") as file:
            field = pa.ipc.open_file(file).schema.get_field_index(column)
            options = pa.ipc.IpcReadOptions(included_fields=[field])
            return pa.ipc.open_file(file, options=options).read_all().column(column)

    def part(self, key: str, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` to `end` of a file of an entry."""
        if end <= start:
            return b""
        path = f"{self._path}/{key}/{name}"
        return bytes(self._fs.cat_file(path, start=start, end=end))

    @contextlib.contextmanager
    def reading(self, key: str, name: str) -> Iterator[Path]:
        """A file of an entry, here; from elsewhere a copy, as `take` makes it."""
        sha256 = self._hashes(key).get(name, "")
        with tempfile.TemporaryDirectory() as scratch:
            folder = f"{self._path}/{key}" if self._here else scratch
            path = Path(folder, name)
            if not self._here:
                self.take(key, name, sha256, path)
            elif not path.is_file() or file_sha256(path) != sha256:
                fix = "run again: it is made again"
                raise DataError(f"the piece {name} is damaged", where=str(path), fix=fix)
            yield path

    def share(self, path: Path) -> str:
        """The key under which workers elsewhere find a file, or the files of a folder."""
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        key = digest([[file.name, file_sha256(file)] for file in files])
        if self.find(key) is None:
            with self.writing(key) as folder:
                for file in files:
                    shutil.copyfile(file, folder / file.name)
                self.commit(key, folder, {})
        return key

    def shared(self, key: str) -> Path:
        """A folder here with the files of an entry, which this process fetches once."""
        if self._here:
            return Path(self._path, key)
        if key not in _FETCHED:
            folder = Path(tempfile.mkdtemp(prefix="rekindle-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            entry = self.find(key)
            hashes = entry["files"] if entry else {}
            for name, sha256 in hashes.items():
                self.take(key, name, sha256, folder / name)
            _FETCHED[key] = folder
        return _FETCHED[key]

    def answer(self, work: str, number: int, value: Any) -> None:
        """Put the result of item `number` where the other nodes find it."""
        path = f"{self._path}/{work}/{number}"
        if self._here:
            write_atomically(path, json.dumps(value))
        else:
            self._fs.makedirs(f"{self._path}/{work}", exist_ok=True)
            self._fs.pipe_file(path, json.dumps(value).encode())

    def answered(self, work: str) -> set[int]:
        """The items whose results are there."""
        path = f"{self._path}/{work}"
        # other nodes write there
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            numbers = set[int]()
            for answer_path in self._fs.ls(path, detail=False):
                name = str(answer_path).rsplit("/", 1)[-1]
                if name.isdecimal():  # a draft is not
                    numbers.add(int(name))
            return numbers
        return set()

    def answers(self, work: str, count: int) -> list[Any]:
        """The results of all items, in order."""
        return [json.loads(self._read(f"{work}/{n}") or b"null") for n in range(count)]

    def _entry(self, key: str) -> dict[str, Any] | None:
        """What an entry's commit says; None where there is none, or it is damaged."""
        with contextlib.suppress(ValueError, TypeError):
            sha256, text = json.loads(self._read(f"{key}/{_ENTRY}") or b"")
            if digest(text) == sha256:
                return dict(json.loads(text))
        return None

    def _hashes(self, key: str) -> Mapping[str, str]:
        """The hash of each file of an entry."""
        entry = self._entry(key)
        return entry["files"] if entry else {}

    def _read(self, path: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return bytes(self._fs.cat_file(f"{self._path}/{path}"))
        return None


Entry = Mapping[str, Any]


def made_once(make: Callable[..., dict[str, Any]]) -> Callable[[Entry, Entry], Entry]:
    """A function for executors: the entry of an item in the order's store, and whether it
    is `new`. Where it is not there, `make` (of order, item, store and folder) fills the
    folder, and returns facts about its files."""

    @functools.wraps(make)
    def entry(order: Entry, item: Entry) -> Entry:
        store = PieceStore(order["store"])
        key = item["key"]
        existing = store.find(key)
        if existing:
            return {**existing, "new": False}
        with store.writing(key) as folder:
            facts = make(order, item, store, folder)
            return {**store.commit(key, folder, facts), "new": True}

    return entry
