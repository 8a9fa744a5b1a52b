"""Exact copies of one content in several splits: a model would be judged on what it was trained on.

Hashes are read back from the examples just written. Few enough fit into memory at once; more are
dealt into buckets on disk by their first bits, so that memory stays bounded by `BUCKET_ROWS`
however many rows there are."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rekindle.data.examples import HASH_BYTES, SPLITS, open_examples
from rekindle.data.validate import Findings

BUCKET_ROWS = 500_000
_MOST_BUCKETS = 256
_ENTRY = np.dtype(
    [("low", "<u8"), ("high", "<u8"), ("split", "u1"), ("batch", "<u4"), ("row", "<u4")]
)
Entries = npt.NDArray[np.void]


def find_leaks(folder: Path, rows: Mapping[str, int], findings: Findings) -> None:
    """Note every content of the examples in `folder` that stands in more than one split."""
    buckets = min(_MOST_BUCKETS, sum(rows.values()) // BUCKET_ROWS + 1)
    if buckets == 1:
        blocks = list(_entries(folder))
        if blocks:
            _note_copies(np.concatenate(blocks), folder, findings)
        return
    with tempfile.TemporaryDirectory(prefix=".leaks-", dir=folder) as scratch:
        files = [Path(scratch, f"{bucket:03}") for bucket in range(buckets)]
        for block in _entries(folder):
            bucket_of = block["low"] % np.uint64(buckets)
            for bucket in np.unique(bucket_of):
                with files[bucket].open("ab") as file:
                    file.write(block[bucket_of == bucket].tobytes())
        for path in files:
            if path.exists():
                _note_copies(np.fromfile(path, _ENTRY), folder, findings)


def _entries(folder: Path) -> Iterator[Entries]:
    for index, split in enumerate(SPLITS):
        for number, batch in enumerate(open_examples(folder, split, "hash")):
            column = batch.column("hash")
            raw = column.buffers()[1].slice(column.offset * HASH_BYTES, len(column) * HASH_BYTES)
            halves = np.frombuffer(raw, "<u8").reshape(-1, 2)
            block = np.empty(len(halves), _ENTRY)
            block["low"], block["high"] = halves[:, 0], halves[:, 1]
            block["split"], block["batch"], block["row"] = index, number, np.arange(len(halves))
            yield block


def _note_copies(entries: Entries, folder: Path, findings: Findings) -> None:
    """Sort by hash; a run of equal hashes with more than one split is a leak."""
    entries = entries[np.lexsort((entries["split"], entries["low"], entries["high"]))]
    low, high = entries["low"], entries["high"]
    same = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    ends = np.append(starts[1:], len(entries))
    leaking = entries["split"][starts] != entries["split"][ends - 1]
    for start, end in zip(starts[leaking].tolist(), ends[leaking].tolist(), strict=True):
        copies = entries[start:end]
        each = [copies[np.argmax(copies["split"] == split)] for split in np.unique(copies["split"])]
        places = (
            [_describe(folder, entry) for entry in each] if findings.shows("leak") else [("", "")]
        )
        findings.add("leak", " = ".join(place for place, _ in places), places[0][1], end - start)


def _describe(folder: Path, entry: np.void) -> tuple[str, str]:
    split = SPLITS[entry["split"]]
    batch = open_examples(folder, split)[int(entry["batch"])]
    row = int(entry["row"])
    readable = ("text", "words", "document")
    shown = next((name for name in readable if name in batch.schema.names), None)
    value = batch.column(shown)[row].as_py() if shown else "same pixels"
    return f"{batch.column('id')[row].as_py()} in {split}", value
