"""Vertex AI as a platform: the class that the application talks to.

Each subject has a module here, imported when it is needed: an SDK is needed by what speaks
to the service only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rekindle.platforms.api import (
    DeploysModels,
    Platform,
    PublishesModels,
    RaisesAlarms,
    SchedulesPipelines,
)
from rekindle.platforms.vertex.section import VertexSpec

if TYPE_CHECKING:
    from pathlib import Path

    from rekindle.ir.graph import Graph
    from rekindle.outputs import Schedule
    from rekindle.platforms.cache_diff import CacheKey
    from rekindle.platforms.checks import Needs, PlatformCheck
    from rekindle.platforms.logs import LogPiece
    from rekindle.platforms.snapshot import RunSnapshot
    from rekindle.platforms.submission import (
        Definition,
        Lowered,
        RunTag,
        SubmissionPreview,
        SubmittedRun,
    )
    from rekindle.platforms.vertex.alarms import VertexAlarms
    from rekindle.platforms.vertex.endpoint import VertexEndpoint
    from rekindle.records import ArtifactRecord, StepRecord
    from rekindle.spec.deploy import DeploySpec
    from rekindle.spec.schedule import ScheduleSpec


class Vertex(
    Platform[VertexSpec], SchedulesPipelines, DeploysModels, RaisesAlarms, PublishesModels
):
    """Vertex AI: pipelines, schedules, endpoints, alarms, a model registry."""

    name = "vertex"
    section = VertexSpec
    cloud = "gcp"

    def compile(self, ir_text: str, graph: Graph, arguments: Mapping[str, object]) -> Definition:
        from rekindle.platforms.vertex.compile import compile

        return compile(ir_text, graph, arguments, self.settings)

    def cache_keys(self, files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
        from rekindle.platforms.vertex import client

        return client.cache_keys(files)

    def preview(self, definition: Definition, token: str) -> SubmissionPreview:
        from rekindle.platforms.submission import SubmissionPreview
        from rekindle.platforms.vertex import client

        name = client.run_name(definition, token)
        return SubmissionPreview(client.where(self.settings), name, client.steps(definition))

    def submit(self, definition: Definition, mark: RunTag) -> SubmittedRun:
        from rekindle.platforms.vertex import client

        return client.submit(definition, self.settings, mark)

    def describe(self, id: str) -> RunSnapshot:
        from rekindle.platforms.vertex import runs

        return runs.describe(self.settings, id)

    def read_log(self, id: str, step: StepRecord, cursor: str) -> LogPiece:
        from rekindle.platforms.vertex import runs

        return runs.read_log(self.settings, id, step, cursor)

    def cancel(self, id: str) -> None:
        from rekindle.platforms.vertex import runs

        runs.cancel(self.settings, id)

    def resume(self, definition: Definition, id: str, mark: RunTag) -> SubmittedRun:
        from rekindle.platforms.vertex import runs

        return runs.resume(definition, self.settings, id, mark)

    def artifacts(self, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
        from rekindle.platforms.vertex import runs

        return runs.artifacts(self.settings, id, step)

    def read(self, uri: str) -> bytes:
        from rekindle.platforms.vertex import runs

        return runs.read(self.settings, uri)

    def permissions(self, needs: Needs) -> str:
        from rekindle.platforms.vertex import doctor

        return doctor.permissions(self.settings, needs)

    def checks(self, definition: Definition | None, needs: Needs) -> Iterator[PlatformCheck]:
        from rekindle.platforms.vertex import doctor

        return doctor.checks(self.settings, definition, needs)

    def lowered(self, schedule: ScheduleSpec) -> Lowered:
        from rekindle.platforms.vertex import schedule as schedules

        return schedules.lowered(schedule, self.settings)

    def set_schedule(self, definition: Definition, schedule: ScheduleSpec, name: str) -> Schedule:
        from rekindle.platforms.vertex import schedule as schedules

        return schedules.set_schedule(definition, self.settings, schedule, name)

    def list_schedules(self) -> tuple[Schedule, ...]:
        from rekindle.platforms.vertex import schedule as schedules

        return schedules.list_schedules(self.settings)

    def pause_schedule(self, name: str) -> Schedule:
        from rekindle.platforms.vertex import schedule as schedules

        return schedules.pause_schedule(self.settings, name)

    def delete_schedule(self, name: str) -> bool:
        from rekindle.platforms.vertex import schedule as schedules

        return schedules.delete_schedule(self.settings, name)

    def endpoint(self, deploy: DeploySpec, name: str) -> VertexEndpoint:
        from rekindle.platforms.vertex.endpoint import VertexEndpoint

        return VertexEndpoint(self.settings, deploy, name)

    def alarms(self, definition: Definition, model: str, folder: Path) -> VertexAlarms:
        from rekindle.platforms.vertex.alarms import VertexAlarms

        return VertexAlarms(self.settings, definition, model, folder)

    def publisher(self, name: str) -> VertexEndpoint:
        from rekindle.spec.deploy import DeploySpec

        return self.endpoint(DeploySpec(), name)
