"""What a folder of shards promises, checked before anything trains on it.

Every file that `manifest.json` names must be of the size and SHA-256 it states, and hold
the rows it states. Files are memory-mapped, so that all ranks of a machine share one
copy. Row numbers count through the shards of a split in the manifest's order."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pydantic

from rekindle.data.order import Indices, SampleOrder, best_fit
from rekindle.errors import DataError
from rekindle.records import SCHEMA_VERSION, ShardFile, ShardManifest
from rekindle.spec.identity import digest, file_sha256

MANIFEST = "manifest.json"
ASSETS = "assets"
SHARD = "shard.arrow"
_AGAIN = "delete the folder and run the step `shard` again"
_OPEN = 4_096  # mapped at once: Linux allows a process 65,530 maps
Expect = Callable[[list[ShardFile], list[ShardFile]], None]
Hashes = Callable[[list[ShardFile]], Iterator[pa.ChunkedArray]]


@dataclasses.dataclass(frozen=True)
class _Open:
    """A mapped shard."""

    table: pa.Table

    @functools.cached_property
    def batches(self) -> list[pa.RecordBatch]:
        return self.table.to_batches()  # type: ignore[no-any-return]

    @functools.cached_property
    def starts(self) -> Indices:
        return np.cumsum([0, *(len(batch) for batch in self.batches)])

    @functools.cached_property
    def lengths(self) -> Indices:
        return row_tokens(self.table)

    @functools.cached_property
    def targets(self) -> Indices:
        return row_targets(self.table)

    @functools.cached_property
    def labels(self) -> Indices:
        return np.asarray(self.table.column("label"), np.int64)


class Shards:
    """The shards of a folder; `take("train", [5, 0])` gives rows 5 and 0 in this order.

    `read` maps a shard that is whole, or raises DataError; it is asked when a row of the
    shard is needed first. `expect` learns which shards of a split are read from now on,
    and which next."""

    def __init__(
        self,
        folder: Path,
        manifest: ShardManifest,
        read: Callable[[ShardFile], pa.Table],
        expect: Expect = lambda now, soon: None,
        hashes: Hashes | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self._expect = expect
        self._hashes = hashes or (lambda files: (read(file).column("hash") for file in files))
        self._files: dict[str, list[ShardFile]] = {split: [] for split in manifest.rows}
        for file in manifest.shards:
            self._files.setdefault(file.split, []).append(file)
        self._starts = dict[str, Indices]()
        for split, files in self._files.items():
            self._starts[split] = np.cumsum([0, *(file.rows for file in files)])

        def open_table(split: str, number: int) -> _Open:
            return _Open(read(self._files[split][number]))

        self._opened = functools.lru_cache(_OPEN)(open_table)

    @classmethod
    def of_tables(
        cls, folder: Path, manifest: ShardManifest, tables: Mapping[str, pa.Table]
    ) -> "Shards":
        """Shards in memory, one for each split that has rows."""
        rows = {split: len(table) for split, table in tables.items()}
        files = list[ShardFile]()
        for split, count in rows.items():
            if count:
                file = ShardFile(path="", split=split, rows=count, tokens=0, bytes=0, sha256="")
                files.append(file)
        in_memory = manifest.model_copy(update={"shards": tuple(files), "rows": rows})
        return cls(folder, in_memory, lambda file: tables[file.split])

    @property
    def assets(self) -> Path:
        return self.folder / ASSETS

    def rows(self, split: str) -> int:
        return int(self._starts[split][-1]) if split in self._starts else 0

    def tables(self, split: str) -> Iterator[pa.Table]:
        """Shard after shard, memory-mapped."""
        return (self._opened(split, i).table for i in range(len(self._files[split])))

    def table(self, split: str) -> pa.Table:
        """All rows of the split, memory-mapped."""
        return pa.concat_tables(self.tables(split))

    def hashes(self, split: str) -> Iterator[pa.ChunkedArray]:
        """The hashes of all examples, shard after shard."""
        return self._hashes(self._files[split])

    def take(self, split: str, indices: npt.ArrayLike) -> pa.Table:
        """The rows with these numbers, in this order.
        Raises IndexError beyond the last."""
        pieces = list[pa.RecordBatch]()
        places = [np.empty(0, np.int64)]
        for shard, shard_places, rows in self._by_shard(split, indices):
            places.append(shard_places)
            # batch by batch, so that nothing is copied but the rows that are taken
            cuts = [0, *np.searchsorted(rows, shard.starts[1:-1]).tolist(), len(rows)]
            for batch, (start, end) in enumerate(itertools.pairwise(cuts)):
                if start < end:
                    rows_of_batch = pa.array(rows[start:end] - shard.starts[batch])
                    pieces.append(shard.batches[batch].take(rows_of_batch))
        if not pieces:
            return self._opened(split, 0).table.slice(0, 0)
        in_asked_order = pa.array(np.argsort(np.concatenate(places)))
        return pa.Table.from_batches(pieces).combine_chunks().take(in_asked_order)

    def lengths(self, split: str, indices: npt.ArrayLike | None = None) -> Indices:
        """Tokens of these rows, or of all; ones where the task has no `input_ids`."""
        return self._look_up(split, indices, "lengths")

    def targets(self, split: str, indices: npt.ArrayLike | None = None) -> Indices:
        """Predictions that these rows, or all, ask for; see `row_targets`."""
        return self._look_up(split, indices, "targets")

    def longest(self, split: str) -> int:
        """Tokens of the longest row."""
        longest = 0
        for number, file in enumerate(self._files[split]):
            # shards in memory do not say it
            in_shard = file.longest or int(self._opened(split, number).lengths.max())
            longest = max(longest, in_shard)
        return longest if self._files[split] else 1

    def order(
        self,
        split: str,
        *,
        global_batch_size: int,
        seed: int,
        by_length: bool = False,
        pack_length: int | None = None,
        balanced: bool = False,
    ) -> SampleOrder:
        """The order in which a training goes through a split; see `SampleOrder`."""
        files = self._files[split]
        window_bytes = self.manifest.shuffle_bytes
        windows = 1
        if window_bytes:
            windows = -(-sum(file.bytes for file in files) // window_bytes)
        sequences = list[int]()
        if pack_length:
            for number, file in enumerate(files):
                count = file.sequences
                if not count:
                    _, count = best_fit(self._opened(split, number).lengths, pack_length)
                sequences.append(count)
        shares = list[float]()
        if self.manifest.drawn and split == "train":
            shares = [source.share for source in self.manifest.sources]

        def of_each(name: str, shards: Indices) -> Indices:
            return np.concatenate([getattr(self._opened(split, int(i)), name) for i in shards])

        return SampleOrder(
            rows=[file.rows for file in files],
            global_batch_size=global_batch_size,
            seed=seed,
            lengths=functools.partial(of_each, "lengths") if by_length or pack_length else None,
            pack_length=pack_length,
            sequences=sequences,
            classes=functools.partial(of_each, "labels") if balanced else None,
            sources=[file.source for file in files],
            shares=shares,
            windows=windows,
            expect=lambda now, soon: self._expect(
                [files[i] for i in now], [files[i] for i in soon]
            ),
        )

    def _by_shard(
        self, split: str, indices: npt.ArrayLike
    ) -> Iterator[tuple[_Open, Indices, Indices]]:
        """Each shard with some of these rows:
        their places, and numbers in it, ascending."""
        numbers = np.asarray(indices, np.int64)
        if not numbers.size:
            return
        if numbers.min() < 0 or numbers.max() >= self.rows(split):
            raise IndexError(f"{split} has rows 0 to {self.rows(split) - 1}")
        order = np.argsort(numbers, kind="stable")
        rows = numbers[order]
        shard_of = np.searchsorted(self._starts[split], rows, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(shard_of)) + 1).tolist(), len(rows)]
        for start, end in itertools.pairwise(cuts):
            shard = int(shard_of[start])
            local = rows[start:end] - self._starts[split][shard]
            yield self._opened(split, shard), order[start:end], local

    def _look_up(self, split: str, indices: npt.ArrayLike | None, name: str) -> Indices:
        """The attribute `name` of shards, which has a value a row,
        of these rows or of all."""
        if indices is None:
            indices = np.arange(self.rows(split))
        values = np.empty(np.shape(indices), np.int64)
        for shard, places, rows in self._by_shard(split, indices):
            values[places] = getattr(shard, name)[rows]
        return values


def open_shards(folder: str | Path) -> Shards:
    """The shards in `folder`, each verified. Raises DataError that names one at fault."""
    folder = Path(folder)
    manifest = whole_manifest(folder)

    def read(shard: ShardFile) -> pa.Table:
        check_shard(folder / shard.path, shard)
        return open_shard(folder / shard.path, shard, manifest)

    shards = Shards(folder, manifest, read)
    schema: pa.Schema | None = None
    for split in manifest.rows:
        for table in shards.tables(split):
            if schema is not None and not table.schema.equals(schema):
                raise _refused(folder / MANIFEST, f"names shards of {split} with other columns")
            schema = table.schema
    return shards


def whole_manifest(folder: Path) -> ShardManifest:
    """The manifest of a folder, if its numbers fit
    together and to the assets; else DataError."""
    manifest = read_manifest(folder)
    path = folder / MANIFEST
    if not manifest.shards:
        raise _refused(path, "names no shards")
    rows = dict.fromkeys(manifest.rows, 0)
    for file in manifest.shards:
        # a manifest is data, and may be of another machine: it names files of its folder
        if Path(file.path).is_absolute() or ".." in Path(file.path).parts:
            raise _refused(path, f"names a file outside of its folder: {file.path}")
        rows[file.split] = rows.get(file.split, 0) + file.rows
    if rows != dict(manifest.rows):
        raise _refused(path, f"promises {dict(manifest.rows)} rows, and the shards hold {rows}")
    # which binds the shards to their order, too
    if digest([file.examples for file in manifest.shards]) != manifest.examples:
        raise _refused(path, "was made for other examples than the shards hold")
    if folder_fingerprint(folder / ASSETS) != manifest.tokenizer:
        raise _refused(folder / ASSETS, "has other files than when the shards were written")
    return manifest


def read_manifest(folder: Path) -> ShardManifest:
    """The manifest of a folder. Raises DataError if it is missing, or cannot be read."""
    path = folder / MANIFEST
    try:
        content: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _refused(path, "is missing, so the shards were never completed") from None
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read: {error}") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        fault = f"has schema version {version!r}, and this rekindle reads {SCHEMA_VERSION}"
        raise _refused(path, fault)
    try:
        return ShardManifest.model_validate(content)
    except pydantic.ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(str(part) for part in detail["loc"])
        raise _refused(path, f"is not a manifest: {where}: {detail['msg']}") from None


def row_tokens(table: pa.Table) -> npt.NDArray[np.int64]:
    """Tokens of each row: the length of `input_ids`;
    ones where there is no such column."""
    return _of_lists(table, "input_ids", lambda lists: lists.value_lengths())


def row_targets(table: pa.Table) -> npt.NDArray[np.int64]:
    """Predictions of each row: supervised tokens
    but a first one, placed words, or one."""
    if "places" in table.schema.names:
        return _of_lists(table, "places", _placed)
    return _of_lists(table, "supervised", _supervised)


def _of_lists(
    table: pa.Table, name: str, count: Callable[[pa.ListArray], npt.ArrayLike]
) -> npt.NDArray[np.int64]:
    """What `count` says of each list in a column; ones where there is no such column."""
    if name not in table.schema.names:
        return np.ones(len(table), np.int64)
    parts = [np.asarray(count(chunk), np.int64) for chunk in table.column(name).chunks]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _placed(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    """How many words of each list have a place; the others were cut off."""
    return list_sums(lists, np.asarray(lists.flatten()) >= 0)


def _supervised(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    """The sum of each list without its first value."""
    marks = np.array(lists.flatten(), np.int64)
    lengths = np.asarray(lists.value_lengths(), np.int64)
    starts = np.cumsum(lengths) - lengths
    marks[starts[lengths > 0]] = 0
    return list_sums(lists, marks)


def list_sums(lists: pa.Array, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The sum of the `values` of each list, which stand one list after the other."""
    # a null has no values, and the sum 0
    ends = np.cumsum(np.asarray(lists.value_lengths().fill_null(0), np.int64))
    running = np.append(np.int64(0), np.cumsum(values))
    sums: npt.NDArray[np.int64] = np.diff(running[ends], prepend=np.int64(0))
    return sums


def folder_fingerprint(folder: Path) -> str:
    """Hash over the files in a folder, names and bytes; empty where there are none."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    named = [[file.relative_to(folder).as_posix(), file_sha256(file)] for file in files]
    return digest(named) if named else ""


def check_shard(path: Path, shard: ShardFile) -> None:
    """Raises DataError unless the file is the one that the manifest means."""
    if not path.is_file():
        raise _refused(path, "is missing")
    size = path.stat().st_size
    if size != shard.bytes:  # before the hash, which reads all of it
        raise _refused(path, f"has {size} bytes and not the {shard.bytes} of its manifest")
    if file_sha256(path) != shard.sha256:
        raise _refused(path, "has other bytes than when it was written (SHA-256 differs)")


def open_shard(path: Path, shard: ShardFile, manifest: ShardManifest) -> pa.Table:
    """A shard that `check_shard` found whole, memory-mapped; raises DataError."""
    try:
        # mapped, so that the ranks of a machine share one copy
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as error:
        raise _refused(path, f"is not an Arrow file: {error}") from None
    if len(table) != shard.rows or not len(table):
        raise _refused(path, f"holds {len(table)} rows and not the {shard.rows} of its manifest")
    columns = {"id", "hash"}
    if manifest.labels:
        columns.add("label")
    missing = columns - set(table.schema.names)
    if missing:
        raise _refused(path, f"has no column {', '.join(sorted(missing))}")
    return table


def _refused(path: Path, fault: str) -> DataError:
    return DataError(f"{path.name} {fault}", where=str(path), fix=_AGAIN)
