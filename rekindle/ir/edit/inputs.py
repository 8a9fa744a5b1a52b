"""More inputs for the components of some executors, bound to what their tasks can see.

Platform settings may name a parameter of the Dag around a task, or an output of a sibling
(`secretNameParameter`). KFP's driver reads these for the pod of the task itself; a launcher that
starts other pods for it needs the value, and gets it as an input of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.errors import UnsupportedError

Binding = Mapping[str, Any]


def with_inputs(
    spec: Mapping[str, Any], wanted: Mapping[str, Mapping[str, Binding]]
) -> dict[str, Any]:
    """The pipeline with these inputs, by the label of the executor and their name; they are
    optional, and of the type of what they are bound to.

    UnsupportedError, with its place in the IR, if that is not there."""
    made = copy.deepcopy(dict(spec))
    for where, dag, task in _tasks(made):
        component = made["components"][task["componentRef"]["name"]]
        for name, binding in wanted.get(component.get("executorLabel", ""), {}).items():
            kind = _type(made, dag, binding)
            if kind is None:
                raise UnsupportedError(
                    f"a setting of the step on several nodes reads {_named(binding)}, which is not "
                    "in the pipeline around it",
                    where=where,
                    fix="pass it as a parameter of the pipeline",
                )
            inputs = _parameters(component, "inputDefinitions")
            inputs[name] = {"parameterType": kind, "isOptional": True}
            _parameters(task, "inputs")[name] = copy.deepcopy(dict(binding))
    return made


def _tasks(spec: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every task: its place, the component whose Dag it is in, and itself."""
    components = {f"components.{name}": made for name, made in spec["components"].items()}
    for path, around in {"root": spec["root"], **components}.items():
        dag = around.get("dag") or {}
        for name, task in (dag.get("tasks") or {}).items():
            yield f"{path}.dag.tasks.{name}", around, task


def _parameters(around: dict[str, Any], key: str) -> dict[str, Any]:
    """The parameters under `key`, to be written into; in a document written by hand they may be
    missing, or null."""
    around[key] = around.get(key) or {}
    found: dict[str, Any] = around[key].get("parameters") or {}
    around[key]["parameters"] = found
    return found


def _type(spec: Mapping[str, Any], around: Mapping[str, Any], binding: Binding) -> str | None:
    """The type of what is read; None if there is no such thing."""
    source = binding.get("taskOutputParameter")
    if isinstance(source, Mapping):
        tasks, task = around["dag"]["tasks"], source.get("producerTask")
        component = tasks[task]["componentRef"]["name"] if _has(tasks, task) else ""
        ports = spec["components"].get(component, {}).get("outputDefinitions")
        name = source.get("outputParameterKey")
    else:
        ports, name = around.get("inputDefinitions"), binding.get("componentInputParameter")
    parameters = (ports or {}).get("parameters") or {}
    kind = parameters[name].get("parameterType") if _has(parameters, name) else None
    return None if kind is None else str(kind)


def _has(group: Mapping[str, Any], name: Any) -> bool:
    return isinstance(name, str) and name in group


def _named(binding: Binding) -> str:
    source = binding.get("taskOutputParameter") or binding.get("componentInputParameter")
    if isinstance(source, Mapping):
        return f"`{source.get('producerTask')}.{source.get('outputParameterKey')}`"
    return f"`{source}`"
