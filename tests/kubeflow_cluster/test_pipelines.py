"""The pipelines of tests/platforms/pipelines give on the cluster what they give here, value by value."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kfp.dsl.graph_component import GraphComponent

from rekindle.errors import RequestError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from tests.kubeflow_cluster.cluster import Suite
from tests.kubeflow_cluster.shown import shown, with_shown_outputs
from tests.platforms.local.runs import module
from tests.support.recorded import CORE, run_here
from tests.support.values import arguments as usual_arguments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Pipelines and their arguments, by file and name."""
    same, typed, backend = module("same"), module("typed"), module("backend")
    rows = {**same.CASES, **same.KNOWN_BUGS}
    found = {f"same-{name}": (row[0], row[1]) for name, row in rows.items()}
    found |= {f"typed-{name}": (getattr(typed, name), {}) for name in CORE}
    made = {n: p for n, p in vars(backend).items() if isinstance(p, GraphComponent)}
    return found | {f"backend-{name}": (pipeline, {}) for name, pipeline in made.items()}


CASES = cases()
# what differs from run to run
OF_THE_RUN = {"backend-facts": "the name of the run is one of its values"}


@pytest.mark.parametrize("case", CASES)
def test_values_on_the_cluster_are_those_of_a_run_here(
    case: str, suite: Suite, tmp_path: Path
) -> None:
    if case in OF_THE_RUN:
        pytest.skip(OF_THE_RUN[case])
    pipeline, own_arguments = CASES[case]
    text = with_shown_outputs(compile_function(pipeline))
    graph = read(text)
    arguments = {**usual_arguments(graph), **own_arguments}
    if {"folder", "other", "uri"} & graph.inputs.parameters.keys():
        pytest.skip("it needs files that all its steps see, which pods do not share")
    config = suite.config(text, arguments)
    if refusal := suite.refusal(config):
        pytest.skip(f"refused for Kubeflow: {refusal}")
    try:
        here = run_here(graph, arguments, tmp_path / "here")
    except RequestError as error:
        pytest.skip(f"refused here: {error}")
    run = suite.submit(config)
    status = suite.wait_for_end(run, 3000)
    values_here = shown(Path(step.log).read_text() for step in here.steps if step.log)
    values_there = shown(suite.pod_logs(run))
    assert status == here.status
    if status == "succeeded":
        assert values_there == values_here
    else:  # here nothing begins after a failure, and there parallel parts go on
        assert Counter(values_here) <= Counter(values_there)
