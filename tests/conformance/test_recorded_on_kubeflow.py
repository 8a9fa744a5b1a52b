"""Each pipeline that KFP was recorded to run otherwise than a run here, or not at all: how it ends now.

A run here gives what KFP gives (test_recorded.py); or what is compiled for Kubeflow has another form,
which means the same and avoids a fault of KFP's; or it is refused, or said, before it is sent; or a
run here says it, where only the values of a run show it; or the difference is one of those below."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from rekindle.catalog.tables import feature_rows
from rekindle.errors import UnsupportedError
from rekindle.ir.features import uses
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.section import KubeflowSpec
from tests.support.conformance import ANOTHER_FORM
from tests.support.recorded import (
    EXCEPTIONS,
    REFUSED,
    WITHOUT_SOURCE,
    arguments_of,
    needs_the_record,
    source_of,
    table,
)

pytestmark = needs_the_record

# what only values of a run show: a run here says it (tests/platforms/local/test_portable.py)
SAID_BY_A_RUN = {"b_nan", "b_odd", "v10_nan", "v8_outputs", "s1_uri"}
OF_ITS_OWN = {
    "t_artifact_as_a_return_value": "VA9: the class of an artifact",
    "t_artifacts_and_metadata": "VA9: the class of an artifact",
    "t_names_that_are_ours_elsewhere": "VA9: the class of an artifact",
    "t_nested_pipelines": "VA9: the class of an artifact",
    "b_one_turn_fails": "VC5: after a failure nothing begins here",
    "b_undecidable": "VC5: after a failure nothing begins here",
    "v5_null": "VC5: after a failure nothing begins here",
    "c_pipeline_with_multiple_exit_handlers": "VC5: after a failure nothing begins here",
}


def differing() -> list[str]:
    """The pipelines of which a state or a value differed when they were recorded."""
    names = dict.fromkeys(row["pipeline"] for row in table() if not row["same"])
    return list(names)


def end_of(name: str, folder: Path) -> str:
    """How a recorded pipeline ends now, in a few words."""
    if WITHOUT_SOURCE.fullmatch(name):
        return "its source is not here"
    if name in REFUSED:
        return "refused as it is read, or here"
    if name not in EXCEPTIONS:
        return "equal"
    text = source_of(name)
    assert text is not None
    graph = read(text)
    arguments = arguments_of(name, graph, folder)
    try:
        definition = compile(text, graph, arguments, KubeflowSpec(image="train:1"))
    except UnsupportedError:
        return "refused"
    if name in OF_ITS_OWN:
        return OF_ITS_OWN[name]
    if definition.notices:
        return "said when compiled"
    features = {use.feature for use in uses(graph, arguments)}
    if features & ANOTHER_FORM:
        return "another form"
    if name in SAID_BY_A_RUN:
        return "said by a run here"
    return ""


def test_each_difference_has_its_end(tmp_path: Path) -> None:
    ends: dict[str, list[str]] = collections.defaultdict(list)
    for name in differing():
        ends[end_of(name, tmp_path)].append(name)
    print()
    for end, names in ends.items():
        print(f"{len(names):>3} {end}: {', '.join(sorted(names))}")
    assert ends.pop("", []) == []
    assert sum(map(len, ends.values())) >= 63


def test_what_succeeds_here_and_fails_there_is_refused_said_or_avoided(tmp_path: Path) -> None:
    taken = []
    for row in table():
        succeeded_here = row["rekindle"]["state"] == "succeeded"
        if row["task"] is None and succeeded_here and row["kfp"]["state"] != "SUCCEEDED":
            taken.append(row["pipeline"])
    for name in taken:
        assert end_of(name, tmp_path) not in ("", OF_ITS_OWN.get(name)), name
    assert len(taken) >= 30


@pytest.mark.parametrize("feature", sorted(ANOTHER_FORM))
def test_the_table_says_so_too(feature: str) -> None:
    assert feature_rows()[feature].on["kubeflow"].verdict == "emulated"
