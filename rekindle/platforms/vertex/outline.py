"""What a definition for Vertex AI will make of a project, read from the definition itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Planned, in_order
from rekindle.platforms.vertex.lowering import LAUNCHER

SUFFIX = ".vertex.json"
_DEFAULT = "the service's default machine"


def job_of(definition: Definition) -> dict[str, Any]:
    """The body of the PipelineJob."""
    ((name, content),) = definition.files.items()
    assert name.endswith(SUFFIX), name
    found: dict[str, Any] = json.loads(content)
    return found


def steps(definition: Definition) -> tuple[Planned, ...]:
    """The steps by name, as they may begin, those of nested pipelines too: on machines of which
    type."""
    spec = job_of(definition)["pipelineSpec"]
    return tuple(_planned(*found) for found in _containers(spec["root"], spec, ""))


def launchers(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each launcher is told, by the step that it stands for."""
    return {
        path: json.loads(container["args"][0])
        for path, container in _containers(spec["root"], spec, "")
        if container.get("command") == LAUNCHER
    }


def _containers(
    component: Mapping[str, Any], spec: Mapping[str, Any], path: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    executors = spec["deploymentSpec"].get("executors", {})
    tasks = component["dag"]["tasks"]
    for name in in_order({name: task.get("dependentTasks", ()) for name, task in tasks.items()}):
        inner = spec["components"][tasks[name]["componentRef"]["name"]]
        at = f"{path}/{name}" if path else name
        if "dag" in inner:
            yield from _containers(inner, spec, at)
        elif container := executors.get(inner["executorLabel"], {}).get("container"):
            yield at, container


def _planned(step: str, container: Mapping[str, Any]) -> Planned:
    if container.get("command") == LAUNCHER:
        told = json.loads(container["args"][0])
        pools = told["job"]["jobSpec"]["workerPoolSpecs"]
        count = sum(pool["replicaCount"] for pool in pools)
        return Planned(step, pools[0]["machineSpec"]["machineType"], count, told["spot"])
    resources = container.get("resources", {})
    accelerator = resources.get("accelerator")
    asked = [
        f"{accelerator['resourceCount']} x {accelerator['resourceType']}" if accelerator else "",
        f"{resources['resourceCpuLimit']} CPUs" if "resourceCpuLimit" in resources else "",
        resources.get("resourceMemoryLimit", ""),
    ]
    return Planned(step, ", ".join(filter(None, asked)) or _DEFAULT)
