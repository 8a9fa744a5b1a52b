"""Which split a record belongs to, the same way on every machine.

By `hash`: 64 bits of a hash of the record's key, or of its content, against the shares: a
record stays where it is when others come and go. By `time`: oldest to train, newest to
test; the cuts are exact order statistics, found in bounded memory, and records of one
time stay together; with a gap, what lies within it before a cut is in no split."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.data.examples import HASH_BYTES
from rekindle.spec.model import SplitSpec

Times = npt.NDArray[np.int64]
Splits = npt.NDArray[np.int8]
Counts = Callable[[int, int], Times]
"""`digit_counts` of all records, given a prefix and a number of bits."""
_DIGIT_BITS = 16
# the golden ratio of 2^64 (Knuth); odd: a permutation, whose high bits depend on all bits
_MIXED = np.uint64(0x9E3779B97F4A7C15)


def content_hashes(values: pa.Array, prefix: bytes = b"") -> bytes:
    """SHA-256 of `prefix` and each value of an array, cut to 16 bytes each, joined."""
    sha256 = hashlib.sha256
    views = content_views(values)
    return b"".join([sha256(prefix + value).digest()[:HASH_BYTES] for value in views])


def hash_splits(hashes: bytes, shares: SplitSpec) -> Splits:
    """The index in `SPLITS` of each 16-byte hash, another one with another salt."""
    heads = np.frombuffer(hashes, "<u8").reshape(-1, 2)[:, 0]
    if shares.salt:
        salt = int.from_bytes(hashlib.sha256(shares.salt.encode()).digest()[:8], "little")
        heads = (heads ^ np.uint64(salt)) * _MIXED
    position = heads.astype(np.float64) / 2.0**64
    cuts = np.array([shares.train, shares.train + shares.validation])
    return np.searchsorted(cuts, position, side="right").astype(np.int8)


def time_cuts(counts: Counts, total: int, shares: SplitSpec) -> tuple[int, int]:
    """The times from which records are validation, and test: with ten months of 150
    records and shares of 0.8, 0.1, 0.1 the starts of the ninth and the tenth of `total`
    records."""
    validation_rank = round(total * shares.train)
    test_rank = round(total * (shares.train + shares.validation))
    validation_start = order_statistic(counts, min(validation_rank, total - 1))
    test_start = order_statistic(counts, min(test_rank, total - 1))
    return validation_start, test_start


def time_splits(times: Times, cuts: tuple[int, int], gaps: Sequence[int] = ()) -> Splits:
    """The index in `SPLITS` of each time;
    -1 from where a gap before a cut starts up to it."""
    splits = np.searchsorted(np.array(cuts), times, side="right").astype(np.int8)
    for index, start in enumerate(gaps):
        splits[(splits == index) & (times >= start)] = -1
    return splits


def order_statistic(counts: Counts, rank: int) -> int:
    """The value at `rank` (from 0) of all times, by radix selection: 16 bits a pass."""
    prefix = 0  # the digits that are known
    bits = 64  # how many are not
    while bits:
        bits -= _DIGIT_BITS
        ends = np.cumsum(counts(prefix, bits))
        digit = int(np.searchsorted(ends, rank, side="right"))
        if digit:  # the rank among those that have this digit
            rank -= int(ends[digit - 1])
        prefix = prefix << _DIGIT_BITS | digit
    return prefix - (1 << 63)


def digit_counts(times: Times, prefix: int, bits: int) -> Times:
    """How often each 16-bit digit stands `bits` above the end of those times whose digits
    before it are `prefix`, [65,536]."""
    # the sign bit turned over: as numbers without a sign they have the same order
    words = times.view(np.uint64) ^ np.uint64(1 << 63)
    if bits + _DIGIT_BITS < 64:
        words = words[words >> np.uint64(bits + _DIGIT_BITS) == np.uint64(prefix)]
    digits = (words >> np.uint64(bits)) & np.uint64((1 << _DIGIT_BITS) - 1)
    return np.bincount(digits.astype(np.int64), minlength=1 << _DIGIT_BITS)


def content_views(values: pa.Array) -> Iterator[memoryview]:
    """The bytes of each value, without a copy."""
    _, offset_buffer, data = values.buffers()
    # the buffers of a slice are those of the whole array
    own = slice(values.offset, values.offset + len(values) + 1)
    offsets = np.frombuffer(offset_buffer, np.int32)[own].tolist()
    view = memoryview(data) if data is not None else memoryview(b"")
    return (view[start:end] for start, end in itertools.pairwise(offsets))


def stored_hashes(column: pa.Array) -> bytes:
    """The bytes of a column of hashes, one after the other."""
    start = column.offset * HASH_BYTES
    return bytes(memoryview(column.buffers()[1])[start : start + len(column) * HASH_BYTES])
