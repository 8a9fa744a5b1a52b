"""Is Vertex AI ready for a pipeline, as far as that can be known without asking it; and the least
that the account of its steps may do."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.catalog.limits import limits
from rekindle.errors import Problem, UnsupportedError
from rekindle.ir.graph import Graph
from rekindle.platforms.admission import admit
from rekindle.platforms.vertex import compile
from rekindle.spec.model import VertexSpec


def problems(graph: Graph, place: VertexSpec) -> Iterator[Problem]:
    """What the section of the config lacks, and what in the pipeline does not run there."""
    try:
        admit(graph, "vertex")
    except UnsupportedError as error:
        yield from error.problems
    yield from compile.problems(graph, place)


def needed(place: VertexSpec) -> Iterator[str]:
    """Permissions of the account, a line each: its name, what it is for, and a role that has it."""
    rules = limits("vertex")
    account = place.service_account or "platforms.vertex.service_account"
    yield f"The account of the steps, {account}, needs:"
    rows = [*rules["permissions"], *([rules["secret_permission"]] if place.secrets else [])]
    yield from (_row(*row) for row in rows)
    yield "It is better off with:"
    yield from (_row(*row) for row in rules["optional_permissions"])


def _row(name: str, why: str, role: str) -> str:
    return f"  {name:<48} {why} ({role})"
