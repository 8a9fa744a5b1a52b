"""The hashes of what a model was trained on: the same file as from a list of Python's, in constant memory."""

import hashlib
import io
import itertools
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from rekindle.train.modelfolder import hash_prefixes, write_prefixes


def column(count, parts, distinct):
    hashes = [hashlib.sha256(str(i % distinct).encode()).digest() for i in range(count)]
    cut = np.linspace(0, count, parts + 1).astype(int)
    kind = pa.binary(32)
    chunks = [pa.array(hashes[a:b], kind) for a, b in itertools.pairwise(cut)]
    return pa.chunked_array(chunks, kind)


@pytest.mark.parametrize(
    ("count", "parts", "distinct"),
    [(0, 1, 1), (1, 1, 1), (10, 3, 4), (200_000, 5, 150_000), (70_000, 1, 70_000)],
)
def test_the_file_is_what_numpy_saves_of_the_sorted_prefixes(count, parts, distinct, tmp_path):
    hashes = column(count, parts, distinct)
    expected = io.BytesIO()
    np.save(expected, np.unique(hash_prefixes(hashes.to_pylist())), allow_pickle=False)
    write_prefixes(hashes, tmp_path / "trained_on.npy")
    assert (tmp_path / "trained_on.npy").read_bytes() == expected.getvalue()
    assert [path.name for path in tmp_path.iterdir()] == ["trained_on.npy"]


def test_a_slice_of_a_column_is_read_where_it_begins(tmp_path):
    hashes = column(1000, 4, 1000)[300:900]
    write_prefixes(hashes, tmp_path / "trained_on.npy")
    expected = np.unique(hash_prefixes(hashes.to_pylist()))
    assert np.array_equal(np.load(tmp_path / "trained_on.npy"), expected)


def test_memory_does_not_grow_with_the_rows(tmp_path):
    draw = np.random.default_rng(0)
    peaks = []
    for rows in (200_000, 2_000_000):
        buffer = pa.py_buffer(draw.bytes(32 * rows))
        hashes = pa.chunked_array(
            [pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), rows, [None, buffer])]
        )
        tracemalloc.start()
        write_prefixes(hashes, tmp_path / "trained_on.npy")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 4 << 20
    assert peaks[1] < 1.1 * peaks[0]
