"""A run of Kubeflow Pipelines: how it is, and stopping it."""

from __future__ import annotations

from rekindle.platforms.kubeflow.client import connected
from rekindle.platforms.watch import Look
from rekindle.records import RunStatus
from rekindle.spec.places import KubeflowSpec

_RUNS: dict[str, RunStatus] = {
    "SUCCEEDED": "succeeded", "SKIPPED": "succeeded", "FAILED": "failed", "CANCELED": "cancelled",
}  # fmt: skip


def look(place: KubeflowSpec, id: str) -> Look:
    """The run now."""
    with connected(place) as server:
        found = server.call(server.kfp.get_run, id)
        return Look(_RUNS.get(str(found.state), "running"))


def cancel(place: KubeflowSpec, id: str) -> None:
    """Have the run terminated. A run that is over stays as it is."""
    with connected(place) as server:
        if str(server.call(server.kfp.get_run, id).state) in _RUNS:
            return
        server.call(server.kfp.terminate_run, id)
