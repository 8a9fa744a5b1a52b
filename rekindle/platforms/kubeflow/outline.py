"""What a definition for Kubeflow will make of a cluster, read from the definition itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from rekindle.ir.compile import LOADER
from rekindle.ir.edit.executors import asked_of, executors
from rekindle.platforms.definition import Definition
from rekindle.platforms.kubeflow.compile import LAUNCHER
from rekindle.platforms.submission import Planned


def steps(definition: Definition) -> tuple[Planned, ...]:
    """The steps by name, those of nested pipelines too: what their pods ask for."""
    text = definition.text
    spec = next(iter(yaml.load_all(text, LOADER)))
    return tuple(_planned(path, container) for path, container in executors(spec))


def _planned(step: str, container: Mapping[str, Any]) -> Planned:
    if container.get("command") != list(LAUNCHER):
        return Planned(step, f"pod {asked_of(container)}".rstrip())
    trainer = json.loads(container["args"][0])["job"]["spec"]["trainer"]
    limits = trainer["resourcesPerNode"].get("limits", {})
    asked = [f"{amount} {name}" for name, amount in sorted(limits.items())]
    return Planned(step, f"node {', '.join(asked)}".rstrip(), trainer["numNodes"])


def images(definition: Definition) -> frozenset[str]:
    """Images of the steps, and of the nodes of distributed ones."""
    nodes = {trainer.get("image", "") for trainer in trainers(definition)}
    return frozenset(nodes | {one.get("image", "") for one in _containers(definition)}) - {""}


def trainers(definition: Definition) -> list[dict[str, Any]]:
    """The `trainer` of the TrainJob of each distributed step."""
    return [
        json.loads(one["args"][0])["job"]["spec"]["trainer"]
        for one in _containers(definition)
        if one.get("command") == list(LAUNCHER)
    ]


def _containers(definition: Definition) -> list[dict[str, Any]]:
    spec = next(iter(yaml.load_all(definition.text, LOADER)))
    executors = spec["deploymentSpec"].get("executors", {})
    return [executor.get("container", {}) for executor in executors.values()]
