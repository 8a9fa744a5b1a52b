"""Which steps of a compiled pipeline will run again after a change, and why.

A platform takes a step from its cache if the step itself is the same (its `parts`) and so is what
it reads. Values are compared by content where the platform does that; files by the place they lie
at, which is a new one whenever their maker runs again. A step that a platform never caches runs
every time."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from rekindle.ir.graph import Graph
from rekindle.ir.units import TracedStep, traced

_TASK_PARTS = {
    "source": "its code", "command": "its command", "args": "its arguments", "env": "environment",
    "pip": "packages", "guards": "its condition", "outputs": "its outputs", "retry": "retries",
    "parameters": "constants", "training": "machines", "nodes": "machines",
    "ranks_per_node": "machines",
}  # fmt: skip

Answer = Literal["yes", "perhaps", "no", "gone"]


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """A step as a platform's cache sees it. `parts` are what identifies it, by what people call
    them; `places` are the steps whose files it reads, `values` those of which it reads values."""

    name: str
    cached: bool
    parts: Mapping[str, str]
    places: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What becomes of a step, and why."""

    step: str
    again: Answer
    why: str


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
    if changed := list(_changed(before.parts, unit.parts)):
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


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for part in dict.fromkeys([*before, *after]):
        if before.get(part) != after.get(part):
            yield part


def of_graph(graph: Graph, values: Mapping[str, Any]) -> tuple[CacheKey, ...]:
    """For platforms that run KFP's own encoding: values count by content, artifacts by place."""
    return tuple(_unit(step) for step in traced(graph, values))


def _unit(found: TracedStep) -> CacheKey:
    container = found.step.container
    code = container.source + repr((container.command, container.args))
    parts = {
        "its code": _digest(code),
        "image": container.image,
        "environment": repr(container.env),
    }
    parts |= {f"input `{name}`": o.text for name, o in found.parameters.items() if o.text}
    return CacheKey(
        found.step.path,
        found.step.cache,
        parts,
        tuple(dict.fromkeys(s for o in found.artifacts.values() for s in o.steps)),
        tuple(dict.fromkeys(s for o in found.parameters.values() for s in o.steps)),
    )


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
