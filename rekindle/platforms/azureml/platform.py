"""Azure Machine Learning as a platform: the class that the application talks to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rekindle.platforms.api import DeploysModels, PublishesModels, RaisesAlarms
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.modules import PlatformOfModules

if TYPE_CHECKING:
    from pathlib import Path

    from rekindle.ir.graph import Graph
    from rekindle.platforms.azureml.alarms import AzureMLAlarms
    from rekindle.platforms.azureml.endpoint import AzureMLEndpoint
    from rekindle.platforms.modules import (
        ClientModule,
        DoctorModule,
        RunsModule,
        ScheduleModule,
    )
    from rekindle.platforms.submission import Definition
    from rekindle.spec.deploy import DeploySpec


class AzureML(PlatformOfModules[AzureMLSpec], DeploysModels, RaisesAlarms, PublishesModels):
    """Azure Machine Learning: pipelines, schedules, endpoints, alarms, a model registry."""

    name = "azureml"
    section = AzureMLSpec
    cloud = "azure"

    @property
    def _client(self) -> ClientModule[AzureMLSpec]:
        from rekindle.platforms.azureml import client

        return client

    @property
    def _runs(self) -> RunsModule[AzureMLSpec]:
        from rekindle.platforms.azureml import runs

        return runs

    @property
    def _schedule(self) -> ScheduleModule[AzureMLSpec]:
        from rekindle.platforms.azureml import schedule

        return schedule

    @property
    def _doctor(self) -> DoctorModule[AzureMLSpec]:
        from rekindle.platforms.azureml import doctor

        return doctor

    def compile(self, ir_text: str, graph: Graph, arguments: Mapping[str, object]) -> Definition:
        from rekindle.platforms.azureml.compile import compile

        return compile(ir_text, graph, arguments, self.settings)

    def endpoint(self, deploy: DeploySpec, name: str) -> AzureMLEndpoint:
        from rekindle.platforms.azureml.endpoint import AzureMLEndpoint

        return AzureMLEndpoint(self.settings, deploy, name)

    def alarms(self, definition: Definition, model: str, folder: Path) -> AzureMLAlarms:
        from rekindle.platforms.azureml.alarms import AzureMLAlarms

        return AzureMLAlarms(self.settings, definition, model, folder)

    def publisher(self, name: str) -> AzureMLEndpoint:
        from rekindle.spec.deploy import DeploySpec

        return self.endpoint(DeploySpec(), name)
