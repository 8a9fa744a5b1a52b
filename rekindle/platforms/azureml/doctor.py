"""The least that whoever runs steps on Azure ML may do; no workspace has tried it yet."""

from __future__ import annotations

from rekindle.errors import Problem
from rekindle.spec.places import AzureMLSpec


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


def problems(place: AzureMLSpec) -> tuple[Problem, ...]:
    """Nothing: no question to the workspace is asked yet."""
    return ()
