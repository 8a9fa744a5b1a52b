"""What a definition for Vertex AI will make of a project, read from the definition itself."""

import json
from collections.abc import Mapping
from typing import Any

from rekindle.ir.edit.rewrite import asked_of, executors
from rekindle.ir.read.pipeline import read
from rekindle.platforms.cache_diff import CacheKey, of_graph
from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Planned
from rekindle.platforms.vertex.lowering import LAUNCHER

_DEFAULT = "the service's default machine"


def job_of(definition: Definition) -> dict[str, Any]:
    """The body of the PipelineJob."""
    found: dict[str, Any] = json.loads(definition.text)
    return found


def steps(definition: Definition) -> tuple[Planned, ...]:
    """The steps by name, those of nested pipelines too: on machines of which type."""
    spec = job_of(definition)["pipelineSpec"]
    told = launchers(spec)
    return tuple(
        _distributed(path, told[path])
        if path in told
        else Planned(path, asked_of(container) or _DEFAULT)
        for path, container in executors(spec)
    )


def launchers(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each launcher is told, by the step that it stands for."""
    return {
        path: json.loads(container["args"][0])
        for path, container in executors(spec)
        if container.get("command") == LAUNCHER
    }


def _distributed(step: str, told: Mapping[str, Any]) -> Planned:
    pools = told["job"]["jobSpec"]["workerPoolSpecs"]
    count = sum(pool["replicaCount"] for pool in pools)
    return Planned(step, pools[0]["machineSpec"]["machineType"], count, told["spot"])


def images(definition: Definition) -> frozenset[str]:
    """Images of the steps, and of the nodes of distributed ones."""
    spec = job_of(definition)["pipelineSpec"]
    jobs = [told["job"]["jobSpec"] for told in launchers(spec).values()]
    nodes = {pool["containerSpec"]["imageUri"] for job in jobs for pool in job["workerPoolSpecs"]}
    return frozenset(nodes | {container["image"] for _, container in executors(spec)})


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """The steps as the cache sees them, from the files that `compile` writes."""
    job = job_of(Definition(files))
    graph = read(json.dumps(job["pipelineSpec"]))
    return of_graph(graph, job["runtimeConfig"]["parameterValues"])
