"""The feature table: every feature that a pipeline can use has a row, and the rows are what the
documentation shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rekindle.catalog.features import as_markdown, table
from rekindle.errors import UnsupportedError
from rekindle.ir.features import Use, uses
from rekindle.ir.read import read
from rekindle.platforms.admission import admit
from tests.ir.test_corpus import CORPUS, files
from tests.ir.test_read import minimal

DOCS = Path(__file__).parents[2] / "docs" / "features.md"


def test_the_documentation_is_the_table() -> None:
    assert DOCS.read_text() == as_markdown(), "make generate"


def test_every_row_speaks_of_every_platform_and_gives_reasons() -> None:
    platforms = {frozenset(feature.on) for feature in table().values()}
    assert len(platforms) == 1
    for feature in table().values():
        for platform, carried in feature.on.items():
            assert carried.how or carried.verdict == "native", feature.name
            if carried.verdict == "refused" and platform != "local":
                assert carried.source, feature.name
            if carried.verdict == "ignored":
                assert platform == "local", feature.name


@pytest.mark.skipif(not CORPUS.exists(), reason="../shared/kfp-corpus is not here")
def test_no_pipeline_of_the_corpus_uses_a_feature_without_a_row() -> None:
    found = {use.feature for file in files() for use in uses(read(file.read_text()))}
    assert len(found) > 25
    assert found <= table().keys()


def test_an_unknown_setting_of_a_cluster_is_refused_with_its_place() -> None:
    executors = {"executors": {"exec-a": {"somethingNew": [{"x": 1}]}}}
    platform = {"platforms": {"kubernetes": {"deploymentSpec": executors}}}
    graph = read(yaml.safe_dump_all([minimal(), platform]))
    where = "platforms.kubernetes.deploymentSpec.executors.exec-a.somethingNew"
    assert Use("somethingNew", "a", where) in uses(graph)
    with pytest.raises(UnsupportedError, match="rekindle knows nothing of it") as caught:
        admit(graph, "local")
    assert [problem.where for problem in caught.value.problems] == [where]
