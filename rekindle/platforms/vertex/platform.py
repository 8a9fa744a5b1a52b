"""Vertex AI as a platform: the class that the application talks to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rekindle.platforms.api import DeploysModels, PublishesModels, RaisesAlarms
from rekindle.platforms.modules import PlatformOfModules
from rekindle.platforms.vertex.section import VertexSpec

if TYPE_CHECKING:
    from pathlib import Path

    from rekindle.ir.graph import Graph
    from rekindle.platforms.modules import (
        ClientModule,
        DoctorModule,
        RunsModule,
        ScheduleModule,
    )
    from rekindle.platforms.submission import Definition
    from rekindle.platforms.vertex.alarms import VertexAlarms
    from rekindle.platforms.vertex.endpoint import VertexEndpoint
    from rekindle.spec.deploy import DeploySpec


class Vertex(PlatformOfModules[VertexSpec], DeploysModels, RaisesAlarms, PublishesModels):
    """Vertex AI: pipelines, schedules, endpoints, alarms, a model registry."""

    name = "vertex"
    section = VertexSpec
    cloud = "gcp"

    @property
    def _client(self) -> ClientModule[VertexSpec]:
        from rekindle.platforms.vertex import client

        return client

    @property
    def _runs(self) -> RunsModule[VertexSpec]:
        from rekindle.platforms.vertex import runs

        return runs

    @property
    def _schedule(self) -> ScheduleModule[VertexSpec]:
        from rekindle.platforms.vertex import schedule

        return schedule

    @property
    def _doctor(self) -> DoctorModule[VertexSpec]:
        from rekindle.platforms.vertex import doctor

        return doctor

    def compile(self, ir_text: str, graph: Graph, arguments: Mapping[str, object]) -> Definition:
        from rekindle.platforms.vertex.compile import compile

        return compile(ir_text, graph, arguments, self.settings)

    def endpoint(self, deploy: DeploySpec, name: str) -> VertexEndpoint:
        from rekindle.platforms.vertex.endpoint import VertexEndpoint

        return VertexEndpoint(self.settings, deploy, name)

    def alarms(self, definition: Definition, model: str, folder: Path) -> VertexAlarms:
        from rekindle.platforms.vertex.alarms import VertexAlarms

        return VertexAlarms(self.settings, definition, model, folder)

    def publisher(self, name: str) -> VertexEndpoint:
        from rekindle.spec.deploy import DeploySpec

        return self.endpoint(DeploySpec(), name)
