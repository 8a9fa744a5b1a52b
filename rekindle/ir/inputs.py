"""More inputs for the components of some executors, bound to what their tasks can see.

Platform settings may name a parameter of the Dag around a task, or an output of a sibling
(`secretNameParameter`). KFP's driver reads these for the pod of the task itself; whoever starts
other pods for it needs the value, and gets it as an input of its own."""

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
            inputs = component.setdefault("inputDefinitions", {}).setdefault("parameters", {})
            inputs[name] = {"parameterType": kind, "isOptional": True}
            given = task.setdefault("inputs", {}).setdefault("parameters", {})
            given[name] = copy.deepcopy(dict(binding))
    return made


def _tasks(spec: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every task: its place, the component whose Dag it is in, and itself."""
    components = {f"components.{name}": made for name, made in spec["components"].items()}
    for path, around in {"root": spec["root"], **components}.items():
        for name, task in around.get("dag", {}).get("tasks", {}).items():
            yield f"{path}.dag.tasks.{name}", around, task


def _type(spec: Mapping[str, Any], around: Mapping[str, Any], binding: Binding) -> str | None:
    """The type of what is read; None if there is no such thing."""
    if "componentInputParameter" in binding:
        ports, name = around.get("inputDefinitions", {}), binding["componentInputParameter"]
    else:
        source = binding["taskOutputParameter"]
        task = around["dag"]["tasks"].get(source["producerTask"], {})
        made = spec["components"].get(task.get("componentRef", {}).get("name", ""), {})
        ports, name = made.get("outputDefinitions", {}), source["outputParameterKey"]
    kind = ports.get("parameters", {}).get(name, {}).get("parameterType")
    return None if kind is None else str(kind)


def _named(binding: Binding) -> str:
    if "componentInputParameter" in binding:
        return f"`{binding['componentInputParameter']}`"
    source = binding["taskOutputParameter"]
    return f"`{source['producerTask']}.{source['outputParameterKey']}`"
