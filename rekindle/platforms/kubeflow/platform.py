"""Kubeflow Pipelines as a platform: the class that the application talks to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rekindle.platforms.api import DeploysModels, RaisesAlarms
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.modules import PlatformOfModules

if TYPE_CHECKING:
    from pathlib import Path

    from rekindle.ir.graph import Graph
    from rekindle.platforms.kubeflow.alarms import KubeflowAlarms
    from rekindle.platforms.kubeflow.endpoint import KubeflowEndpoint
    from rekindle.platforms.modules import (
        ClientModule,
        DoctorModule,
        RunsModule,
        ScheduleModule,
    )
    from rekindle.platforms.submission import Definition
    from rekindle.spec.deploy import DeploySpec


class Kubeflow(PlatformOfModules[KubeflowSpec], DeploysModels, RaisesAlarms):
    """Kubeflow Pipelines: pipelines, schedules, endpoints, alarms."""

    name = "kubeflow"
    section = KubeflowSpec
    sees_latency = True

    @property
    def _client(self) -> ClientModule[KubeflowSpec]:
        from rekindle.platforms.kubeflow import client

        return client

    @property
    def _runs(self) -> RunsModule[KubeflowSpec]:
        from rekindle.platforms.kubeflow import runs

        return runs

    @property
    def _schedule(self) -> ScheduleModule[KubeflowSpec]:
        from rekindle.platforms.kubeflow import schedule

        return schedule

    @property
    def _doctor(self) -> DoctorModule[KubeflowSpec]:
        from rekindle.platforms.kubeflow import doctor

        return doctor

    def compile(self, ir_text: str, graph: Graph, arguments: Mapping[str, object]) -> Definition:
        from rekindle.platforms.kubeflow.compile import compile

        return compile(ir_text, graph, arguments, self.settings)

    def endpoint(self, deploy: DeploySpec, name: str) -> KubeflowEndpoint:
        from rekindle.platforms.kubeflow.endpoint import KubeflowEndpoint

        return KubeflowEndpoint(self.settings, deploy, name)

    def alarms(self, definition: Definition, model: str, folder: Path) -> KubeflowAlarms:
        from rekindle.platforms.kubeflow.alarms import KubeflowAlarms

        return KubeflowAlarms(self.settings, definition, model, folder)
