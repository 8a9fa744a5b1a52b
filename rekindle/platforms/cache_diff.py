"""Which steps of a compiled pipeline will run again after a change, and why.

A platform takes a step from its cache if the step itself is the same (its `parts`) and so is what
it reads. Values are compared by content where the platform does that; files by the place they lie
at, which is a new one whenever their maker runs again."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.ir import graph as ir
from rekindle.outputs import Verdict

_TASK_PARTS = {
    "source": "its code",
    "command": "its command",
    "args": "its arguments",
    "env": "environment",
    "pip": "packages",
    "guards": "its condition",
    "outputs": "its outputs",
    "retry": "retries",
    "parameters": "constants",
    "training": "machines",
    "nodes": "machines",
    "ranks_per_node": "machines",
}


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """A step as a platform's cache sees it. `parts` are what identifies it, by what people call
    them; `places` are the steps whose files it reads, `values` those of which it reads values."""

    name: str
    cached: bool
    parts: Mapping[str, str]
    places: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


def compare(before: Sequence[CacheKey], after: Sequence[CacheKey]) -> tuple[Verdict, ...]:
    """A verdict a step of `after`, in its order, then the steps that are gone."""
    known = {unit.name: unit for unit in before}
    found: dict[str, Verdict] = {}
    for unit in after:
        found[unit.name] = _verdict(unit, known.get(unit.name), found)
    gone = [Verdict(name, "gone", "it is no longer there") for name in known if name not in found]
    return (*found.values(), *gone)


def _verdict(unit: CacheKey, before: CacheKey | None, sooner: Mapping[str, Verdict]) -> Verdict:
    if before is None:
        return Verdict(unit.name, "yes", "it is new")
    parts = dict.fromkeys([*before.parts, *unit.parts])
    if changed := [part for part in parts if before.parts.get(part) != unit.parts.get(part)]:
        return Verdict(unit.name, "yes", f"changed: {', '.join(changed)}")
    if not unit.cached:
        return Verdict(unit.name, "yes", "it is never taken from the cache")
    for answer in ("yes", "perhaps"):
        for name in unit.places:
            if name in sooner and sooner[name].again == answer:
                may = "may run" if answer == "perhaps" else "runs"
                return Verdict(unit.name, answer, f"it reads files of {name}, which {may} again")
    for name in unit.values:
        if name in sooner and sooner[name].again in ("yes", "perhaps"):
            return Verdict(unit.name, "perhaps", f"if {name} returns something else")
    return Verdict(unit.name, "no", "nothing changed")


def of_graph(graph: ir.Graph, values: Mapping[str, Any]) -> tuple[CacheKey, ...]:
    """The steps of KFP's own encoding: values count by content, artifacts by place. Every input is
    followed through nested pipelines to a value, a parameter (of `values`) or an output of a
    step."""
    found: list[CacheKey] = []
    _walk(graph.dag, {name: _Traced(repr(value)) for name, value in values.items()}, found)
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Where an input comes from: what is known of it as text, and the steps that give the rest."""

    text: str = ""
    steps: tuple[str, ...] = ()


def _walk(dag: ir.Dag, scope: Mapping[str, _Traced], found: list[CacheKey]) -> dict[str, _Traced]:
    """The steps of a Dag; what its outputs come from."""
    ended: dict[tuple[str, str], _Traced] = {}
    for node in dag.ordered():
        bindings: dict[str, ir.Binding] = {**node.parameters, **node.artifacts}
        inputs = {name: _traced(binding, scope, ended) for name, binding in bindings.items()}
        if isinstance(node, ir.SubDag):
            made = _walk(node.dag, _inside(node, inputs), found)
        else:
            names = (*node.outputs.parameters, *node.outputs.artifacts)
            made = dict.fromkeys(names, _Traced(steps=(node.path,)))
        ended |= {(node.name, name): output for name, output in made.items()}
        if isinstance(node, ir.Step):
            found.append(_key(node, inputs))
    several = {**dag.parameters, **dag.artifacts}
    return {n: _joined([ended[s.task, s.output] for s in each]) for n, each in several.items()}


def _inside(node: ir.SubDag, inputs: Mapping[str, _Traced]) -> dict[str, _Traced]:
    """What the inputs of a nested Dag stand for; a loop's item comes from its list."""
    known = {name: _Traced(repr(p.default)) for name, p in node.inputs.parameters.items()}
    scope = {**known, **inputs}
    if node.loop is not None:
        items = node.loop.items
        scope[node.loop.item] = scope[items] if isinstance(items, str) else _Traced(repr(items))
    return scope


def _traced(
    binding: ir.Binding, scope: Mapping[str, _Traced], ended: Mapping[tuple[str, str], _Traced]
) -> _Traced:
    match binding:
        case ir.Constant(value) | ir.Formatted(value):  # whose reads are inputs of the same node
            return _Traced(repr(value))
        case ir.FromInput(name):
            return scope.get(name, _Traced())
        case ir.FromTask(task, output):
            return ended.get((task, output), _Traced())
        case ir.FinalStatus(task):
            return _Traced(steps=(task,))


def _joined(several: Sequence[_Traced]) -> _Traced:
    steps = dict.fromkeys(step for part in several for step in part.steps)
    return _Traced(" | ".join(part.text for part in several if part.text), tuple(steps))


def _key(step: ir.Step, inputs: Mapping[str, _Traced]) -> CacheKey:
    container = step.container
    code = container.source + repr((container.command, container.args))
    parts = {"its code": _digest(code), "image": container.image}
    parts |= {"environment": repr(container.env)}
    parts |= {f"input `{n}`": inputs[n].text for n in step.parameters if inputs[n].text}
    files = _joined([inputs[name] for name in step.artifacts]).steps
    values = _joined([inputs[name] for name in step.parameters]).steps
    return CacheKey(step.path, step.cache, parts, files, values)


def of_bundle(folder: str, files: Mapping[str, bytes]) -> dict[str, str]:
    """The parts of a step that travels in a bundle: what its task says, and what runs it."""
    inside = {name: content for name, content in files.items() if name.startswith(f"{folder}/")}
    task = json.loads(inside.pop(f"{folder}/task.json", b"{}"))
    parts = dict.fromkeys(_TASK_PARTS.values(), "")
    for key, said in _TASK_PARTS.items():
        parts[said] += json.dumps(task.get(key), sort_keys=True)
    own = {name.removeprefix(folder): _digest(content) for name, content in inside.items()}
    return {**parts, "rekindle's own part": json.dumps(own, sort_keys=True)}


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
