"""Every pipeline of KFP's samples is understood, or refused by name with its place in the IR."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import UnsupportedError
from rekindle.ir.read import read

CORPUS = Path(__file__).parents[3] / "shared" / "kfp-corpus"
pytestmark = pytest.mark.skipif(not CORPUS.exists(), reason="../shared/kfp-corpus is not here")

REFUSED = (
    "loops",
    "lists of artifacts",
    "`importer`",
    "steps that run although others failed",
    "TASK_FINAL_STATUS",
    "the final status",
    "a setting of Kubernetes pods",
    "stands for a list of artifacts",
    "has no meaning outside",
    "which the step does not have",  # what a refused input would have been
)


def files() -> list[Path]:
    return sorted(f for f in CORPUS.rglob("*") if f.suffix in (".yaml", ".json"))


def test_the_corpus_is_read_or_refused_by_name() -> None:
    understood, refused = 0, 0
    for file in files():
        try:
            graph = read(file.read_text())
        except UnsupportedError as error:
            refused += 1
            for problem in error.problems:
                assert problem.where, problem
                assert problem.fix, problem
                assert any(known in problem.what for known in REFUSED), problem
        else:
            understood += 1
            paths = [step.path for step in graph.steps()]
            assert paths
            assert len(set(paths)) == len(paths)
            assert {box.path for box in graph.drawing().boxes} >= set(paths)
    assert (understood, refused) == (54, 44)


def test_reading_is_fast() -> None:
    import time

    began = time.perf_counter()
    for file in files():
        try:
            read(file.read_text())
        except UnsupportedError:
            continue
    assert time.perf_counter() - began < 5.0  # 0.2 s here
