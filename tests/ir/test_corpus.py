"""Every pipeline of KFP's samples is understood; which platform can run it is another question."""

from __future__ import annotations

from rekindle.ir.read.pipeline import read
from tests.support.samples import files, needs_samples

pytestmark = needs_samples


def test_the_whole_corpus_is_understood() -> None:
    graphs = [read(file.read_text()) for file in files()]
    assert graphs
    for graph in graphs:
        paths = [leaf.path for leaf in graph.leaves()]
        assert paths
        assert len(set(paths)) == len(paths)


def test_reading_is_fast() -> None:
    import time

    began = time.perf_counter()
    for file in files():
        read(file.read_text())
    assert time.perf_counter() - began < 5.0  # 0.2 s here
