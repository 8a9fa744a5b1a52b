"""The least that the account of steps on Vertex AI may do, and whether the project has what a
config names."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.catalog.tables import limits
from rekindle.platforms import reads
from rekindle.platforms.checks import Check, about
from rekindle.platforms.definition import Definition
from rekindle.platforms.vertex import project
from rekindle.platforms.vertex.outline import images
from rekindle.spec.platforms import VertexSpec


def permissions(place: VertexSpec) -> str:
    """Permissions of the account, a line each: its name, what it is for, and a role that has it."""
    return "\n".join(_lines(place))


def checks(place: VertexSpec, definition: Definition | None) -> Iterator[Check]:
    """About the config, and about what would be sent."""
    if not place.project or not place.region:  # which of them is missing is reported elsewhere
        return
    there = project.Project(place)
    ask = about("vertex", there)
    yield ask("credentials", "project", project.Project.login, early=True, login=True)
    yield ask("you may", "project", project.permitted, early=True)
    yield ask("API", "project", project.enabled)
    yield ask("region", "region", project.region, early=True)
    if place.artifact_root:
        yield ask("bucket", "artifact_root", project.bucket, early=True)
    for image in reads.images({place.image or "", *(images(definition) if definition else ())}):
        yield ask("image", "image", project.image, image, early=True)
    for variable, name in sorted(place.secrets.items()):
        yield ask(f"secret {variable}", f"secrets.{variable}", project.secret, name)


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
