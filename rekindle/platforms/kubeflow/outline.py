"""What a definition for Kubeflow will make of a cluster, read from the definition itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from rekindle.ir.compile import LOADER
from rekindle.ir.executors import asked_of, executors
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
    spec = next(iter(yaml.load_all(definition.text, LOADER)))
    found = set[str]()
    for executor in spec["deploymentSpec"].get("executors", {}).values():
        container = executor.get("container", {})
        found.add(container.get("image", ""))
        if container.get("command") == list(LAUNCHER):
            trainer = json.loads(container["args"][0])["job"]["spec"]["trainer"]
            found.add(trainer.get("image", ""))
    return frozenset(found - {""})
