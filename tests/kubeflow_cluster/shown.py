"""Pipelines whose steps' outputs are printed: behind each task a step prints the parameters that it gave.

KFP keeps values where only the cluster reaches them, and logs where everyone with a run does. So both
sides run the pipeline with these steps, and what they print is compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

_MARK = "SHOWN "
_CODE = f"""
import json, sys
values = json.loads(sys.argv[1])["inputs"]["parameterValues"]
print("{_MARK}" + json.dumps(values, sort_keys=True), flush=True)
"""


def with_shown_outputs(text: str) -> str:
    """A compiled pipeline, with a step behind each task that prints its output parameters."""
    spec, *settings = yaml.safe_load_all(text)
    components = spec.setdefault("components", {})
    dags = {"root": spec["root"]["dag"]}
    dags |= {name: made["dag"] for name, made in components.items() if "dag" in made}
    kinds = set()
    for dag_name, dag in dags.items():
        for task_name, output, kind in list(_outputs(dag["tasks"], components)):
            kinds.add(kind)
            what = f"{dag_name}/{task_name}.{output}"
            dag["tasks"][f"show-{len(dag['tasks'])}"] = _task(what, task_name, output, kind)
    for kind in kinds:
        components[_component(kind)] = {
            "executorLabel": "exec-show",
            "inputDefinitions": {
                "parameters": {
                    "what": {"parameterType": "STRING"},
                    "value": {"parameterType": kind},
                }
            },
        }
    if kinds:
        container = {"image": "python:3.11", "command": ["python3", "-c", _CODE], "args": ["{{$}}"]}
        spec["deploymentSpec"]["executors"]["exec-show"] = {"container": container}
    return yaml.safe_dump_all([spec, *settings], sort_keys=True, width=10**6)


def _outputs(tasks: Any, components: Any) -> Iterator[tuple[str, str, str]]:
    """(Task, output, its type) of the tasks that run a container."""
    for task_name, task in tasks.items():
        component = components[task["componentRef"]["name"]]
        if "executorLabel" not in component:
            continue
        parameters = component.get("outputDefinitions", {}).get("parameters", {})
        for output, definition in parameters.items():
            yield task_name, output, definition["parameterType"]


def _task(what: str, producer: str, output: str, kind: str) -> dict[str, Any]:
    value = {"taskOutputParameter": {"producerTask": producer, "outputParameterKey": output}}
    return {
        "cachingOptions": {},
        "componentRef": {"name": _component(kind)},
        "dependentTasks": [producer],
        "inputs": {"parameters": {"what": {"runtimeValue": {"constant": what}}, "value": value}},
        "taskInfo": {"name": f"show {what}"},
    }


def _component(kind: str) -> str:
    return f"comp-show-{kind.lower().replace('_', '-')}"


def shown(logs: Iterable[str]) -> list[str]:
    """What the steps printed, sorted, with whole numbers as KFP's doubles have them."""
    found = []
    for log in logs:
        for line in log.splitlines():
            if _MARK in line:
                values = json.loads(line.partition(_MARK)[2], parse_int=float)
                found.append(json.dumps(values, sort_keys=True, ensure_ascii=False))
    return sorted(found)
