"""What follows what, on Graphs made by hand where KFP's compiler would not write such a thing."""

from __future__ import annotations

import re

import pytest
import yaml

from rekindle.ir.graph import Graph
from rekindle.ir.read.pipeline import read
from rekindle.platforms.local.cache import Values
from rekindle.platforms.local.walk import Ready, Refused, Skipped, Unrolled, Walk, dependents
from tests.support.read_pipeline import looped, minimal, nested


def walk_of(graph: Graph, **arguments: object) -> Walk:
    return Walk(graph, arguments, lambda node: {"pipeline_job_name": "job"})


def told(walk: Walk) -> list[str]:
    """What the walk says now: `name` for a step to run, `name: reason` for one that will not."""
    return [
        f"{item.path}: {item.reason}" if isinstance(item, Skipped) else item.node.path
        for item in walk.advance()
        if not isinstance(item, Unrolled)
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
    walk.succeeded("a", Values({"Output": 5}))
    assert told(walk) == ["b"]


def test_values_travel_into_nested_dags_and_out_again() -> None:
    graph = read(yaml.safe_dump(nested()))
    walk = walk_of(graph)
    (ready,) = walk.advance()
    assert isinstance(ready, Ready)
    assert ready.node.path == "inner/a"
    assert ready.inputs == Values({"n": 1})
    walk.succeeded(ready.node.path, Values({"Output": 7}))
    (ready,) = walk.advance()
    assert isinstance(ready, Ready)
    assert ready.inputs == Values({"n": 7})
    walk.succeeded(ready.node.path, Values({"Output": 8}))
    assert told(walk) == []
    assert walk.finished


@pytest.mark.parametrize("items", ["no list", "3", {"a": 1}])
def test_a_loop_over_something_else_than_a_list_is_an_error(items: object) -> None:
    spec = looped(items={"inputParameter": "many"})
    task = spec["root"]["dag"]["tasks"]["inner"]
    task["inputs"]["parameters"]["many"] = {"runtimeValue": {"constant": items}}
    walk = walk_of(read(yaml.safe_dump(spec)))
    refused = next(walk.advance())
    assert isinstance(refused, Refused)
    assert refused.path == "inner"
    assert re.match(r"`inner` loops over .*, which is not a list", str(refused.error))


def test_as_many_turns_of_a_loop_are_open_as_its_limit_says() -> None:
    walk = walk_of(read(yaml.safe_dump(looped(items={"raw": "[1, 2, 3]"}))))
    assert told(walk) == ["inner/0/a", "inner/1/a"]
    walk.succeeded("inner/1/a", Values({"Output": 5}))
    assert told(walk) == ["inner/1/b"]
    walk.succeeded("inner/1/b", Values({"Output": 5}))
    assert told(walk) == ["inner/2/a"]


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


def mixed(items: str) -> Graph:
    """A loop over `items`, which are whole numbers to it."""
    spec = looped(items={"raw": items})
    del spec["root"]["dag"]["tasks"]["inner"]["iteratorPolicy"]
    return read(yaml.safe_dump(spec))


def test_a_loop_over_mixed_types_refuses_the_turns_that_do_not_fit_and_begins_the_others() -> None:
    walk = walk_of(mixed('[1, "x", 2.0, null, true]'))
    news = list(walk.advance())
    refused = {item.path: str(item.error.problems[0]) for item in news if isinstance(item, Refused)}
    assert refused.keys() == {"inner/1", "inner/3", "inner/4"}
    assert refused["inner/1"].startswith(
        "the input `n` of `inner/1`: 'x' is not a whole number\n"
        "  where: root.dag.tasks.inner.inputs.parameters.n\n"
        "  fix:   give it a value of its type"
    )
    begun = [
        (item.node.path, item.inputs.parameters["n"]) for item in news if isinstance(item, Ready)
    ]
    assert [(path, repr(n)) for path, n in begun] == [("inner/0/a", "1"), ("inner/2/a", "2")]
    skipped = [item for item in news if isinstance(item, Skipped)]
    assert ("inner/1/a", "`inner/1` failed") in {(item.path, item.reason) for item in skipped}


def test_after_a_refusal_nothing_new_begins() -> None:
    walk = walk_of(mixed('[1, "x"]'))
    list(walk.advance())
    walk.succeeded("inner/0/a", Values({"Output": 5}))
    assert told(walk) == ["inner/0/b: the run stopped when `inner/1` failed"]
    assert walk.finished
