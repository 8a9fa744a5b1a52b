"""What a definition for Vertex AI will make of a project, read from the definition itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle.ir.executors import asked_of, executors
from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Planned
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
    """The steps by name, those of nested pipelines too: on machines of which type."""
    spec = job_of(definition)["pipelineSpec"]
    return tuple(_planned(path, container) for path, container in executors(spec))


def _planned(step: str, container: Mapping[str, Any]) -> Planned:
    if container.get("command") == LAUNCHER:
        told = json.loads(container["args"][0])
        pools = told["job"]["jobSpec"]["workerPoolSpecs"]
        count = sum(pool["replicaCount"] for pool in pools)
        return Planned(step, pools[0]["machineSpec"]["machineType"], count, told["spot"])
    return Planned(step, asked_of(container) or _DEFAULT)
