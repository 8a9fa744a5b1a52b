"""A job of Azure ML: how it is, and stopping it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle.platforms.azureml.client import connected
from rekindle.platforms.watch import Look
from rekindle.records import RunStatus
from rekindle.spec.places import AzureMLSpec

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

_RUNS: dict[str, RunStatus] = {
    "Completed": "succeeded", "Failed": "failed", "Canceled": "cancelled",
}  # fmt: skip


def look(place: AzureMLSpec, id: str) -> Look:
    """The run now."""
    with connected(place) as client:
        return Look(_RUNS.get(_status_of(client, id), "running"))


def cancel(place: AzureMLSpec, id: str) -> None:
    """Have the job cancelled. A job that is over stays as it is."""
    with connected(place) as client:
        if _status_of(client, id) in _RUNS:
            return
        try:
            client.jobs.begin_cancel(id, polling=False)
        except Exception:
            if _status_of(client, id) not in _RUNS:  # it may have ended meanwhile
                raise


def _status_of(client: MLClient, id: str) -> str:
    found: Any = client.jobs.get(id).status
    return str(getattr(found, "value", found))
