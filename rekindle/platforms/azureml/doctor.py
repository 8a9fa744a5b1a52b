"""The least permissions for steps on Azure ML, and whether the workspace has what a config names.

No workspace has tried it yet."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.answers import ReadinessCheck
from rekindle.platforms.asking import Question
from rekindle.platforms.asking import checks as asked
from rekindle.platforms.azureml import subscription
from rekindle.platforms.azureml.outline import images, steps
from rekindle.platforms.definition import Definition
from rekindle.platforms.reads import image
from rekindle.platforms.submission import Planned
from rekindle.spec.places import AzureMLSpec

_WORKSPACES = "Microsoft.MachineLearningServices/workspaces"
_YOURS = tuple(
    f"{_WORKSPACES}/{action}"
    for action in (
        "jobs/write", "jobs/read", "codes/versions/write", "environments/versions/write",
        "components/versions/write", "schedules/write",
    )
)  # fmt: skip


def permissions(place: AzureMLSpec) -> str:
    """Roles, and what each is for."""
    rows = [
        ("AzureML Data Scientist", "the workspace", "submit jobs, read their logs"),
        ("AcrPull", (place.image or "the registry of the image").partition("/")[0],
         "the compute's identity pulls the image"),
        ("Storage Blob Data Contributor", place.artifact_root or "the account of artifact_root",
         "steps write checkpoints"),
    ]  # fmt: skip
    vaults = sorted({url.partition("/secrets/")[0] for url in place.secrets.values()})
    rows += [("Key Vault Secrets User", vault, "steps read their secrets") for vault in vaults]
    lines = [f"  {role:<30} on {where}: {why}" for role, where, why in rows]
    return "\n".join(["The identity of the compute, and who submits, need:", *lines])


def checks(
    place: AzureMLSpec, definition: Definition | None, early: bool = False
) -> tuple[ReadinessCheck, ...]:
    """What the workspace says of the config and of what it would be sent."""
    if not (place.subscription and place.resource_group and place.workspace):
        return ()  # what lacks then is said elsewhere
    there = subscription.Subscription(place)
    login = there.question("credentials", "subscription", subscription.Subscription.login, True)
    return asked(login, _questions(there, definition), early)


def _questions(
    there: subscription.Subscription, definition: Definition | None
) -> Iterator[Question]:
    place, ask = there.place, there.question
    yield ask("workspace", "workspace", subscription.workspace, True)
    for action in _YOURS:
        yield ask("you may", "workspace", subscription.may, False, action)
    yield ask("datastore", "workspace", subscription.datastore, False)
    if place.artifact_root.startswith("abfs"):
        yield ask("container", "artifact_root", subscription.container, True)
    references = {place.image or "", *(images(definition) if definition else ())}
    for wanted in sorted(filter(None, map(image, references)), key=str):
        yield ask("image", "image", subscription.image, True, wanted)
    for most in _largest(steps(definition) if definition else ()):
        name, count = most.machine, most.machines
        if cluster := name.removeprefix("cluster ") if name.startswith("cluster ") else "":
            field = "compute" if cluster == place.compute else "gpu_compute"
            yield ask("compute", field, subscription.cluster, True, cluster, count, most.step)
        else:
            words = (name, count, most.spot, most.step)
            yield ask("machine", "machine", subscription.machine, False, *words)
    for variable, url in sorted(place.secrets.items()):
        yield ask(f"secret {variable}", f"secrets.{variable}", subscription.secret, False, url)


def _largest(planned: tuple[Planned, ...]) -> list[Planned]:
    """Of each machine the step that wants most of them."""
    found: dict[tuple[str, bool], Planned] = {}
    for one in planned:
        at = (one.machine, one.spot)
        if at not in found or one.machines > found[at].machines:
            found[at] = one
    return list(found.values())
