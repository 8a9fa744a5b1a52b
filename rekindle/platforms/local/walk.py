"""The order of things: which steps can begin, with which inputs, and which never will, and why.

A `Walk` is the state of one run over a Graph, without any process or file. The scheduler asks it
what is `ready`, tells it what has `ended`, and it opens nested Dags, decides conditions and carries
values along on its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rekindle.errors import StepError
from rekindle.ir.condition import evaluate
from rekindle.ir.graph import (
    Binding,
    Constant,
    Dag,
    Formatted,
    FromInput,
    FromTask,
    Graph,
    Step,
    SubDag,
)
from rekindle.ir.placeholders import Template, lower
from rekindle.ir.values import integral
from rekindle.launch import shim
from rekindle.platforms.local.cache import Stored, Values

RunFacts = Callable[[Step | SubDag], Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Ready:
    """A step whose turn it is."""

    step: Step
    inputs: Values


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that will not run."""

    step: Step
    reason: str


@dataclasses.dataclass
class _Frame:
    """One Dag being walked: what came out of each node that ended (None = skipped)."""

    dag: Dag
    inputs: Values
    node: SubDag | None = None
    parent: _Frame | None = None
    begun: set[str] = dataclasses.field(default_factory=set)
    ended: dict[str, Values | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = self.dag.ordered()

    def done(self) -> bool:
        return len(self.ended) == len(self.dag.nodes)

    def outputs(self) -> Values:
        return Values(
            {
                n: v
                for n, s in self.dag.parameters.items()
                if (v := self.first(s, "parameters")) is not None
            },
            {
                n: v
                for n, s in self.dag.artifacts.items()
                if (v := self.first(s, "artifacts")) is not None
            },
        )

    def first(self, sources: tuple[FromTask, ...], kind: str) -> Any:
        for source in sources:
            values = self.ended.get(source.task)
            if values is not None and source.output in getattr(values, kind):
                return getattr(values, kind)[source.output]
        return None


class Walk:
    """One pass over `graph` with its parameters bound to `arguments`."""

    def __init__(self, graph: Graph, arguments: Mapping[str, Any], run_facts: RunFacts) -> None:
        self.run_facts = run_facts
        self.root = _Frame(graph.dag, Values(arguments))
        self.frames: list[_Frame] = [self.root]
        self.home: dict[str, _Frame] = {}

    @property
    def finished(self) -> bool:
        return self.root.done()

    def outputs(self) -> Values:
        """What came out of the pipeline itself."""
        return self.root.outputs()

    def ended(self, step: Step, outputs: Values) -> None:
        """`step` succeeded with `outputs`."""
        self.home[step.path].ended[step.name] = outputs

    def advance(self) -> Iterator[Ready | Skipped]:
        """Everything that became decidable since the last call; StepError where a condition cannot
        be decided."""
        moved = True
        while moved:
            moved = False
            for frame in list(self.frames):
                for node in frame.order:
                    if node.name not in frame.begun and all(
                        u in frame.ended for u in node.upstream
                    ):
                        frame.begun.add(node.name)
                        self.home[node.path] = frame
                        moved = True
                        yield from self._begin(frame, node)
            moved = self._close_frames() or moved

    def _begin(self, frame: _Frame, node: Step | SubDag) -> Iterator[Ready | Skipped]:
        reason = next((f"`{u}` was skipped" for u in node.upstream if frame.ended[u] is None), "")
        if not reason:
            inputs, missing = self._inputs(frame, node)
            if missing:
                reason = f"`{missing}` has no value"
            elif node.condition and not _holds(node, inputs):
                reason = f"its condition is false: {node.condition.expression}"
        if reason:
            frame.ended[node.name] = None
            steps = [node] if isinstance(node, Step) else _steps(node.dag)
            yield from (Skipped(step, reason) for step in steps)
        elif isinstance(node, Step):
            yield Ready(node, inputs)
        else:
            self.frames.append(_Frame(node.dag, inputs, node, frame))

    def _close_frames(self) -> bool:
        done = [f for f in self.frames if f.done() and f.parent is not None]
        for frame in done:
            assert frame.parent is not None
            assert frame.node is not None
            frame.parent.ended[frame.node.name] = frame.outputs()
            self.frames.remove(frame)
        return bool(done)

    def _inputs(self, frame: _Frame, node: Step | SubDag) -> tuple[Values, str]:
        """The node's inputs, and the name of one that an upstream step should have given and did
        not."""
        read = {name: self._parameter(frame, b) for name, b in node.parameters.items()}
        files = {name: self._artifact(frame, b) for name, b in node.artifacts.items()}
        for name, source in (*node.parameters.items(), *node.artifacts.items()):
            if isinstance(source, FromTask) and {**read, **files}[name] is None:
                return Values(), f"{source.task}.{source.output}"
        defaults = {n: p.default for n, p in node.inputs.parameters.items()}
        given = {n: value for n, value in read.items() if value is not None}
        parameters = {n: v for n, v in {**defaults, **given}.items() if v is not None}
        for name, binding in node.parameters.items():
            if isinstance(binding, Formatted):
                parameters[name] = self._format(node, binding.value, parameters)
        return Values(parameters, {n: a for n, a in files.items() if a is not None}), ""

    def _parameter(self, frame: _Frame, binding: Binding) -> Any:
        match binding:
            case Constant(value):
                return value
            case FromInput(name):
                return frame.inputs.parameters.get(name)
            case FromTask():
                return frame.first((binding,), "parameters")
        return None

    def _artifact(self, frame: _Frame, source: FromInput | FromTask) -> Stored | None:
        if isinstance(source, FromInput):
            return frame.inputs.artifacts.get(source.name)
        found: Stored | None = frame.first((source,), "artifacts")
        return found

    def _format(self, node: Step | SubDag, value: Any, parameters: Mapping[str, Any]) -> Any:
        """A formatted constant with its placeholders filled in from the node's other inputs."""
        if isinstance(value, Template):
            inputs = {"parameterValues": dict(parameters), "artifacts": {}}
            context = {"executor_input": {"inputs": inputs}, "run": self.run_facts(node)}
            try:
                return "".join(shim.render(lower(value), context))
            except shim.TaskError as error:
                raise StepError(
                    f"the inputs of `{node.path}`: {error}", where=node.where
                ) from error
        if isinstance(value, list):
            return [self._format(node, item, parameters) for item in value]
        if isinstance(value, dict):
            return {key: self._format(node, item, parameters) for key, item in value.items()}
        return integral(value)


def dependents(graph: Graph, path: str) -> frozenset[str]:
    """Paths of the steps that cannot have run before the node at `path` had, those inside it not
    counted."""
    nodes = list(graph.nodes())
    reached = {path, *_ancestors(path)}
    inside: set[str] = set()
    grown = True
    while grown:
        grown = False
        for node in nodes:
            parent = node.path.rpartition("/")[0]
            siblings = {f"{parent}/{up}" if parent else up for up in node.upstream}
            if node.path not in inside and (siblings & reached or parent in inside):
                inside.add(node.path)
                reached |= {node.path, *_ancestors(node.path)}
                grown = True
    return frozenset(n.path for n in nodes if isinstance(n, Step) and n.path in inside)


def _ancestors(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def _steps(dag: Dag) -> Iterator[Step]:
    for node in dag.ordered():
        if isinstance(node, Step):
            yield node
        else:
            yield from _steps(node.dag)


def _holds(node: Step | SubDag, inputs: Values) -> bool:
    assert node.condition is not None
    try:
        return evaluate(node.condition.expression, inputs.parameters)
    except StepError as error:
        raise StepError(str(error), where=f"{node.where}.triggerPolicy.condition") from error
