"""Shards as the ranks of one node read them: checked by the rank that touches a file
first, and, where they stayed in the store below the artifact root, fetched ahead and
removed afterwards.

What the ranks share are two folders: `marks`, which an attempt starts without, where a
rank holds `SHA256.checked` locked while it fetches and checks a file, and `cache` with
the fetched files."""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from rekindle.data.manifest import SHARD, Shards, check_shard, open_shard, whole_manifest
from rekindle.data.store import PieceStore
from rekindle.errors import DataError, RequestError
from rekindle.formats import size
from rekindle.records import ShardFile
from rekindle.spec.identity import file_sha256

_AT_ONCE = 16  # requests, each of which waits for the store
log = logging.getLogger(__name__)


def shared_shards(folder: Path, marks: Path, cache: Path, store: str) -> Shards:
    """The shards of `folder`, or, where its manifest has `disk_bytes`, those that it
    names of `store`, a path or URI. Raises DataError, also later, for what the manifest
    did not promise."""
    reading = _Reading(folder, marks, cache, store)
    hashes = reading.hashes if reading.away else None
    return Shards(folder, reading.manifest, reading.read, reading.expect, hashes)


class _Reading:
    def __init__(self, folder: Path, marks: Path, cache: Path, store: str) -> None:
        self.manifest = whole_manifest(folder)
        self.away = PieceStore(store) if self.manifest.disk_bytes else None
        self.marks = marks
        self.files = cache if self.away else folder
        for path in (self.marks, self.files):
            path.mkdir(parents=True, exist_ok=True)
        self._needed: dict[str, dict[str, ShardFile]] = {}

    def read(self, shard: ShardFile) -> pa.Table:
        with self._whole(shard) as path:
            return open_shard(path, shard, self.manifest)

    def expect(self, now: Sequence[ShardFile], soon: Sequence[ShardFile]) -> None:
        """Fetch the files of `now`, start on those of `soon`,
        and remove others of the split."""
        split = now[0].split
        before = self._needed.get(split, {})
        needed = {file.path: file for file in [*now, *soon]}
        self._needed[split] = needed
        if self.away is not None:
            needed_bytes = 0
            for files in self._needed.values():
                needed_bytes += sum(file.bytes for file in files.values())
            if needed_bytes > self.manifest.disk_bytes:
                read = "shards that are read at a time, and in the next window,"
                raise RequestError(
                    f"{read} have {size(needed_bytes)}",
                    where="data.disk_gb",
                    fix="raise data.disk_gb, or lower data.shuffle_gb or data.shard_rows",
                )
            for name in set(before) - set(needed):
                (self.files / name).unlink(missing_ok=True)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        start = int(os.environ.get("LOCAL_RANK", "0")) * len(now) // ranks
        # each begins elsewhere, so that the ranks of a node divide the work
        self._fetch_all([*now[start:], *now[:start]])
        threading.Thread(target=self._fetch_ahead, args=(soon,), daemon=True).start()

    def hashes(self, files: Sequence[ShardFile]) -> Iterator[pa.ChunkedArray]:
        """Of shards in the store, without the rest of them."""
        assert self.away is not None
        column = self.away.column
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from pool.map(lambda file: column(file.key, SHARD, "hash"), files)

    def _fetch_ahead(self, files: Sequence[ShardFile]) -> None:
        try:
            self._fetch_all(files)
        except Exception as error:  # noqa: BLE001 - drivers raise their own; raised when needed
            log.warning("shards could not be read ahead: %s", error)

    def _fetch_all(self, files: Sequence[ShardFile]) -> None:
        for file in files:
            with self._whole(file):
                pass

    def _fetch(self, store: PieceStore, shard: ShardFile, path: Path) -> None:
        draft = path.with_name(f".{path.name}")
        draft.unlink(missing_ok=True)
        try:
            store.take(shard.key, SHARD, shard.sha256, draft)
        except DataError as error:
            fix = "rerun the step `shard`, which makes it again: `rekindle run CONFIG --from shard`"
            (problem,) = error.problems
            raise DataError(problem.what, where=problem.where, fix=fix) from None
        draft.replace(path)

    @contextlib.contextmanager
    def _whole(self, shard: ShardFile) -> Iterator[Path]:
        """The path of a file that is fetched and checked."""
        path = self.files / shard.path
        with (self.marks / f"{shard.sha256}.checked").open("a+") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX)
            is_checked = os.fstat(mark.fileno()).st_size > 0
            if self.away is not None:
                # a file of an attempt before is as good as one that is fetched
                is_whole = path.is_file() and (is_checked or file_sha256(path) == shard.sha256)
                if not is_whole:
                    self._fetch(self.away, shard, path)
                    mark.truncate(0)
                    is_checked = False
            if not is_checked:
                check_shard(path, shard)
                mark.write("whole")
                mark.flush()
            yield path
