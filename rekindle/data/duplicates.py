"""Copies of examples: those that `data.duplicates` leaves out, in all splits together,
and contents that stand in several splits, so that a model would be judged on what it was
trained on.

`exact` compares the hash of the content, `folded` that of its text in lower case with
single spaces, `near` what MinHash (Broder 1997) keeps of the runs of five words in such a
text: texts that share a fraction s of theirs are found with a chance of 1 - (1 - s^8)^14,
as datatrove's defaults have it: 0.92 at 0.8, 0.57 at 0.7, 0.05 at 0.5. The first one
stays, of train before validation before test: what a model was trained on does not judge
it, and the split that is wanted can be kept. A copy with another label is one, too.

Workers (executor.py) hash runs of rows and deal the hashes into groups by their first
bits; then each group is compared by itself, and each file is written again if it has
copies. Memory: the hashes of a run or of a group, about `GROUP_ROWS` of them.

datasketch 2.0.0 finds as many near copies (measured on 2026-11-30, 100,000 texts), but holds
its index in memory, 647 MB against 185 MB, and compares 13 times slower."""

import contextlib
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.data.examples import (
    SPLITS,
    ExamplesFile,
    ExamplesPart,
    ExamplesWriter,
    label_counts,
    modality_in,
)
from rekindle.data.executor import Executor, Order
from rekindle.data.split import content_hashes, stored_hashes
from rekindle.data.store import Entry, PieceStore, made_once
from rekindle.modalities.base import Written
from rekindle.modalities.vocabulary import UNSPACED
from rekindle.rows.findings import Findings
from rekindle.spec.identity import digest

GROUP_ROWS = 500_000
_MOST_GROUPS = 1_024
_HASHED = np.dtype([("low", "<u8"), ("high", "<u8"), ("row", "<u4")])  # the row in its file
_ENTRY = np.dtype([*_HASHED.descr, ("file", "<u4")])
_ROW = np.dtype("<u4")
_DEALT = "dealt"
_STARTS = "starts"
_WORD = re.compile(rf"[{UNSPACED}]|(?:(?![{UNSPACED}])\S)+")
_WORDS = 5  # in a run
_BANDS = 14
_ROWS = 8  # in a band
_RANDOM = np.frombuffer(hashlib.shake_128(b"near").digest(8 * (_WORDS + _BANDS * _ROWS)), "<u8")
_WEIGHTS = _RANDOM[:_WORDS] | np.uint64(1)  # odd, so that no bit of a word is lost
_FACTORS = _RANDOM[_WORDS:]
Entries = npt.NDArray[np.void]


_SentFile = tuple[str, str, Sequence[int]]
"""What workers get of a file of examples: its key in the store, split, and rows by batch."""


def find_leaks(store: PieceStore, files: Sequence[ExamplesPart], executor: Executor) -> Findings:
    """Every content that stands in more than one split. The `path` of a file is its entry
    in the store, where it is called after its split."""
    findings = Findings()
    _, compared_groups = _compare(store, files, "keep", executor)
    for group in compared_groups:
        findings.include(Findings.of_json(group["leaks"]), 0)
    return findings


def drop_copies(
    store: PieceStore, files: Sequence[ExamplesPart], which: str, executor: Executor
) -> tuple[list[ExamplesPart], dict[str, Counter[str]]]:
    """The files without later copies, new where they had some;
    the copies' labels by split."""
    groups, _ = _compare(store, files, which, executor)
    order = {"store": store.root, "groups": groups}
    items = []
    for number, file in enumerate(files):
        key = digest([number, file.path, groups])
        items.append({"key": key, "file": number, "from": file.path, "split": file.split})
    thinned_files = list[ExamplesPart]()
    dropped = {split: Counter[str]() for split in SPLITS}
    entries = executor.map(f"{__name__}:thin", order, items, digest(items))
    for file, item, entry in zip(files, items, entries, strict=True):
        if entry["files"]:
            (sha256,) = entry["files"].values()
            update = {"path": item["key"], "batches": tuple(entry["batches"]), "sha256": sha256}
            file = file.model_copy(update=update)
            dropped[file.split].update(entry["dropped"])
        thinned_files.append(file)
    return thinned_files, dropped


def _compare(
    store: PieceStore, files: Sequence[ExamplesPart], which: str, executor: Executor
) -> tuple[list[str], list[Entry]]:
    """Have all hashes compared; returns the keys of the groups,
    and what is known of each."""
    bands = _BANDS if which == "near" else 1
    hashes = bands * sum(sum(file.batches) for file in files)
    count = min(_MOST_GROUPS, hashes // GROUP_ROWS + 1)
    runs = []
    for number, file in enumerate(files):
        # with several hashes a row, fewer rows, so that memory stays the same
        for run in _runs(file, GROUP_ROWS // bands):
            item = {
                "key": digest([file.path, file.split, *run, which, count]),
                "from": file.path,
                "split": file.split,
                "batches": run,
                "file": number,
            }
            runs.append(item)
    order = {"store": store.root, "which": which, "groups": count}
    executor.map(f"{__name__}:hash_run", order, runs, digest([order, runs]))
    order["runs"] = [[run["key"], run["file"]] for run in runs]
    order["files"] = [[file.path, file.split, file.batches] for file in files]
    groups = [{"key": digest([order["runs"], group]), "group": group} for group in range(count)]
    compared_groups = executor.map(f"{__name__}:compare_group", order, groups, digest(groups))
    return [str(group["key"]) for group in groups], compared_groups


def _runs(file: ExamplesPart, most: int) -> Iterator[tuple[int, int, int]]:
    """The first batch, the one behind the last,
    and the first row of runs of about so many rows."""
    start = 0
    first_row = 0
    row = 0
    for number, batch_rows in enumerate(file.batches, 1):
        row += batch_rows
        if row - first_row >= most or number == len(file.batches):
            yield start, number, first_row
            start = number
            first_row = row


@made_once
def hash_run(order: Order, item: Entry, store: PieceStore, folder: Path) -> dict[str, Any]:
    """With the hashes of a run of rows, dealt into groups."""
    which = order["which"]
    name = f"{item['split']}.arrow"
    with contextlib.ExitStack() as opened:
        written: Written[Any] | None = None
        batches: Sequence[pa.Array] | ExamplesFile
        if which in ("keep", "exact"):
            batches = store.column(item["from"], name, "hash").chunks
        else:
            path = opened.enter_context(store.reading(item["from"], name))
            written = _written_in(ExamplesFile(path).schema)
            column = written.field.name if written else "hash"  # of images
            batches = ExamplesFile(path, columns=(column,))
        hashed = np.concatenate([*_hashed(batches, written, item["batches"], which)])
    _deal(folder, hashed, hashed["low"] % np.uint64(order["groups"]), order["groups"])
    return {}


def _written_in(schema: pa.Schema) -> Written[Any] | None:
    """The modality of examples whose content is text; None for images."""
    modality = modality_in(schema)
    return modality if isinstance(modality, Written) else None


def _hashed(
    batches: Sequence[pa.Array] | ExamplesFile,
    written: Written[Any] | None,
    run: Sequence[int],
    which: str,
) -> Iterator[Entries]:
    """16 bytes of hash for each row of a run, several times with `near`."""
    start, end, first_row = run
    for number in range(start, end):
        batch = batches[number]
        values = batch if isinstance(batch, pa.Array) else batch.column(0)
        halves = np.frombuffer(_hashes(values, written, which), "<u8").reshape(-1, 2)
        block = np.empty(len(halves), _HASHED)
        block["low"] = halves[:, 0]
        block["high"] = halves[:, 1]
        # all rows have the same number of hashes
        block["row"] = first_row + np.arange(len(halves)) * len(values) // max(len(halves), 1)
        yield block
        first_row += len(values)


def _hashes(values: pa.Array, written: Written[Any] | None, which: str) -> bytes:
    """The hashes of a column of a batch, one row after the other: of what is written, or
    those that stand there."""
    if written is None:
        return stored_hashes(values)
    texts = [_folded(written.strings(value)) for value in values.to_pylist()]
    if which == "near":
        return b"".join(_bands(text) for text in texts)
    return content_hashes(pa.array(texts))


def _deal(folder: Path, values: Entries, group_of: npt.NDArray[Any], groups: int) -> None:
    """Write values by group, in their order, and where each group starts."""
    by_group = np.argsort(group_of, kind="stable")
    (folder / _DEALT).write_bytes(values[by_group].tobytes())
    starts = np.searchsorted(group_of[by_group], np.arange(groups + 1))
    (folder / _STARTS).write_bytes(starts.astype("<i8").tobytes())


def _dealt(store: PieceStore, key: str, group: int, kind: np.dtype[Any]) -> Entries:
    """The values of one group."""
    start, end = np.frombuffer(store.part(key, _STARTS, 8 * group, 8 * group + 16), "<i8")
    size = kind.itemsize
    return np.frombuffer(store.part(key, _DEALT, int(start) * size, int(end) * size), kind)


def _of_group(store: PieceStore, runs: Sequence[tuple[str, int]], group: int) -> Entries:
    """The entries of one group, equal hashes in the order of files and rows."""
    parts = [np.empty(0, _ENTRY)]
    for key, file in runs:
        hashed = _dealt(store, key, group, _HASHED)
        part = np.empty(len(hashed), _ENTRY)
        for name in _HASHED.names or ():
            part[name] = hashed[name]
        part["file"] = file
        parts.append(part)
    entries = np.concatenate(parts)
    # a stable sort: of equal hashes the first is of the first file, by split, and row
    return entries[np.lexsort((entries["low"], entries["high"]))]


@made_once
def compare_group(order: Order, item: Entry, store: PieceStore, folder: Path) -> dict[str, Any]:
    """With the later copies among one group of hashes, dealt to their files; or `leaks`,
    the findings of contents that stand in several splits."""
    entries = _of_group(store, order["runs"], item["group"])
    low = entries["low"]
    high = entries["high"]
    same = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
    if order["which"] == "keep":
        return {"leaks": _leaks(store, order["files"], entries, same).to_json()}
    copies = entries[1:][same]
    _deal(folder, copies["row"], copies["file"], len(order["files"]))
    return {}


def _leaks(
    store: PieceStore, files: Sequence[_SentFile], entries: Entries, same: npt.NDArray[np.bool_]
) -> Findings:
    """A run of equal hashes with more than one split is a leak."""
    findings = Findings()
    if not len(entries):
        return findings
    split_of_file = np.array([SPLITS.index(split) for _, split, _ in files])
    splits = split_of_file[entries["file"]]
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    ends = np.append(starts[1:], len(entries))
    leaking = splits[starts] != splits[ends - 1]
    for start, end in zip(starts[leaking].tolist(), ends[leaking].tolist(), strict=True):
        # to describe a row its file is read, which is done for those that are shown
        rows = [("", "")]
        if findings.shows("leak"):
            _, first_of_split = np.unique(splits[start:end], return_index=True)
            rows = [_describe(store, files, entries[start + at]) for at in first_of_split]
        places = " = ".join(place for place, _ in rows)
        _, value = rows[0]
        findings.add("leak", places, value, end - start)
    return findings


def _describe(store: PieceStore, files: Sequence[_SentFile], entry: np.void) -> tuple[str, str]:
    """Where a row stands, and its content."""
    key, split, batches = files[entry["file"]]
    ends = np.cumsum(batches)
    number = int(np.searchsorted(ends, entry["row"], side="right"))
    row = int(entry["row"] - ends[number])  # from the end of its batch
    with store.reading(key, f"{split}.arrow") as path:
        batch = ExamplesFile(path)[number]
        written = _written_in(batch.schema)
        value = batch.column(written.field.name)[row].as_py() if written else "same pixels"
        return f"{batch.column('id')[row].as_py()} in {split}", value


@made_once
def thin(order: Order, item: Entry, store: PieceStore, folder: Path) -> dict[str, Any]:
    """With a file of examples without its copies, if it has any, and their labels."""
    dealt = [_dealt(store, key, item["file"], _ROW) for key in order["groups"]]
    copied_rows = np.unique(np.concatenate(dealt))
    if not len(copied_rows):
        return {}
    name = item["split"]
    dropped = Counter[str]()
    first_row = 0
    with store.reading(item["from"], f"{name}.arrow") as path:
        examples = ExamplesFile(path)
        with ExamplesWriter(folder, examples.schema, (name,)) as writer:
            for batch in examples:
                rows = np.arange(first_row, first_row + len(batch))
                is_copy_N = np.isin(rows, copied_rows)
                table = pa.table(batch)
                first_row += len(batch)
                dropped.update(label_counts(table.filter(pa.array(is_copy_N))))
                writer.write(name, table.filter(pa.array(~is_copy_N)))
    return {"batches": writer.batches()[name], "dropped": dropped}


def _bands(text: str) -> bytes:
    """16 bytes for each band of a text's MinHash: near texts have some in common."""
    words = np.array([_word_hash(word) for word in _WORD.findall(text) or [""]], np.uint64)
    weights = _WEIGHTS[: len(words)]
    runs = np.lib.stride_tricks.sliding_window_view(words, len(weights)) @ weights
    least = np.full(len(_FACTORS), np.iinfo(np.uint64).max)
    # in blocks, as each run meets each of the factors
    for start in range(0, len(runs), 1_024):
        least = np.minimum(least, _mixed(runs[start : start + 1_024, None] ^ _FACTORS).min(0))
    bands = (bytes([band]) + row.tobytes() for band, row in enumerate(least.reshape(_BANDS, -1)))
    return b"".join(hashlib.blake2b(band, digest_size=16).digest() for band in bands)


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer (Steele et al. 2014): a random order of numbers, another for
    each one that they were xor-ed with."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@functools.lru_cache(1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def _folded(texts: Sequence[str]) -> str:
    """Texts in lower case, white space as one space."""
    return "\0".join(" ".join(text.casefold().split()) for text in texts)
