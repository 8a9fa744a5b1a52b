"""What the inputs of every node depend on: on nothing that a run changes, on arguments of
the pipeline, or on what steps give.

Platforms without loops of their own unroll those whose lists are known when the pipeline
is compiled; this says which those are. Follows the bindings of the Graph, outermost Dag
first."""

from collections.abc import Mapping
from typing import Any

from rekindle.ir.graph import Constant, Dag, FromInput, Graph, Loop, Node, SubDag
from rekindle.ir.placeholders import has_templates

# the arguments that a value comes from, none for a constant; None: a run alone knows it
Origin = frozenset[str] | None
_CONSTANT: Origin = frozenset()


def loop_origins(graph: Graph) -> dict[str, Origin]:
    """Where the list of every loop comes from, by the path of its node."""
    origins: dict[str, Origin] = {}
    scope = {name: frozenset({name}) for name in graph.inputs.parameters}
    _add_loops(graph.dag, scope, origins)
    return origins


def looped_over(graph: Graph) -> frozenset[str]:
    """The arguments that decide which steps there are once all loops are unrolled."""
    arguments = set[str]()
    for origin in loop_origins(graph).values():
        arguments |= origin or frozenset()
    return frozenset(arguments)


def _add_loops(dag: Dag, scope: Mapping[str, Origin], origins: dict[str, Origin]) -> None:
    """Add the loops of a Dag whose inputs have the origins in `scope`, and those inside."""
    for node in dag.ordered():
        if not isinstance(node, SubDag):
            continue
        inputs = _input_origins(node, scope)
        if node.loop is not None:
            origin = _items_origin(node.loop, inputs)
            origins[node.path] = origin
            inputs[node.loop.item] = origin
        _add_loops(node.dag, inputs, origins)


def _input_origins(node: SubDag, scope: Mapping[str, Origin]) -> dict[str, Origin]:
    """Where the inputs of a node come from."""
    origins: dict[str, Origin] = {}
    for name, parameter in node.inputs.parameters.items():
        origins[name] = _written_origin(parameter.default)
    for name, binding in node.parameters.items():
        match binding:
            case Constant():
                origins[name] = _CONSTANT
            case FromInput(outer_name):
                origins[name] = scope.get(outer_name, _CONSTANT)
            case _:
                origins[name] = None
    return origins


def _items_origin(loop: Loop, inputs: Mapping[str, Origin]) -> Origin:
    """Where the list comes from that a loop goes over."""
    if not isinstance(loop.items, str):
        return _written_origin(loop.items)
    return None if loop.artifacts else inputs.get(loop.items)


def _written_origin(value: Any) -> Origin:
    """Where a value comes from that is written in the pipeline: Templates wait for a run."""
    return None if has_templates(value) else _CONSTANT


def known_inputs(graph: Graph, arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The inputs of every Dag, by its node's path and name, that `arguments` decide."""
    of_pipeline = {name: port.default for name, port in graph.inputs.parameters.items()}
    of_pipeline |= {name: value for name, value in arguments.items() if value is not None}
    inputs_of_dags = {"": of_pipeline}
    for node in graph.nodes():
        if isinstance(node, SubDag):
            inputs = known_values(node, inputs_of_dags)
            if node.loop is not None:  # each turn has another item
                inputs.pop(node.loop.item, None)
            inputs_of_dags[node.path] = inputs
    return inputs_of_dags


def known_values(node: Node, dags: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The inputs of a node that the known ones of the Dags around it (`dags`) decide."""
    outer_inputs = dags[node.path.rpartition("/")[0]]
    defaults = {name: parameter.default for name, parameter in node.inputs.parameters.items()}
    values = dict[str, Any]()
    for name in {**defaults, **node.parameters}:
        match node.parameters.get(name, Constant(None)):
            case Constant(value):
                pass
            case FromInput(outer_name, ()) if outer_name in outer_inputs:
                value = outer_inputs[outer_name]
            case _:
                continue
        if value is None:
            value = defaults.get(name)
        if not has_templates(value):
            values[name] = value
    return values
