"""Ten terabytes in 40,000 files, 5e9 rows and 1,024 ranks, by arithmetic alone: nothing is read."""

from __future__ import annotations

import datetime as dt
import resource
import time

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rekindle.data.files import PIECE_BYTES, Files, SourceFile
from rekindle.data.order import SampleOrder
from rekindle.data.pieces import Block, pieces
from rekindle.data.source import FileSource
from tests.data.corpora import text_spec

MONTHS, RANKS = 40, 1_024


def listed(months, each=1_000):
    """Files of 250 MB of some months, as a listing of a store has them."""
    store = MemoryFileSystem()
    for month in months:
        day = dt.datetime(2023 + month // 12, month % 12 + 1, 1)
        for number in range(each):
            name = f"{day:%Y-%m}/{number:05}.jsonl"
            yield SourceFile(store, "/data", f"/data/{name}", name, PIECE_BYTES - 6_000_000, day)


def keys(months):
    """The keys of the pieces of those months."""
    files = Files(tuple(listed(months)), "jsonl")
    source = FileSource(text_spec("memory://data/{window:%Y-%m}/*.jsonl"), "text", files=files)
    blocks = {file.path: [Block(f"{hash(file.name):032x}")] for file in files.files}
    return [one.item(["settings"])["key"] for one in pieces(source, blocks)]


@pytest.mark.slow
def test_ten_terabytes_are_planned_and_walked_in_a_minute_and_a_gigabyte():
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    every = keys(range(MONTHS))
    assert len(set(every)) == 40_000
    assert len(set(keys(range(1, MONTHS))) - set(every)) == 0, (
        "a window that moves finds its pieces"
    )

    order = SampleOrder(rows=[10_000] * 500_000, global_batch_size=8 * RANKS, seed=0)
    last = order.steps(1) - 1
    assert last == -(-5_000_000_000 // (8 * RANKS)) - 1
    for step in (0, last // 2, last, *range(last // 3, last // 3 + 1_000, 10)):
        rows = order.batch(step).rows
        drawn = rows[rows >= 0]  # the last batch is short
        assert len(rows) == 8 * RANKS
        assert len(np.unique(drawn)) == len(drawn)
        assert drawn.max() < 5_000_000_000
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{time.process_time() - begun:.1f} s of a processor, {used / 1024:.0f} MiB more")
    assert used < 1 << 20, "KiB"
