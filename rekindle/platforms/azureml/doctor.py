"""The least permissions for steps on Azure ML, and whether the workspace has what a config names.

No workspace has tried it yet."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.platforms import reads
from rekindle.platforms.azureml import subscription
from rekindle.platforms.azureml.outline import images, steps
from rekindle.platforms.checks import Check, about
from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Planned
from rekindle.spec.platforms import AzureMLSpec


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


def checks(place: AzureMLSpec, definition: Definition | None) -> Iterator[Check]:
    """About the config, and about what would be sent."""
    if not (place.subscription and place.resource_group and place.workspace):
        return  # which of them is missing is reported elsewhere
    ask = about("azureml", subscription.Subscription(place))
    login = subscription.Subscription.login
    yield ask("credentials", "subscription", login, early=True, login=True)
    yield ask("workspace", "workspace", subscription.workspace, early=True)
    if place.artifact_root.startswith("abfs"):
        yield ask("container", "artifact_root", subscription.container, early=True)
    for image in reads.images({place.image or "", *(images(definition) if definition else ())}):
        yield ask("image", "image", subscription.image, image, early=True)
    for cluster, most in _largest(steps(definition) if definition else ()).items():
        field = "compute" if cluster == place.compute else "gpu_compute"
        words = (cluster, most.machines, most.step)
        yield ask("compute", field, subscription.cluster, *words, early=True)
    for variable, url in sorted(place.secrets.items()):
        yield ask(f"secret {variable}", f"secrets.{variable}", subscription.secret, url)


def _largest(planned: tuple[Planned, ...]) -> dict[str, Planned]:
    """By the name of a cluster the step that wants most of its nodes."""
    found: dict[str, Planned] = {}
    for step in planned:
        kind, _, name = step.machine.partition(" ")
        if kind == "cluster" and (name not in found or step.machines > found[name].machines):
            found[name] = step
    return found
