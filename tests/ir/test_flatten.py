"""Flattening: nested Dags and loops as a list of steps, each input traced to where it comes from."""

from __future__ import annotations

import pytest
import yaml

from rekindle.errors import UnsupportedError
from rekindle.ir.features import uses
from rekindle.ir.flatten import (
    FirstOf,
    Given,
    Listed,
    Output,
    TemplatedConstant,
    Typed,
    flatten,
    sources,
)
from rekindle.ir.graph import Constant, Graph
from rekindle.ir.placeholders import Reference, Template
from rekindle.ir.read.pipeline import read
from tests.platforms.local.runs import graph
from tests.support.read_pipeline import looped, minimal

LOOPS = {"loops", "loops_over_arguments", "loops_over_outputs"}


def test_a_nested_pipeline_is_opened() -> None:
    flat = {f.path: f for f in flatten(graph("loop_over_nested_pipelines", "same"), {})}
    turns = [f"for-loop-2/{i}/pairs-of/for-loop-2/{j}/pair" for i in range(2) for j in range(2)]
    assert [path for path in flat if path.endswith("pair")] == turns
    assert flat[turns[1]].parameters == {"a": Constant("x"), "b": Constant("2")}
    inner = flat["for-loop-2/0/joined"].parameters["items"]
    assert inner == Listed((Output(turns[0], "Output"), Output(turns[1], "Output")))
    assert list(sources(flat["joined-2"].parameters["items"])) == [
        Output("for-loop-2/0/joined", "Output"),
        Output("for-loop-2/1/joined", "Output"),
    ]


def test_elements_of_constants_are_looked_up_at_once() -> None:
    flat = flatten(graph("loop_over_structs", "same"), {})
    assert [f.parameters for f in flat if f.path.endswith("pair")] == [
        {"a": Constant("x"), "b": Constant("1")},
        {"a": Constant("y"), "b": Constant("2")},
    ]


def test_conditions_become_guards_and_one_of_several_a_choice() -> None:
    flat = {f.path: f for f in flatten(graph("one_of_artifacts", "same"), {})}
    up, down = (f for path, f in flat.items() if "write" in path)
    assert [str(guard.expression) for guard in up.guards] == ["positive-Output == true"]
    assert [str(guard.expression) for guard in down.guards] == ["not (positive-Output == true)"]
    (value,) = up.guards[0].values.values()
    assert value == Output("positive", "Output")
    assert flat["read"].artifacts["data"] == FirstOf(
        (Output(up.path, "data"), Output(down.path, "data"))
    )


def test_parameters_of_the_pipeline_stay_parameters_and_waiting_reaches_into_nested_ones() -> None:
    flat = {f.path: f for f in flatten(graph("nested", "same"), {})}
    assert flat["inner/add"].parameters == {"a": Given("a"), "b": Constant(10)}
    assert flat["inner-2/add"].parameters["a"] == Output("inner/add", "Output")
    assert flat["inner-2/write"].after == ("inner/add", "inner/write")


def test_a_loop_over_a_nested_pipelines_argument_is_unrolled_with_what_is_given() -> None:
    looped = graph("loops_over_what_was_given", "same")
    flat = {f.path: f for f in flatten(looped, {"items": ["p", "q"], "times": 2})}
    assert [path for path in flat if "greet" in path] == [
        "each/for-loop-1/0/greet",
        "each/for-loop-1/1/greet",
        "for-loop-2/0/for-loop-3/0/greet",
        "for-loop-2/0/for-loop-3/1/greet",
        "for-loop-2/1/for-loop-3/0/greet",
    ]
    assert flat["each/for-loop-1/1/greet"].parameters == {"name": Constant("q")}
    assert flat["add"].parameters["a"] == Given("times"), "others stay what a run gives"
    assert flat["joined"].parameters["items"] == Constant(["p", "q"]), "one list everywhere"
    assert {use.feature for use in uses(looped)} & LOOPS == {"loops", "loops_over_arguments"}


@pytest.mark.parametrize("name", ["loop_over_an_output", "loop_over_made_structs"])
def test_what_is_known_at_run_time_only_has_no_flat_form(name: str) -> None:
    assert {use.feature for use in uses(graph(name, "same"))} & LOOPS == {"loops_over_outputs"}
    with pytest.raises(UnsupportedError, match="known at run time only"):
        flatten(graph(name, "same"), {})


def test_with_a_limit_a_turn_waits_for_the_end_of_an_earlier_one() -> None:
    flat = {f.path: f for f in flatten(graph("limited_loop", "same"), {})}
    turns = {
        path: [p for p in f.after if p[:12] != path[:12]]
        for path, f in flat.items()
        if path != "joined"
    }
    first = turns.pop("for-loop-2/2/greet")
    assert first == ["for-loop-2/0/greet-2", "for-loop-2/0/greet-3"]
    assert len(turns) == 8
    assert not any(turns.values()), "the turns before run at once, and greet waits for the others"


def test_placeholders_in_the_default_of_a_component_are_text_that_is_put_together() -> None:
    spec = minimal()
    inputs = spec["components"]["comp-a"]["inputDefinitions"]["parameters"]
    inputs["at"] = {"parameterType": "STRING", "defaultValue": "{{$.pipeline_root}}/x"}
    first, _ = flatten(read(yaml.safe_dump(spec)), {})
    root = Template((Reference(("run", "pipeline_root")), "/x"))
    assert first.parameters == {"n": Constant(3), "at": TemplatedConstant(root, {"n": Constant(3)})}


def looped_over(items: str, kind: str) -> Graph:
    """A loop over `items`, which are inputs of `kind` there."""
    spec = looped(items={"raw": items})
    spec["components"]["comp-inner"]["inputDefinitions"]["parameters"]["n"]["parameterType"] = kind
    return read(yaml.safe_dump(spec))


def test_items_that_are_known_are_bound_by_the_types_of_the_inputs_that_receive_them() -> None:
    flat = flatten(looped_over("[1, 2.0]", "NUMBER_DOUBLE"), {})
    values = [f.parameters["n"] for f in flat if f.path.endswith("/a")]
    assert [repr(value) for value in values] == ["Constant(value=1)", "Constant(value=2)"]


@pytest.mark.parametrize("items", ['["x"]', "[true]", "[null]", "[[1]]", '[1, "x"]'])
def test_a_known_item_of_a_wrong_kind_is_refused_with_its_place(items: str) -> None:
    with pytest.raises(UnsupportedError, match=r"the input `n` of `inner/[01]`") as caught:
        flatten(looped_over(items, "NUMBER_INTEGER"), {})
    assert caught.value.problems[0].where == "root.dag.tasks.inner.inputs.parameters.n"


def test_a_wrong_kind_in_a_branch_that_may_not_be_taken_is_left_to_the_run() -> None:
    flat = {f.path: f for f in flatten(graph("guarded_kinds", "typed"), {"rows": GUARDED})}
    first, second = (f for path, f in flat.items() if path.endswith("as-int"))
    assert first.parameters["v"] == Constant(1)
    assert second.parameters["v"] == Typed(Constant("x"), "NUMBER_INTEGER")
    assert [str(guard.expression) for guard in second.guards] == [
        "rows-loop-item-subvar-kind == 'number'"
    ]


GUARDED = [{"kind": "number", "v": 1}, {"kind": "text", "v": "x"}]
