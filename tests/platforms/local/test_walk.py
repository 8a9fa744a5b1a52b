"""What follows what, on Graphs made by hand where KFP's compiler would not write such a thing."""

from __future__ import annotations

import yaml

from rekindle.ir.graph import Graph
from rekindle.ir.read import read
from rekindle.platforms.local.cache import Values
from rekindle.platforms.local.walk import Ready, Skipped, Walk, dependents
from tests.ir.test_read import minimal, nested


def walk_of(graph: Graph, **arguments: object) -> Walk:
    return Walk(graph, arguments, lambda node: {"pipeline_job_name": "job"})


def told(walk: Walk) -> list[str]:
    """What the walk says now: `name` for a step to run, `name: reason` for one that will not."""
    return [
        item.step.path + (f": {item.reason}" if isinstance(item, Skipped) else "")
        for item in walk.advance()
    ]


def conditional() -> Graph:
    """Two steps, `a` under a condition on the pipeline's n, `b` after it without reading from it."""
    spec = minimal()
    tasks = spec["root"]["dag"]["tasks"]
    spec["root"]["inputDefinitions"] = {"parameters": {"n": {"parameterType": "NUMBER_INTEGER"}}}
    tasks["a"]["inputs"]["parameters"]["n"] = {"componentInputParameter": "n"}
    tasks["a"]["triggerPolicy"] = {"condition": "int(inputs.parameter_values['n']) > 1"}
    tasks["b"]["inputs"] = {}
    return read(yaml.safe_dump(spec))


def test_a_step_after_a_skipped_one_is_skipped_too() -> None:
    walk = walk_of(conditional(), n=1)
    assert told(walk) == ["a: its condition is false: n > 1", "b: `a` was skipped"]
    assert walk.finished


def test_a_step_waits_for_the_one_before_it() -> None:
    graph = conditional()
    walk = walk_of(graph, n=2)
    assert told(walk) == ["a"]
    assert told(walk) == []
    walk.ended(graph.steps()[0], Values({"Output": 5}))
    assert told(walk) == ["b"]


def test_values_travel_into_nested_dags_and_out_again() -> None:
    graph = read(yaml.safe_dump(nested()))
    walk = walk_of(graph)
    (ready,) = walk.advance()
    assert isinstance(ready, Ready)
    assert ready.step.path == "inner/a"
    assert ready.inputs == Values({"n": 1})
    walk.ended(ready.step, Values({"Output": 7}))
    (ready,) = walk.advance()
    assert isinstance(ready, Ready)
    assert ready.inputs == Values({"n": 7})
    walk.ended(ready.step, Values({"Output": 8}))
    assert told(walk) == []
    assert walk.finished


def test_dependents_cross_the_borders_of_dags() -> None:
    spec = nested()
    spec["root"]["dag"]["tasks"]["after"] = {
        "componentRef": {"name": "comp-a"},
        "dependentTasks": ["inner"],
        "inputs": {"parameters": {"n": {"runtimeValue": {"constant": 1.0}}}},
    }
    graph = read(yaml.safe_dump(spec))
    assert dependents(graph, "inner/a") == {"inner/b", "after"}
    assert dependents(graph, "inner/b") == {"after"}
    assert dependents(graph, "inner") == {"after"}
    assert dependents(graph, "after") == frozenset()
