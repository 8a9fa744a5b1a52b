"""The steps of a compiled pipeline as a platform's cache sees them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rekindle.ir.graph import Graph
from rekindle.ir.units import TracedStep, traced
from rekindle.platforms.cache_diff import CacheKey

_TASK_PARTS = {
    "source": "its code", "command": "its command", "args": "its arguments", "env": "environment",
    "pip": "packages", "guards": "its condition", "outputs": "its outputs", "retry": "retries",
    "parameters": "constants", "training": "machines", "nodes": "machines",
    "ranks_per_node": "machines",
}  # fmt: skip


def of_graph(graph: Graph, values: Mapping[str, Any]) -> tuple[CacheKey, ...]:
    """For platforms that run KFP's own encoding: values count by content, artifacts by place."""
    return tuple(_unit(step) for step in traced(graph, values))


def _unit(found: TracedStep) -> CacheKey:
    container = found.step.container
    code = container.source + repr((container.command, container.args))
    parts = {
        "its code": _digest(code),
        "image": container.image,
        "environment": repr(container.env),
    }
    for name, origin in found.parameters.items():
        if origin.text:
            parts[f"input `{name}`"] = origin.text
    return CacheKey(
        found.step.path,
        found.step.cache,
        parts,
        tuple(dict.fromkeys(s for o in found.artifacts.values() for s in o.steps)),
        tuple(dict.fromkeys(s for o in found.parameters.values() for s in o.steps)),
    )


def of_bundle(folder: str, files: Mapping[str, bytes]) -> dict[str, str]:
    """The parts of a step that travels in a bundle: what its task says, and what runs it."""
    inside = {name: content for name, content in files.items() if name.startswith(f"{folder}/")}
    task = json.loads(inside.pop(f"{folder}/task.json", b"{}"))
    parts = dict.fromkeys(_TASK_PARTS.values(), "")
    for key, said in _TASK_PARTS.items():
        parts[said] += json.dumps(task.get(key), sort_keys=True)
    own = {name.removeprefix(folder): _digest(content) for name, content in inside.items()}
    return {**parts, "rekindle's own part": json.dumps(own, sort_keys=True)}


def _digest(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()
