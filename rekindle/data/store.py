"""Where pieces of data wait for a step: a folder, or an object store for all workers.

An entry is a few files and `entry.json`, which comes last and is the commit. Where it is
missing or damaged, or a file of the entry is, the entry counts as missing and is made
again; of files in an object store only the presence is looked at then, and the hash when
they are fetched. The files of one key have the same bytes, whichever worker makes them,
so two workers may write the same entry to an object store.

In a folder entries are made in place and taken by hard links, and a rename commits all
files of one: a corpus is neither copied within a disk nor seen while it is half there. So
entries in a folder are handled here; object stores, and what is small, go through
`storage/`."""

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

import pyarrow as pa

from rekindle.errors import DataError
from rekindle.spec.identity import digest, file_sha256
from rekindle.storage import Folder, about, storage_of

log = logging.getLogger(__name__)

_ENTRY = "entry.json"
# the folders of entries of object stores that this process has fetched, by key
_FETCHED: dict[str, Path] = {}


class PieceStore:
    """The entries below `root`, a path or an fsspec URI."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._storage = storage_of(root, about("the pieces of data"))
        self._folder: Path | None = None
        """The folder of the entries; None for an object store."""
        if isinstance(self._storage, Folder):
            self._folder = self._storage.path.absolute()

    def find(self, key: str) -> dict[str, Any] | None:
        """The entry of a key, as `commit` returned it; None where it counts as missing."""
        entry = self._entry(key)
        if entry is None:
            return None
        for name, sha256 in entry["files"].items():
            if not self._is_whole(key, name, sha256):
                log.warning("%s/%s/%s is damaged, and is made again", self.root, key, name)
                return None
        return entry

    def _is_whole(self, key: str, name: str, sha256: str) -> bool:
        """Whether a file of an entry is there, and in a folder has the right bytes."""
        if self._folder is None:
            return self._storage.size(f"{key}/{name}") is not None
        path = self._folder / key / name
        return path.is_file() and file_sha256(path) == sha256

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        """A folder on this machine for the files of an entry, to be given to `commit`.

        What was not committed is removed afterwards."""
        if self._folder is None:
            with tempfile.TemporaryDirectory() as scratch:
                yield Path(scratch)
            return
        # a name of its own: several workers may make the same entry
        draft = self._folder / f"{key}-{uuid.uuid4().hex[:8]}"
        draft.mkdir(parents=True)
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def commit(self, key: str, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
        """Store the files of `folder`, which `writing` gave, as an entry; returns the
        entry: the facts about the files and, as `files`, the hash of each."""
        files = sorted(folder.iterdir())
        entry = {**facts, "files": {file.name: file_sha256(file) for file in files}}
        text = json.dumps(entry)
        content = json.dumps([digest(text), text]).encode()
        if self._folder is not None:
            (folder / _ENTRY).write_bytes(content)
            target = self._folder / key
            # a damaged entry, such as one of a disk that was full
            if target.exists() and self.find(key) is None:
                shutil.rmtree(target, ignore_errors=True)
            try:
                folder.rename(target)
            except OSError:
                if not target.exists():
                    raise  # else another worker was faster
            return entry
        self._storage.upload(folder, key)
        # last: until it is there, the entry is not
        self._storage.put(f"{key}/{_ENTRY}", content)
        return entry

    def take(self, key: str, name: str, sha256: str, target: Path) -> None:
        """Put a file of an entry at `target`, by a hard link if possible. `find` or
        `commit` gave its `sha256`. Raises DataError where it is missing, or arrives with
        other bytes."""
        if self._folder is None:
            if not self._storage.download(f"{key}/{name}", target):
                raise self._fault(key, name, "is missing")
            if file_sha256(target) != sha256:
                target.unlink()
                raise self._fault(key, name, "has other bytes than when it was written")
            return
        source = self._folder / key / name
        try:
            try:
                os.link(source, target)
            except OSError:  # another file system
                shutil.copyfile(source, target)
        except FileNotFoundError:
            raise self._fault(key, name, "is missing") from None

    def _fault(self, key: str, name: str, fault: str) -> DataError:
        fix = f"remove {self.root}/{key}, and run the same command again"
        return DataError(f"the piece {name} {fault}", where=f"{self.root}/{key}", fix=fix)

    def column(self, key: str, name: str, column: str) -> pa.ChunkedArray:
        """One column of an Arrow file of an entry; its other bytes are not read."""
        # Reading ahead would fetch what lies between the parts of the column.
        with self._storage.reader(f"{key}/{name}", ahead=False) as file:
            field = pa.ipc.open_file(pa.PythonFile(file, "r")).schema.get_field_index(column)
            options = pa.ipc.IpcReadOptions(included_fields=[field])
            table = pa.ipc.open_file(pa.PythonFile(file, "r"), options=options).read_all()
            return table.column(column)

    def part(self, key: str, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` to `end` of a file of an entry."""
        if end <= start:
            return b""
        content = self._storage.read(f"{key}/{name}", start, end)
        if content is None:
            raise self._fault(key, name, "is missing")
        return content

    @contextlib.contextmanager
    def reading(self, key: str, name: str) -> Iterator[Path]:
        """A file of an entry on this machine: the one in the folder, or a copy from the
        object store that is removed afterwards. Raises DataError where it is damaged."""
        sha256 = self._hashes(key).get(name, "")
        with tempfile.TemporaryDirectory() as scratch:
            if self._folder is None:
                path = Path(scratch, name)
                self.take(key, name, sha256, path)
            else:
                path = self._folder / key / name
                if not self._is_whole(key, name, sha256):
                    fix = "run again: it is made again"
                    raise DataError(f"the piece {name} is damaged", where=str(path), fix=fix)
            yield path

    def share(self, path: Path) -> str:
        """Store a file, or the files of a folder, for workers on other machines; returns
        the key of the entry."""
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        key = digest([[file.name, file_sha256(file)] for file in files])
        if self.find(key) is None:
            with self.writing(key) as folder:
                for file in files:
                    shutil.copyfile(file, folder / file.name)
                self.commit(key, folder, {})
        return key

    def shared(self, key: str) -> Path:
        """A folder on this machine with the files of an entry that `share` stored. A
        process fetches it once."""
        if self._folder is not None:
            return self._folder / key
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
        """Store the result of item `number` of the work, for the other nodes."""
        self._storage.put(f"{work}/{number}", json.dumps(value).encode())

    def answered(self, work: str) -> set[int]:
        """The numbers of the items whose results are there."""
        # files that are still being written have other names than numbers
        return {int(name) for name in self._storage.files(work) if name.isdecimal()}

    def answers(self, work: str, count: int) -> list[Any]:
        """The results of all items, in order."""
        return [json.loads(self._storage.read(f"{work}/{n}") or b"null") for n in range(count)]

    def _entry(self, key: str) -> dict[str, Any] | None:
        """What `entry.json` of a key holds; None where it is missing or damaged."""
        with contextlib.suppress(ValueError, TypeError):
            sha256, text = json.loads(self._storage.read(f"{key}/{_ENTRY}") or b"")
            if digest(text) == sha256:
                return dict(json.loads(text))
        return None

    def _hashes(self, key: str) -> Mapping[str, str]:
        """The hash of each file of an entry."""
        entry = self._entry(key)
        return entry["files"] if entry else {}


Entry = Mapping[str, Any]


def made_once(make: Callable[..., dict[str, Any]]) -> Callable[[Entry, Entry], Entry]:
    """Make a function for executors, which returns the entry of an item in the order's
    store, and as `new` whether it was made for this call.

    Where the entry is missing, `make(order, item, store, folder)` writes its files into
    the folder and returns facts about them."""

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
