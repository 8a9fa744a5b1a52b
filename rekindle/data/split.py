"""Which split a record belongs to, the same way on every machine, and exact copies of one content
in several splits: a model would be judged on what it was trained on.

By `hash`: 64 bits of a hash of the record's key, or of its content, against the shares: a record
stays where it is when others come and go. By `time`: oldest to train, newest to test; the cuts are
exact order statistics, found in bounded memory, and records of one time stay together; with a gap,
what lies within it before a cut is in no split.

For copies, hashes are read back from the examples just written; more than `BUCKET_ROWS` are dealt
into buckets on disk by their first bits."""

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.data.examples import HASH_BYTES, SPLITS, open_examples
from rekindle.data.validate import Findings
from rekindle.spec.model import SplitSpec

Times = npt.NDArray[np.int64]
Counts = Callable[[int, int], Times]
"""`digit_counts` of all records, given a prefix and a number of bits."""
_DIGIT_BITS = 16
BUCKET_ROWS = 500_000
_MOST_BUCKETS = 256
READABLE = ("text", "words", "document")
_ENTRY = np.dtype(
    [("low", "<u8"), ("high", "<u8"), ("split", "u1"), ("batch", "<u4"), ("row", "<u4")]
)
Entries = npt.NDArray[np.void]
Bools = npt.NDArray[np.bool_]


def content_hashes(values: pa.Array, prefix: bytes = b"") -> bytes:
    """SHA-256, cut to 16 bytes, of `prefix` and each value of a string or binary array, joined."""
    start = hashlib.sha256(prefix)
    if prefix:
        hashes = []
        for value in content_views(values):
            one = start.copy()
            one.update(value)
            hashes.append(one.digest()[:HASH_BYTES])
        return b"".join(hashes)
    sha256 = hashlib.sha256
    return b"".join([sha256(value).digest()[:HASH_BYTES] for value in content_views(values)])


def hash_splits(hashes: bytes, shares: SplitSpec) -> npt.NDArray[np.int8]:
    """The index in `SPLITS` of each 16-byte hash."""
    heads = np.frombuffer(hashes, "<u8").reshape(-1, 2)[:, 0]
    position = heads.astype(np.float64) / 2.0**64
    cuts = np.array([shares.train, shares.train + shares.validation])
    return np.searchsorted(cuts, position, side="right").astype(np.int8)


def time_cuts(counts: Counts, total: int, shares: SplitSpec) -> tuple[int, int]:
    """The times from which records are validation, and test: with ten months of 150 records and
    shares of 0.8, 0.1, 0.1 the starts of the ninth and the tenth of `total` records."""
    ranks = [round(total * shares.train), round(total * (shares.train + shares.validation))]
    first, second = (order_statistic(counts, min(rank, total - 1)) for rank in ranks)
    return first, second


def time_splits(
    times: Times, cuts: tuple[int, int], gaps: Sequence[int] = ()
) -> npt.NDArray[np.int8]:
    """The index in `SPLITS` of each time; -1 from the start of the gap before a cut up to it."""
    found = np.searchsorted(np.array(cuts), times, side="right").astype(np.int8)
    for index, start in enumerate(gaps):
        found[(found == index) & (times >= start)] = -1
    return found


def order_statistic(counts: Counts, rank: int) -> int:
    """The value at `rank` (from 0) if all times were sorted, by radix selection: 16 bits a pass."""
    prefix, bits = 0, 64
    while bits:
        bits -= _DIGIT_BITS
        ends = np.cumsum(counts(prefix, bits))
        digit = int(np.searchsorted(ends, rank, side="right"))
        rank -= int(ends[digit - 1]) if digit else 0
        prefix = prefix << _DIGIT_BITS | digit
    return prefix - (1 << 63)


def digit_counts(times: Times, prefix: int, bits: int) -> Times:
    """How often each 16-bit digit stands `bits` above the end of those times whose digits before it
    are `prefix`, [65,536]."""
    words = times.view(np.uint64) ^ np.uint64(1 << 63)
    if bits + _DIGIT_BITS < 64:
        words = words[words >> np.uint64(bits + _DIGIT_BITS) == np.uint64(prefix)]
    digits = (words >> np.uint64(bits)) & np.uint64((1 << _DIGIT_BITS) - 1)
    return np.bincount(digits.astype(np.int64), minlength=1 << _DIGIT_BITS)


def content_views(values: pa.Array) -> Iterator[memoryview]:
    """The bytes of each value, without a copy."""
    _, offset_buffer, data = values.buffers()
    mine = slice(values.offset, values.offset + len(values) + 1)
    offsets = np.frombuffer(offset_buffer, np.int32)[mine].tolist()
    view = memoryview(data) if data is not None else memoryview(b"")
    return (view[start:end] for start, end in itertools.pairwise(offsets))


def find_leaks(folder: Path, rows: Mapping[str, int], findings: Findings) -> None:
    """Note every content of the examples in `folder` that stands in more than one split."""
    for entries, same in by_hash(folder, sum(rows.values()), entries_of(folder)):
        _note_copies(entries, same, folder, findings)


def by_hash(folder: Path, rows: int, blocks: Iterable[Entries]) -> Iterator[tuple[Entries, Bools]]:
    """The entries of so many rows in pieces that fit into memory: sorted by hash, those of one hash
    in one piece and in their order; and of each but the first whether it has the last one's."""
    buckets = min(_MOST_BUCKETS, rows // BUCKET_ROWS + 1)
    if buckets == 1:
        if found := list(blocks):
            yield _sorted(np.concatenate(found))
        return
    with tempfile.TemporaryDirectory(prefix=".hashes-", dir=folder) as scratch:
        files = [Path(scratch, f"{bucket:03}") for bucket in range(buckets)]
        for block in blocks:
            bucket_of = block["low"] % np.uint64(buckets)
            for bucket in np.unique(bucket_of):
                with files[bucket].open("ab") as file:
                    file.write(block[bucket_of == bucket].tobytes())
        for path in files:
            if path.exists():
                yield _sorted(np.fromfile(path, _ENTRY))


def stored_hashes(column: pa.Array) -> bytes:
    """The bytes of a column of hashes, one after the other."""
    start = column.offset * HASH_BYTES
    return bytes(memoryview(column.buffers()[1])[start : start + len(column) * HASH_BYTES])


def entries_of(
    folder: Path, column: str = "hash", hashes: Callable[[pa.Array], bytes] = stored_hashes
) -> Iterator[Entries]:
    """An entry for each example in `folder`: the 16 bytes that `hashes` gives for its `column`;
    several, if it gives more."""
    for index, split in enumerate(SPLITS):
        for number, batch in enumerate(open_examples(folder, split, column)):
            halves = np.frombuffer(hashes(batch.column(column)), "<u8").reshape(-1, 2)
            block = np.empty(len(halves), _ENTRY)
            block["low"], block["high"] = halves[:, 0], halves[:, 1]
            block["split"], block["batch"] = index, number
            block["row"] = np.arange(len(halves)) * len(batch) // len(halves)
            yield block


def _sorted(entries: Entries) -> tuple[Entries, Bools]:
    entries = entries[np.lexsort((entries["split"], entries["low"], entries["high"]))]
    low, high = entries["low"], entries["high"]
    return entries, (low[1:] == low[:-1]) & (high[1:] == high[:-1])


def _note_copies(entries: Entries, same: Bools, folder: Path, findings: Findings) -> None:
    """A run of equal hashes with more than one split is a leak."""
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
    shown = next((name for name in READABLE if name in batch.schema.names), None)
    value = batch.column(shown)[row].as_py() if shown else "same pixels"
    return f"{batch.column('id')[row].as_py()} in {split}", value
