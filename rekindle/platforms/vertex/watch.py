"""A PipelineJob of Vertex AI: how it is, and stopping it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle.platforms.vertex.client import connected
from rekindle.platforms.watch import Look
from rekindle.records import RunStatus
from rekindle.spec.places import VertexSpec

if TYPE_CHECKING:
    from rekindle.platforms.vertex.client import Project

_RUNS: dict[str, RunStatus] = {
    "SUCCEEDED": "succeeded", "FAILED": "failed", "CANCELLED": "cancelled",
}  # fmt: skip


def look(place: VertexSpec, id: str) -> Look:
    """The run now."""
    with connected(place) as project:
        return Look(_RUNS.get(_state_of(project, id), "running"))


def cancel(place: VertexSpec, id: str) -> None:
    """Have the job cancelled. A job that is over stays as it is."""
    with connected(place) as project:
        if _state_of(project, id) in _RUNS:
            return
        from google.api_core.exceptions import ClientError

        try:
            project.pipelines.cancel_pipeline_job(name=id, retry=project.retry)
        except ClientError:
            if _state_of(project, id) not in _RUNS:  # it may have ended meanwhile
                raise


def _state_of(project: Project, id: str) -> str:
    found = project.pipelines.get_pipeline_job(name=id, retry=project.retry)
    return str(found.state.name).removeprefix("PIPELINE_STATE_")
