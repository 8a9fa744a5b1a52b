"""What a node stands in: the Dag around it, what is known of its inputs, and which of them
have no value."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rekindle.ir import graph as ir


@dataclasses.dataclass(frozen=True)
class Scope:
    """What a node stands in."""

    dag: ir.Dag
    """The Dag around it."""
    inputs: ir.Ports
    """The inputs of that Dag."""
    known: Mapping[str, Any]
    """Its parameters that the arguments of a run decide; empty where none are known."""
    absent_artifacts: frozenset[str]
    """Its optional artifacts that nothing gives: those of a pipeline are never given."""
    is_conditional: bool = False
    """Whether a condition around it may leave all of it out."""
    items: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    """Of a loop over a list that is written in it: the items, by the input that has one."""
    is_chosen: bool = False
    """Whether it is in a branch that a OneOf chooses from."""
    is_watched: bool = False
    """Whether it is in what another node reads the final status of."""


def scopes(
    graph: ir.Graph, inputs_of_dags: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[ir.AnyNode, Scope]]:
    """Every node at every depth with what it stands in."""
    root_known = inputs_of_dags.get("", {})
    root = Scope(graph.dag, graph.inputs, root_known, _optional_artifacts(graph.inputs))
    by_path = {"": root}
    for node in graph.nodes():
        scope = by_path[node.path.rpartition("/")[0]]
        yield node, scope
        if isinstance(node, ir.SubDag):
            not_given = set(absent_artifacts(node, scope))
            absent = _optional_artifacts(node.inputs) - set(node.artifacts) | not_given
            known = inputs_of_dags.get(node.path, {})
            is_conditional = scope.is_conditional or node.condition is not None
            by_path[node.path] = Scope(
                node.dag,
                node.inputs,
                known,
                absent,
                is_conditional,
                items=_written_items(node),
                is_chosen=is_chosen(node, scope),
                is_watched=is_watched(node, scope),
            )


def is_chosen(node: ir.Node, scope: Scope) -> bool:
    """Whether a node is a branch that a OneOf chooses from, or in one."""
    if scope.is_chosen:
        return True
    outputs = [*scope.dag.parameters.values(), *scope.dag.artifacts.values()]
    choices = [sources for sources in outputs if len(sources) > 1]
    return any(source.task == node.name for sources in choices for source in sources)


def is_watched(node: ir.Node, scope: Scope) -> bool:
    """Whether another node reads the final status of a node, or of one that it is in."""
    if scope.is_watched:
        return True
    for reader in scope.dag.nodes.values():
        for binding in reader.parameters.values():
            if isinstance(binding, ir.FinalStatus) and binding.task == node.name:
                return True
    return False


def _written_items(node: ir.SubDag) -> dict[str, Sequence[Any]]:
    if node.loop is None or isinstance(node.loop.items, str):
        return {}
    return {node.loop.item: node.loop.items}


def _optional_artifacts(ports: ir.Ports) -> frozenset[str]:
    return frozenset(name for name, artifact in ports.artifacts.items() if artifact.optional)


def absent_parameters(node: ir.AnyNode, scope: Scope) -> Iterator[str]:
    """The parameters of a node that are bound to what has no value, as far as KFP's driver
    fails at them or takes them for another value."""
    for name, binding in node.parameters.items():
        if not isinstance(binding, ir.FromInput):
            continue
        if binding.name not in scope.known or scope.known[binding.name] is not None:
            continue
        if isinstance(node, ir.SubDag):
            # what is no input of it stands in a text for another one
            if name not in node.inputs.parameters or _is_asked_for(node, name):
                continue
        elif not _is_left_to_its_default(node, name, scope.inputs.parameters.get(binding.name)):
            continue
        yield name


def _is_asked_for(node: ir.SubDag, name: str) -> bool:
    """Whether the condition of a node, or its loop, reads an input."""
    if node.loop is not None and node.loop.items == name:
        return True
    return node.condition is not None and f"'{name}'" in node.condition.text


def _is_left_to_its_default(node: ir.Node, name: str, outer: ir.Parameter | None) -> bool:
    """Whether nothing has to be bound to an optional input of a step, and KFP wants it so.

    A Python component takes its default where the driver reads null. The arguments of a
    container know no defaults, and what kfp makes of a condition or a loop has no optional
    inputs: null would end there."""
    port = node.inputs.parameters.get(name)
    if port is None or not port.optional:
        return False
    if isinstance(node, ir.Step) and not node.container.source:
        return True
    return outer is not None and not outer.optional


def absent_artifacts(node: ir.Node, scope: Scope) -> Iterator[str]:
    """The artifacts of a node that are bound to one that nothing gives, and need not be."""
    for name, source in node.artifacts.items():
        port = node.inputs.artifacts.get(name)
        if port is None or not isinstance(source, ir.FromInput):
            continue
        if source.name in scope.absent_artifacts and (port.optional or _is_of_group(node)):
            yield name


def _is_of_group(node: ir.Node) -> bool:
    """Whether kfp made a node of a condition, a loop or an exit handler."""
    return isinstance(node, ir.SubDag) and (
        node.condition is not None
        or node.loop is not None
        or node.name.startswith(("exit-handler-", "condition-"))
    )
