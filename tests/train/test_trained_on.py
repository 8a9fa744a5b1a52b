"""The hashes of what a model was trained on: the same file as from a list of Python's, in constant memory."""

import hashlib
import io
import itertools
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from rekindle.errors import DataError
from rekindle.spec.model import ModelSpec
from rekindle.train.modelfolder import hash_prefixes, inherited, write_prefixes


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
    write_prefixes([hashes], len(hashes), tmp_path / "trained_on.npy")
    assert (tmp_path / "trained_on.npy").read_bytes() == expected.getvalue()
    assert [path.name for path in tmp_path.iterdir()] == ["trained_on.npy"]


def test_what_models_before_it_were_trained_on_is_in_the_file_too(tmp_path):
    known = [np.arange(0, 300_000, 3, np.uint64), np.array([1, 3, 2**64 - 1], np.uint64)]
    hashes = column(1000, 3, 900)
    for given in (hashes, hashes[:0]):
        write_prefixes([given], len(given), tmp_path / "trained_on.npy", known)
        expected = np.unique(np.concatenate([*known, hash_prefixes(given.to_pylist())]))
        assert np.array_equal(np.load(tmp_path / "trained_on.npy"), expected)


def test_a_training_inherits_from_the_models_of_ours_that_it_begins_with_and_learns_from(tmp_path):
    folders = {name: tmp_path / name for name in ("origin", "start", "teacher", "foreign", "bare")}
    for number, (name, folder) in enumerate(folders.items()):
        folder.mkdir()
        if name != "foreign":
            (folder / "rekindle.json").write_text("{}")
        if name not in ("foreign", "bare"):
            np.save(folder / "trained_on.npy", np.array([number], np.uint64))
    source, start, teacher, foreign, bare = map(str, folders.values())
    wanted = {"source": source, "teacher": {"source": teacher}}
    cases = [
        ("", {"source": {"channels": [4, 6]}}, []),
        ("", {"source": "distilbert/distilbert-base"}, []),
        ("", {"source": foreign}, []),
        ("", wanted, [0, 2]),
        (start, wanted, [1, 2]),
    ]
    for init, model, expected in cases:
        found = inherited(init, ModelSpec.model_validate(model))
        assert [part.tolist() for part in found] == [[number] for number in expected]
    with pytest.raises(DataError, match=r"bare does not say what its model was trained on.*\.npy"):
        inherited(bare, ModelSpec())


def test_a_slice_of_a_column_is_read_where_it_begins(tmp_path):
    hashes = column(1000, 4, 1000)[300:900]
    write_prefixes([hashes], len(hashes), tmp_path / "trained_on.npy")
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
        known = np.lib.format.open_memmap(tmp_path / "known.npy", "w+", np.uint64, (rows,))
        write_prefixes([hashes], len(hashes), tmp_path / "trained_on.npy", [known])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 4 << 20
    assert peaks[1] < 1.1 * peaks[0]
