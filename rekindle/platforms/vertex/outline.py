"""What a definition for Vertex AI will make of a project, read from the definition itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle.ir.edit.executors import asked_of, executors
from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Planned
from rekindle.platforms.vertex.lowering import LAUNCHER

_DEFAULT = "the service's default machine"


def job_of(definition: Definition) -> dict[str, Any]:
    """The body of the PipelineJob."""
    found: dict[str, Any] = json.loads(definition.text)
    return found


def steps(definition: Definition) -> tuple[Planned, ...]:
    """The steps by name, as they may begin, those of nested pipelines too: on machines of which
    type."""
    spec = job_of(definition)["pipelineSpec"]
    return tuple(_planned(path, container) for path, container in executors(spec))


def launchers(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each launcher is told, by the step that it stands for."""
    return {
        path: json.loads(container["args"][0])
        for path, container in executors(spec)
        if container.get("command") == LAUNCHER
    }


def _planned(step: str, container: Mapping[str, Any]) -> Planned:
    if container.get("command") == LAUNCHER:
        told = json.loads(container["args"][0])
        pools = told["job"]["jobSpec"]["workerPoolSpecs"]
        count = sum(pool["replicaCount"] for pool in pools)
        return Planned(step, pools[0]["machineSpec"]["machineType"], count, told["spot"])
    return Planned(step, asked_of(container) or _DEFAULT)


def images(definition: Definition) -> frozenset[str]:
    """Images of the steps, and of the nodes of distributed ones."""
    spec = job_of(definition)["pipelineSpec"]
    found = set[str]()
    for executor in spec["deploymentSpec"].get("executors", {}).values():
        if container := executor.get("container"):
            found.add(container["image"])
            if container.get("command") == LAUNCHER:
                pools = json.loads(container["args"][0])["job"]["jobSpec"]["workerPoolSpecs"]
                found |= {pool["containerSpec"]["imageUri"] for pool in pools}
    return frozenset(found)
