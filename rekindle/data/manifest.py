"""What a folder of shards promises, checked before anything trains on it.

Every file that `manifest.json` names must be there, of the size and SHA-256 it states, and hold the
rows it states. Files are memory-mapped, so that all ranks of a machine share one copy. Row numbers
count through the shards of a split in the manifest's order."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pydantic

from rekindle.errors import DataError
from rekindle.records import SCHEMA_VERSION, ShardFile, ShardManifest
from rekindle.spec.identity import digest, file_sha256

MANIFEST = "manifest.json"
ASSETS = "assets"
_AGAIN = "delete the folder and run the step `shard` again"


class Shards:
    """The verified shards of a folder; `take("train", [5, 0])` gives rows 5 and 0 in this order."""

    def __init__(self, folder: Path, manifest: ShardManifest, tables: dict[str, pa.Table]) -> None:
        self.folder, self.manifest = folder, manifest
        self._tables = tables
        self._batches = {split: table.to_batches() for split, table in tables.items()}
        self._starts = {
            split: np.cumsum([0, *(len(batch) for batch in batches)])
            for split, batches in self._batches.items()
        }

    @property
    def assets(self) -> Path:
        return self.folder / ASSETS

    def rows(self, split: str) -> int:
        return len(self._tables[split])

    def table(self, split: str) -> pa.Table:
        """All rows of the split, memory-mapped."""
        return self._tables[split]

    def take(self, split: str, indices: npt.ArrayLike) -> pa.Table:
        """The rows with these numbers, in this order; raises IndexError for one that is not."""
        wanted = np.asarray(indices, np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self.rows(split)):
            raise IndexError(f"{split} has rows 0 to {self.rows(split) - 1}")
        if not wanted.size:
            return self._tables[split].slice(0, 0)
        starts = self._starts[split]
        owner = np.searchsorted(starts, wanted, side="right") - 1
        by_owner = np.argsort(owner, kind="stable")
        pieces = []
        for i in np.unique(owner):
            mine = wanted[by_owner[owner[by_owner] == i]] - starts[i]
            pieces.append(self._batches[split][i].take(pa.array(mine)))
        return pa.Table.from_batches(pieces).combine_chunks().take(pa.array(np.argsort(by_owner)))

    def lengths(self, split: str) -> npt.NDArray[np.int64]:
        """Tokens of each row; ones where the task has no `input_ids`."""
        return row_tokens(self._tables[split])

    def targets(self, split: str) -> npt.NDArray[np.int64]:
        """Predictions a row asks for: supervised tokens but a first one, placed words, or one."""
        table = self._tables[split]
        if "places" in table.schema.names:
            return _of_lists(table, "places", _placed)
        return _of_lists(table, "supervised", _supervised)


def open_shards(folder: str | Path) -> Shards:
    """The shards in `folder`, each verified; raises DataError that names the shard at fault."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    tables: dict[str, list[pa.Table]] = {split: [] for split in manifest.rows}
    schema = None
    for shard in manifest.shards:
        table = _open_shard(folder, shard, labelled=bool(manifest.labels))
        if schema is not None and not table.schema.equals(schema):
            raise _refused(folder / shard.path, "has other columns than the shards before it")
        schema = table.schema
        tables.setdefault(shard.split, []).append(table)
    if schema is None:
        raise _refused(folder / MANIFEST, "names no shards")
    joined = {
        split: pa.concat_tables(parts) if parts else schema.empty_table()
        for split, parts in tables.items()
    }
    # what the manifest says of the whole, against the rows themselves
    path, rows = folder / MANIFEST, {split: len(table) for split, table in joined.items()}
    if rows != dict(manifest.rows):
        raise _refused(path, f"promises {dict(manifest.rows)} rows, and the shards hold {rows}")
    examples = fingerprint_of_hashes(table.column("hash") for table in joined.values())
    if examples != manifest.examples:
        raise _refused(path, "was made for other examples than the shards hold")
    if folder_fingerprint(folder / ASSETS) != manifest.tokenizer:
        raise _refused(folder / ASSETS, "has other files than when the shards were written")
    return Shards(folder, manifest, joined)


def read_manifest(folder: Path) -> ShardManifest:
    """The manifest of a folder; raises DataError if it is missing, of another version, or none."""
    path = folder / MANIFEST
    try:
        content: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _refused(path, "is missing, so the shards were never completed") from None
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read: {error}") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        what = f"has schema version {version!r}, and this rekindle reads {SCHEMA_VERSION}"
        raise _refused(path, what)
    try:
        return ShardManifest.model_validate(content)
    except pydantic.ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(str(part) for part in detail["loc"])
        raise _refused(path, f"is not a manifest: {where}: {detail['msg']}") from None


def row_tokens(table: pa.Table) -> npt.NDArray[np.int64]:
    """Tokens of each row: the length of `input_ids`; ones where there is no such column."""
    return _of_lists(table, "input_ids", lambda lists: lists.value_lengths())


def _of_lists(
    table: pa.Table, name: str, count: Callable[[pa.ListArray], npt.ArrayLike]
) -> npt.NDArray[np.int64]:
    """What `count` says of each list in a column; ones where there is no such column."""
    if name not in table.schema.names:
        return np.ones(len(table), np.int64)
    parts = [np.asarray(count(chunk), np.int64) for chunk in table.column(name).chunks]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _supervised(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    """The sum of each list without its first value."""
    marks = np.asarray(lists.flatten(), np.int64)
    lengths = np.asarray(lists.value_lengths(), np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    running = np.append(np.int64(0), np.cumsum(marks))
    counts: npt.NDArray[np.int64] = running[ends] - running[np.minimum(starts + 1, ends)]
    return counts


def _placed(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    """How many values of each list are not negative."""
    ends = np.cumsum(np.asarray(lists.value_lengths(), np.int64))
    running = np.append(np.int64(0), np.cumsum(np.asarray(lists.flatten()) >= 0))
    counts: npt.NDArray[np.int64] = np.diff(running[ends], prepend=np.int64(0))
    return counts


def folder_fingerprint(folder: Path) -> str:
    """Hash over the files in a folder, names and bytes; empty where there are none."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    named = [[file.relative_to(folder).as_posix(), file_sha256(file)] for file in files]
    return digest(named) if named else ""


def fingerprint_of_hashes(columns: Iterable[pa.ChunkedArray]) -> str:
    running = hashlib.sha256()
    for column in columns:
        for chunk in column.chunks:
            start, width = chunk.offset, chunk.type.byte_width
            view = memoryview(chunk.buffers()[1])
            running.update(view[start * width : (start + len(chunk)) * width])
    return running.hexdigest()[:32]


def _open_shard(folder: Path, shard: ShardFile, *, labelled: bool) -> pa.Table:
    path = folder / shard.path
    if Path(shard.path).is_absolute() or ".." in Path(shard.path).parts:
        raise _refused(folder / MANIFEST, f"names a file outside of its folder: {shard.path}")
    if not path.is_file():
        raise _refused(path, "is missing")
    if (size := path.stat().st_size) != shard.bytes:
        raise _refused(path, f"has {size} bytes and not the {shard.bytes} of its manifest")
    if file_sha256(path) != shard.sha256:
        raise _refused(path, "has other bytes than when it was written (SHA-256 differs)")
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as error:
        raise _refused(path, f"is not an Arrow file: {error}") from None
    if len(table) != shard.rows or not len(table):
        raise _refused(path, f"holds {len(table)} rows and not the {shard.rows} of its manifest")
    if missing := {"id", "hash", *(["label"] if labelled else [])} - set(table.schema.names):
        raise _refused(path, f"has no column {', '.join(sorted(missing))}")
    return table


def _refused(path: Path, what: str) -> DataError:
    return DataError(f"{path.name} {what}", where=str(path), fix=_AGAIN)
