"""A value for each parameter of a pipeline, by its type."""

from __future__ import annotations

from typing import Any

from rekindle.ir.graph import Graph

VALUES = {
    "STRING": "text",
    "NUMBER_INTEGER": 3,
    "NUMBER_DOUBLE": 0.5,
    "BOOLEAN": True,
    "LIST": [],
    "STRUCT": {},
}


def arguments(graph: Graph) -> dict[str, Any]:
    """A value for each parameter that needs one."""
    return {n: VALUES[p.type] for n, p in graph.inputs.parameters.items() if p.required}
