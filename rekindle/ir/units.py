"""What a platform that runs KFP's own encoding caches a step by: its container, and the values and
artifacts that reach it.

Every input is followed through nested pipelines to where it comes from: a value, a parameter of the
pipeline, or an output of a step."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.ir.graph import (
    Constant,
    Dag,
    FinalStatus,
    Formatted,
    FromInput,
    FromTask,
    Graph,
    Step,
    SubDag,
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """Where an input comes from: what is known of it as text, and the steps that give the rest."""

    text: str = ""
    steps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step, and where each of its inputs comes from in the end."""

    step: Step
    parameters: Mapping[str, Traced]
    artifacts: Mapping[str, Traced]


Scope = Mapping[str, Traced]


def traced(graph: Graph, values: Mapping[str, Any]) -> tuple[TracedStep, ...]:
    """Every step in topological order; `values` are those of the pipeline's parameters."""
    found: list[TracedStep] = []
    _walk(graph.dag, {name: Traced(repr(value)) for name, value in values.items()}, found)
    return tuple(found)


def _walk(dag: Dag, scope: Scope, found: list[TracedStep]) -> Scope:
    """Steps of a Dag; what its outputs come from."""
    ended: dict[tuple[str, str], Traced] = {}
    for node in dag.ordered():
        bindings: dict[str, Any] = {**node.parameters, **node.artifacts}
        inputs = {name: _of(binding, scope, ended) for name, binding in bindings.items()}
        if isinstance(node, SubDag):
            for name, output in _walk(node.dag, _inside(node, inputs), found).items():
                ended[node.name, name] = output
            continue
        for name in (*node.outputs.parameters, *node.outputs.artifacts):
            ended[node.name, name] = Traced(steps=(node.path,))
        if isinstance(node, Step):
            artifacts = {name: inputs[name] for name in node.artifacts}
            parameters = {name: inputs[name] for name in node.parameters}
            found.append(TracedStep(node, parameters, artifacts))
    several = {**dag.parameters, **dag.artifacts}
    return {n: _joined(ended[s.task, s.output] for s in each) for n, each in several.items()}


def _inside(node: SubDag, inputs: Scope) -> Scope:
    """What the inputs of a nested Dag stand for; a loop's item comes from its list."""
    known = {name: Traced(repr(p.default)) for name, p in node.inputs.parameters.items()}
    scope = {**known, **inputs}
    if node.loop is not None:
        items = node.loop.items
        scope[node.loop.item] = scope[items] if isinstance(items, str) else Traced(repr(items))
    return scope


def _of(binding: Any, scope: Scope, ended: Mapping[tuple[str, str], Traced]) -> Traced:
    match binding:
        case Constant(value) | Formatted(value):  # what that reads are inputs of the same node
            return Traced(repr(value))
        case FromInput(name):
            return scope.get(name, Traced())
        case FromTask(task, output):
            return ended.get((task, output), Traced())
        case FinalStatus(task):
            return Traced(steps=(task,))
    raise AssertionError(binding)


def _joined(several: Iterator[Traced]) -> Traced:
    parts = list(several)
    steps = tuple(dict.fromkeys(step for part in parts for step in part.steps))
    return Traced(" | ".join(part.text for part in parts if part.text), steps)
