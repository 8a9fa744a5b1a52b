"""SageMaker as a platform: the class that the application talks to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rekindle.platforms.api import DeploysModels, PublishesModels, RaisesAlarms
from rekindle.platforms.modules import PlatformOfModules
from rekindle.platforms.sagemaker.section import SageMakerSpec

if TYPE_CHECKING:
    from pathlib import Path

    from rekindle.ir.graph import Graph
    from rekindle.platforms.modules import (
        ClientModule,
        DoctorModule,
        RunsModule,
        ScheduleModule,
    )
    from rekindle.platforms.sagemaker.alarms import SageMakerAlarms
    from rekindle.platforms.sagemaker.endpoint import SageMakerEndpoint
    from rekindle.platforms.submission import Definition
    from rekindle.spec.deploy import DeploySpec


class SageMaker(PlatformOfModules[SageMakerSpec], DeploysModels, RaisesAlarms, PublishesModels):
    """SageMaker: pipelines, schedules, endpoints, alarms, a model registry."""

    name = "sagemaker"
    section = SageMakerSpec
    cloud = "aws"

    @classmethod
    def gpu_machines(cls) -> tuple[str, ...]:
        from rekindle.platforms.sagemaker.limits import limits

        return tuple(limits()["gpu_machines"])

    @classmethod
    def replaces_image(cls, image: str) -> bool:
        from rekindle.platforms.sagemaker.limits import ECR

        # SageMaker pulls from ECR only: rekindle's image stands in for all others
        return not ECR.fullmatch(image)

    @property
    def _client(self) -> ClientModule[SageMakerSpec]:
        from rekindle.platforms.sagemaker import client

        return client

    @property
    def _runs(self) -> RunsModule[SageMakerSpec]:
        from rekindle.platforms.sagemaker import runs

        return runs

    @property
    def _schedule(self) -> ScheduleModule[SageMakerSpec]:
        from rekindle.platforms.sagemaker import schedule

        return schedule

    @property
    def _doctor(self) -> DoctorModule[SageMakerSpec]:
        from rekindle.platforms.sagemaker import doctor

        return doctor

    def compile(self, ir_text: str, graph: Graph, arguments: Mapping[str, object]) -> Definition:
        from rekindle.platforms.sagemaker.compile import compile

        return compile(ir_text, graph, arguments, self.settings)

    def endpoint(self, deploy: DeploySpec, name: str) -> SageMakerEndpoint:
        from rekindle.platforms.sagemaker.endpoint import SageMakerEndpoint

        return SageMakerEndpoint(self.settings, deploy, name)

    def alarms(self, definition: Definition, model: str, folder: Path) -> SageMakerAlarms:
        from rekindle.platforms.sagemaker.alarms import SageMakerAlarms

        return SageMakerAlarms(self.settings, definition, model, folder)

    def publisher(self, name: str) -> SageMakerEndpoint:
        from rekindle.spec.deploy import DeploySpec

        return self.endpoint(DeploySpec(), name)
