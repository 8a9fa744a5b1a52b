"""The least that the account of steps on Vertex AI may do, and whether the project has what a
config names."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.answers import ReadinessCheck
from rekindle.catalog.limits import limits
from rekindle.platforms.asking import Question
from rekindle.platforms.asking import checks as asked
from rekindle.platforms.definition import Definition
from rekindle.platforms.reads import image
from rekindle.platforms.vertex import project
from rekindle.platforms.vertex.outline import gpus, images
from rekindle.spec.places import VertexSpec


def permissions(place: VertexSpec) -> str:
    """Permissions of the account, a line each: its name, what it is for, and a role that has it."""
    return "\n".join(_lines(place))


def checks(
    place: VertexSpec, definition: Definition | None, early: bool = False
) -> tuple[ReadinessCheck, ...]:
    """What the project says of the config and of what it would be sent."""
    if not place.project or not place.region:  # what lacks then is said elsewhere
        return ()
    there = project.Project(place)
    login = there.question("credentials", "project", project.Project.login, True)
    return asked(login, _questions(there, definition), early)


def _questions(there: project.Project, definition: Definition | None) -> Iterator[Question]:
    place, rules, ask = there.place, limits("vertex"), there.question
    yield ask("you may", "project", project.permitted, True)
    yield ask("API", "project", project.enabled, False)
    yield ask("region", "region", project.region, True)
    if place.artifact_root:
        yield ask("bucket", "artifact_root", project.bucket, True)
    if place.service_account:
        yield ask("account", "service_account", project.account, False)
        for permission, _, role in rules["permissions"]:
            field = "service_account"
            yield ask("the account may", field, project.may, False, permission, role)
    if place.kms_key:
        yield ask("key", "kms_key", project.key, False)
    references = {place.image or "", *(images(definition) if definition else ())}
    for wanted in sorted(filter(None, map(image, references)), key=str):
        yield ask("image", "image", project.image, True, wanted)
    for (kind, spot), (count, step) in sorted((gpus(definition) if definition else {}).items()):
        if name := rules["gpu_quotas"].get(kind):
            metric = f"custom_model_training_{'preemptible_' if spot else ''}{name}_gpus"
            yield ask("quota", "region", project.quota, False, metric, count, step)
    for variable, name in sorted(place.secrets.items()):
        yield ask(f"secret {variable}", f"secrets.{variable}", project.secret, False, name)


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
