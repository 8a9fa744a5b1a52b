"""What a definition for Kubeflow will make of a cluster, read from the definition itself."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rekindle.ir.compile import LOADER
from rekindle.ir.edit.rewrite import asked_of, executors
from rekindle.ir.read.pipeline import read
from rekindle.platforms.cache_diff import CacheKey, of_graph
from rekindle.platforms.definition import Definition
from rekindle.platforms.kubeflow.compile import LAUNCHER
from rekindle.platforms.submission import Planned


def steps(definition: Definition) -> tuple[Planned, ...]:
    """The steps by name, those of nested pipelines too: what their pods ask for."""
    return tuple(_planned(path, container) for path, container in _containers(definition))


def _planned(step: str, container: Mapping[str, Any]) -> Planned:
    if (trainer := _trainer(container)) is None:
        return Planned(step, f"pod {asked_of(container)}".rstrip())
    limits = trainer["resourcesPerNode"].get("limits", {})
    asked = [f"{amount} {name}" for name, amount in sorted(limits.items())]
    return Planned(step, f"node {', '.join(asked)}".rstrip(), trainer["numNodes"])


def images(definition: Definition) -> frozenset[str]:
    """Images of the steps, and of the nodes of distributed ones."""
    nodes = {trainer.get("image", "") for trainer in trainers(definition)}
    return frozenset(nodes | {one.get("image", "") for _, one in _containers(definition)}) - {""}


def trainers(definition: Definition) -> list[dict[str, Any]]:
    """The `trainer` of the TrainJob of each distributed step."""
    return [found for _, one in _containers(definition) if (found := _trainer(one)) is not None]


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """The steps as the cache sees them, from the files that `compile` writes."""
    graph = read(Definition(files).text.decode())
    return of_graph(graph, {n: p.default for n, p in graph.inputs.parameters.items()})


def _trainer(container: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a launcher is told of its TrainJob; None for another container."""
    if container.get("command") != list(LAUNCHER):
        return None
    trainer: dict[str, Any] = json.loads(container["args"][0])["job"]["spec"]["trainer"]
    return trainer


def _containers(definition: Definition) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return executors(next(iter(yaml.load_all(definition.text, LOADER))))
