"""What the inputs of every node depend on: on nothing that a run changes, on arguments of the
pipeline, or on what steps give.

Platforms without loops of their own unroll those whose lists are known when the pipeline is
compiled; this says which those are. Follows the bindings of the Graph, outermost Dag first."""

from collections.abc import Mapping
from typing import Any

from rekindle.ir.graph import Constant, Dag, FromInput, Graph, Node, SubDag
from rekindle.ir.placeholders import has_templates

# the arguments that a value comes from, none for a constant; None: a run alone knows it
Origin = frozenset[str] | None
_CONSTANT: Origin = frozenset()


def loop_origins(graph: Graph) -> dict[str, Origin]:
    """Where the list of every loop comes from, by the path of its node."""
    found: dict[str, Origin] = {}
    _walk(graph.dag, {name: frozenset({name}) for name in graph.inputs.parameters}, found)
    return found


def looped_over(graph: Graph) -> frozenset[str]:
    """The arguments that decide which steps there are once all loops are unrolled."""
    return frozenset().union(*filter(None, loop_origins(graph).values()))


def _walk(dag: Dag, scope: Mapping[str, Origin], found: dict[str, Origin]) -> None:
    for node in dag.ordered():
        if not isinstance(node, SubDag):
            continue
        defaults = {name: parameter.default for name, parameter in node.inputs.parameters.items()}
        inputs = {name: None if has_templates(d) else _CONSTANT for name, d in defaults.items()}
        for name, bound in node.parameters.items():
            outer = scope.get(bound.name, _CONSTANT) if isinstance(bound, FromInput) else None
            inputs[name] = _CONSTANT if isinstance(bound, Constant) else outer
        if node.loop is not None:
            items = node.loop.items
            if isinstance(items, str):
                over = None if node.loop.artifacts else inputs.get(items)
            else:
                over = None if has_templates(items) else _CONSTANT
            found[node.path] = inputs[node.loop.item] = over
        _walk(node.dag, inputs, found)


def known_inputs(graph: Graph, arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The inputs of every Dag, by its node's path and name, that `arguments` decide."""
    given = {n: p.default for n, p in graph.inputs.parameters.items()}
    given |= {name: value for name, value in arguments.items() if value is not None}
    found = {"": given}
    for node in graph.nodes():
        if isinstance(node, SubDag):
            found[node.path] = known_values(node, found)
            if node.loop is not None:
                found[node.path].pop(node.loop.item, None)
    return found


def known_values(node: Node, dags: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The inputs of a node that the known ones of the Dags around it (`dags`) decide."""
    around, found = dags[node.path.rpartition("/")[0]], dict[str, Any]()
    defaults = {name: parameter.default for name, parameter in node.inputs.parameters.items()}
    for name in {**defaults, **node.parameters}:
        match node.parameters.get(name, Constant(None)):
            case Constant(value):
                pass
            case FromInput(outer, ()) if outer in around:
                value = around[outer]
            case _:
                continue
        value = defaults.get(name) if value is None else value
        if not has_templates(value):
            found[name] = value
    return found
