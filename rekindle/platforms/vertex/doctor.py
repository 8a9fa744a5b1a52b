"""The least that the account of steps on Vertex AI may do."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.catalog.limits import limits
from rekindle.errors import Problem
from rekindle.spec.places import VertexSpec


def permissions(place: VertexSpec) -> str:
    """Permissions of the account, a line each: its name, what it is for, and a role that has it."""
    return "\n".join(_lines(place))


def problems(place: VertexSpec) -> tuple[Problem, ...]:
    """Nothing: no question to the project is asked yet."""
    return ()


def _lines(place: VertexSpec) -> Iterator[str]:
    rules = limits("vertex")
    account = place.service_account or "platforms.vertex.service_account"
    yield f"The account of the steps, {account}, needs:"
    rows = [*rules["permissions"], *([rules["secret_permission"]] if place.secrets else [])]
    yield from (_row(*row) for row in rows)
    yield "It is better off with:"
    yield from (_row(*row) for row in rules["optional_permissions"])


def _row(name: str, why: str, role: str) -> str:
    return f"  {name:<48} {why} ({role})"
