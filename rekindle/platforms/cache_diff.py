"""Which steps of a compiled pipeline will run again after a change, and why.

A platform takes a step from its cache if the step itself is the same (its `parts`) and so
is what it reads. Values are compared by content where the platform does that; files by
the place they lie at, which is a new one whenever their maker runs again."""

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
    """A step as a platform's cache sees it. `parts` are what identifies it, by what
    people call them; `places` are the steps whose files it reads, `values` those of which
    it reads values."""

    name: str
    cached: bool
    parts: Mapping[str, str]
    places: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


def compare(before: Sequence[CacheKey], after: Sequence[CacheKey]) -> tuple[Verdict, ...]:
    """A verdict a step of `after`, in its order, then the steps that are gone."""
    keys_before = {key.name: key for key in before}
    verdicts: dict[str, Verdict] = {}
    for key in after:  # a step comes after those that it reads
        verdicts[key.name] = _verdict(key, keys_before.get(key.name), verdicts)
    gone = []
    for name in keys_before:
        if name not in verdicts:
            gone.append(Verdict(name, "gone", "it is no longer there"))
    return (*verdicts.values(), *gone)


def _verdict(key: CacheKey, before: CacheKey | None, sooner: Mapping[str, Verdict]) -> Verdict:
    """Whether a step runs again, by its key of before and the verdicts of the steps that
    it reads."""
    if before is None:
        return Verdict(key.name, "yes", "it is new")
    parts = dict.fromkeys([*before.parts, *key.parts])
    changed = [part for part in parts if before.parts.get(part) != key.parts.get(part)]
    if changed:
        return Verdict(key.name, "yes", f"changed: {', '.join(changed)}")
    if not key.cached:
        return Verdict(key.name, "yes", "it is never taken from the cache")
    again = {name: sooner[name].again for name in (*key.places, *key.values) if name in sooner}
    for name in key.places:
        if again.get(name) == "yes":
            return Verdict(key.name, "yes", f"it reads files of {name}, which runs again")
    for name in key.places:
        if again.get(name) == "perhaps":
            why = f"it reads files of {name}, which may run again"
            return Verdict(key.name, "perhaps", why)
    # a step that runs again may return what it returned before, which then counts as the
    # same
    for name in key.values:
        if again.get(name) in ("yes", "perhaps"):
            return Verdict(key.name, "perhaps", f"if {name} returns something else")
    return Verdict(key.name, "no", "nothing changed")


def of_graph(graph: ir.Graph, values: Mapping[str, Any]) -> tuple[CacheKey, ...]:
    """The steps of KFP's own encoding: values count by content, artifacts by place. Every
    input is followed through nested pipelines to a value, a parameter (of `values`) or an
    output of a step."""
    keys: list[CacheKey] = []
    _walk(graph.dag, {name: _Traced(repr(value)) for name, value in values.items()}, keys)
    return tuple(keys)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Where an input comes from: what is known of it as text, and the steps that give the
    rest."""

    text: str = ""
    steps: tuple[str, ...] = ()


def _walk(dag: ir.Dag, scope: Mapping[str, _Traced], keys: list[CacheKey]) -> dict[str, _Traced]:
    """Add the keys of a Dag's steps to `keys`; what its outputs come from."""
    ended: dict[tuple[str, str], _Traced] = {}
    for node in dag.ordered():
        bindings: dict[str, ir.Binding] = {**node.parameters, **node.artifacts}
        inputs = {name: _traced(binding, scope, ended) for name, binding in bindings.items()}
        if isinstance(node, ir.SubDag):
            outputs = _walk(node.dag, _inside(node, inputs), keys)
        else:
            names = (*node.outputs.parameters, *node.outputs.artifacts)
            outputs = dict.fromkeys(names, _Traced(steps=(node.path,)))
        for name, output in outputs.items():
            ended[node.name, name] = output
        if isinstance(node, ir.Step):
            keys.append(_key(node, inputs))
    dag_outputs = {}
    for name, sources in {**dag.parameters, **dag.artifacts}.items():
        # one of several, in turn: which it is only the run knows
        dag_outputs[name] = _joined([ended[source.task, source.output] for source in sources])
    return dag_outputs


def _inside(node: ir.SubDag, inputs: Mapping[str, _Traced]) -> dict[str, _Traced]:
    """What the inputs of a nested Dag stand for; a loop's item comes from its list."""
    parameters = node.inputs.parameters
    defaults = {name: _Traced(repr(parameter.default)) for name, parameter in parameters.items()}
    scope = {**defaults, **inputs}
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


def _joined(sources: Sequence[_Traced]) -> _Traced:
    steps: dict[str, None] = {}  # each once, in order
    for source in sources:
        steps.update(dict.fromkeys(source.steps))
    text = " | ".join(source.text for source in sources if source.text)
    return _Traced(text, tuple(steps))


def _key(step: ir.Step, inputs: Mapping[str, _Traced]) -> CacheKey:
    container = step.container
    code = container.source + repr((container.command, container.args))
    parts = {
        "its code": _digest(code),
        "image": container.image,
        "environment": repr(container.env),
    }
    for name in step.parameters:
        if inputs[name].text:
            parts[f"input `{name}`"] = inputs[name].text
    files = _joined([inputs[name] for name in step.artifacts]).steps
    values = _joined([inputs[name] for name in step.parameters]).steps
    return CacheKey(step.path, step.cache, parts, files, values)


def of_bundle(folder: str, files: Mapping[str, bytes]) -> dict[str, str]:
    """The parts of a step that travels in a bundle: what its task says, and what runs
    it."""
    task = json.loads(files.get(f"{folder}/task.json", b"{}"))
    parts = dict.fromkeys(_TASK_PARTS.values(), "")
    for key, part in _TASK_PARTS.items():  # several keys may make one part
        parts[part] += json.dumps(task.get(key), sort_keys=True)
    own_files = {}
    for name, content in files.items():
        if name.startswith(f"{folder}/") and name != f"{folder}/task.json":
            own_files[name.removeprefix(folder)] = _digest(content)
    return {**parts, "rekindle's own part": json.dumps(own_files, sort_keys=True)}


def _digest(content: str | bytes) -> str:
    if isinstance(content, str):
        content = content.encode()
    return hashlib.sha256(content).hexdigest()
