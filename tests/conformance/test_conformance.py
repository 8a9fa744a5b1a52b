"""KFP's own samples on every platform: each becomes a definition that the platform's format takes, or
is refused for features that the table refuses, each with its place. `make conformance` prints the
matrix."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from rekindle.catalog.tables import feature_rows
from rekindle.errors import Problem, UnsupportedError
from rekindle.ir.features import uses
from rekindle.ir.read.pipeline import read
from tests.support.conformance import PLATFORMS, feature_of, on
from tests.support.samples import SAMPLES, files, needs_samples
from tests.support.values import arguments

pytestmark = needs_samples

LIMITED = {name for name, on in feature_rows()["limits"].on.items() if on.verdict == "refused"}


@pytest.fixture(scope="module")
def matrix() -> dict[str, dict[str, list[str]]]:
    """What is refused, by file and platform; an empty list is a definition."""
    found: dict[str, dict[str, list[str]]] = collections.defaultdict(dict)
    for file in files():
        text = file.read_text()
        graph = read(text)
        for platform in PLATFORMS:
            name = str(Path(file).relative_to(SAMPLES))
            problems: tuple[Problem, ...] = ()
            try:
                on(platform, text, graph)
            except UnsupportedError as error:
                problems = error.problems
            found[name][platform] = sorted({feature_of(problem, platform) for problem in problems})
    return found


def test_every_sample_is_a_definition_or_refused_as_the_table_says(
    matrix: dict[str, dict[str, list[str]]],
) -> None:
    assert matrix
    print("\n" + " ".join(f"{platform:>9}" for platform in PLATFORMS), "  pipeline")
    for name, row in matrix.items():
        cells = ["refused" if row[platform] else "yes" for platform in PLATFORMS]
        why = sorted({feature for features in row.values() for feature in features})
        print(
            " ".join(f"{cell:>9}" for cell in cells), f"  {name}", f"({', '.join(why)})" * bool(why)
        )
    taken = {p: sum(not row[p] for row in matrix.values()) for p in PLATFORMS}
    print(" ".join(f"{n:>9}" for n in taken.values()), f"  of {len(matrix)}")
    for name, row in matrix.items():
        graph = read((SAMPLES / name).read_text())
        features = {use.feature for use in uses(graph, arguments(graph))}
        for platform in PLATFORMS:
            refused = {f for f in features if feature_rows()[f].on[platform].verdict == "refused"}
            limits = {"limits"} if platform in LIMITED else set()
            assert set(row[platform]) - limits == refused, (name, platform)
