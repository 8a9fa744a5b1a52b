"""Which steps of a compiled pipeline will run again after a change, and why.

A platform takes a step from its cache if the step itself is the same (its `parts`), and
what it reads is the same. Values are compared by content where the platform does so, files
by their URI, which is a new one whenever the step that writes them runs again."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.ir import graph as ir
from rekindle.outputs import Verdict

# what a user calls the members of a bundle's task.json
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
    """A step as a platform's cache sees it."""

    name: str
    cached: bool
    """Whether the platform may take it from its cache at all."""
    parts: Mapping[str, str]
    """What identifies it, as text by the words of users: `its code`, `image`, ..."""
    places: tuple[str, ...] = ()
    """The steps whose files it reads."""
    values: tuple[str, ...] = ()
    """The steps whose values it reads."""


def compare(before: Sequence[CacheKey], after: Sequence[CacheKey]) -> tuple[Verdict, ...]:
    """A verdict for each step of `after`, in its order, then one for each step that is gone."""
    keys_before = {key.name: key for key in before}
    verdicts: dict[str, Verdict] = {}
    for key in after:  # the steps that a step reads come before it
        verdicts[key.name] = _verdict(key, keys_before.get(key.name), verdicts)
    removed_steps = []
    for name in keys_before:
        if name not in verdicts:
            removed_steps.append(Verdict(name, "gone", "it is no longer there"))
    return (*verdicts.values(), *removed_steps)


def _verdict(key: CacheKey, before: CacheKey | None, earlier: Mapping[str, Verdict]) -> Verdict:
    """Whether a step runs again, by its key `before` the change and the verdicts on the
    `earlier` steps, which it may read."""
    if before is None:
        return Verdict(key.name, "yes", "it is new")
    parts = dict.fromkeys([*before.parts, *key.parts])
    changed = [part for part in parts if before.parts.get(part) != key.parts.get(part)]
    if changed:
        return Verdict(key.name, "yes", f"changed: {', '.join(changed)}")
    if not key.cached:
        return Verdict(key.name, "yes", "it is never taken from the cache")
    again = {name: earlier[name].again for name in (*key.places, *key.values) if name in earlier}
    for name in key.places:
        if again.get(name) == "yes":
            return Verdict(key.name, "yes", f"it reads files of {name}, which runs again")
    for name in key.places:
        if again.get(name) == "perhaps":
            why = f"it reads files of {name}, which may run again"
            return Verdict(key.name, "perhaps", why)
    # a step that runs again may return the same values, and the platform compares values
    for name in key.values:
        if again.get(name) in ("yes", "perhaps"):
            return Verdict(key.name, "perhaps", f"if {name} returns something else")
    return Verdict(key.name, "no", "nothing changed")


def of_graph(graph: ir.Graph, values: Mapping[str, Any]) -> tuple[CacheKey, ...]:
    """The cache keys of the steps that KFP itself runs: values count by content, artifacts
    by their URI.

    Every input is followed through nested pipelines to a constant, a parameter of the
    pipeline (in `values`) or an output of a step."""
    keys: list[CacheKey] = []
    _add_keys(graph.dag, {name: _Traced(repr(value)) for name, value in values.items()}, keys)
    return tuple(keys)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Where an input comes from."""

    text: str = ""
    """The value, as far as it is known before the run."""
    steps: tuple[str, ...] = ()
    """The steps whose outputs it is made of."""


def _add_keys(
    dag: ir.Dag, scope: Mapping[str, _Traced], keys: list[CacheKey]
) -> dict[str, _Traced]:
    """Add the keys of a Dag's steps to `keys`; returns where its outputs come from.

    `scope` says where its inputs come from."""
    ended: dict[tuple[str, str], _Traced] = {}
    for node in dag.ordered():
        bindings: dict[str, ir.Binding] = {**node.parameters, **node.artifacts}
        inputs = {name: _traced(binding, scope, ended) for name, binding in bindings.items()}
        if isinstance(node, ir.SubDag):
            outputs = _add_keys(node.dag, _inside(node, inputs), keys)
        else:
            names = (*node.outputs.parameters, *node.outputs.artifacts)
            outputs = dict.fromkeys(names, _Traced(steps=(node.path,)))
        for name, output in outputs.items():
            ended[node.name, name] = output
        if isinstance(node, ir.Step):
            keys.append(_key(node, inputs))
    dag_outputs = {}
    for name, sources in {**dag.parameters, **dag.artifacts}.items():
        # of several sources (OneOf) only the run knows which one it is, so all count
        dag_outputs[name] = _joined([ended[source.task, source.output] for source in sources])
    return dag_outputs


def _inside(node: ir.SubDag, inputs: Mapping[str, _Traced]) -> dict[str, _Traced]:
    """Where the inputs of a nested Dag come from; a loop's item comes from its list."""
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
        # what a Formatted value reads are inputs of the same node, which count by themselves
        case ir.Constant(value) | ir.Formatted(value):
            return _Traced(repr(value))
        case ir.FromInput(name):
            return scope.get(name, _Traced())
        case ir.FromTask(task, output):
            return ended.get((task, output), _Traced())
        case ir.FinalStatus(task):
            return _Traced(steps=(task,))


def _joined(sources: Sequence[_Traced]) -> _Traced:
    """All of the sources as one: it changes if any of them does."""
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
    """The `parts` of a step that runs from a bundle in `folder`: those of its task, and the
    modules of rekindle beside it."""
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
