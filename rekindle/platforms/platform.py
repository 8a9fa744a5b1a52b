"""The seam between the application and platforms: what each of them does, and the table
of all.

A platform is a folder with one module for each subject: compile, client, runs, schedule,
doctor. They hold functions of the names below, which take the platform's settings, its
section of the config, where a `Platform` has them already; what a method says here holds
for all of them, and is not repeated there. A module is imported when it is first needed:
an SDK is needed by what speaks to the platform only."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rekindle.errors import RequestError
from rekindle.platforms.submission import SubmissionPreview
from rekindle.spec.deploy import DeploySpec

if TYPE_CHECKING:
    from pathlib import Path

    from rekindle.ir.graph import Graph
    from rekindle.outputs import Schedule
    from rekindle.platforms.alarms import Monitoring
    from rekindle.platforms.cache_diff import CacheKey
    from rekindle.platforms.checks import Needs, PlatformCheck
    from rekindle.platforms.logs import LogPiece
    from rekindle.platforms.snapshot import RunSnapshot
    from rekindle.platforms.submission import Definition, Lowered, RunTag, SubmittedRun
    from rekindle.records import ArtifactRecord, StepRecord
    from rekindle.serve.messages import ServedModel
    from rekindle.serve.rollout import Endpoint
    from rekindle.spec.platforms import PlatformsSpec
    from rekindle.spec.schedule import ScheduleSpec

PLATFORMS = {
    "azureml": "rekindle.platforms.azureml",
    "kubeflow": "rekindle.platforms.kubeflow",
    "sagemaker": "rekindle.platforms.sagemaker",
    "vertex": "rekindle.platforms.vertex",
}
ENDPOINTS = {  # those that models are deployed to: classes in their modules `endpoint`
    "azureml": "AzureMLEndpoint",
    "kubeflow": "KubeflowEndpoint",
    "sagemaker": "SageMakerEndpoint",
    "vertex": "VertexEndpoint",
}


class Publisher(Protocol):
    """The model registry of a platform: its endpoint, on those that `register.publish`
    may name."""

    def publish(self, model: ServedModel, lineage: Mapping[str, str]) -> str:
        """Make the version the champion there, with what it was made of; returns its name
        there. A version that is there is found again. RequestError where others made what
        is called so."""


@dataclasses.dataclass(frozen=True)
class Platform:
    """A platform and the settings of one config for it.

    What speaks to the platform raises PlatformError, and UnreachableError where the same
    question may be answered later. `id` is the one that a run has there."""

    name: str
    settings: Any

    @classmethod
    def of(cls, name: str, sections: PlatformsSpec) -> Platform:
        """The platform called `name`; RequestError where there is none."""
        if name not in PLATFORMS:
            fix = f"one of {', '.join(PLATFORMS)}"
            raise RequestError(f"there is no platform `{name}`", fix=fix)
        return cls(name, getattr(sections, name))

    def compile(self, ir_text: str, graph: Graph, arguments: Mapping[str, Any]) -> Definition:
        """The definition of a pipeline: the same input gives the same bytes. RequestError
        with all that the platform cannot express."""
        return self._module("compile").compile(ir_text, graph, arguments, self.settings)

    def cache_keys(self, files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
        """The steps of a definition's files as the platform's cache sees them."""
        return self._module("client").cache_keys(files)

    def outline(self, definition: Definition, token: str) -> SubmissionPreview:
        """What a submission will make; asks nothing."""
        client = self._module("client")
        name = client.run_name(definition, token)
        return SubmissionPreview(client.where(self.settings), name, client.steps(definition))

    def submit(self, definition: Definition, mark: RunTag) -> SubmittedRun:
        """Start a run of the definition, unless one of the same submission is there."""
        return self._module("client").submit(definition, self.settings, mark)

    def describe(self, id: str) -> RunSnapshot:
        """The run as it is now, its steps by the names of the outline."""
        return self._module("runs").describe(self.settings, id)

    def read_log(self, id: str, step: StepRecord, cursor: str) -> LogPiece:
        """What a step printed since `cursor`; all of it where that is empty."""
        return self._module("runs").read_log(self.settings, id, step, cursor)

    def cancel(self, id: str) -> None:
        """Cancel the run; one that has ended stays as it is."""
        self._module("runs").cancel(self.settings, id)

    def resume(self, definition: Definition, id: str, mark: RunTag) -> SubmittedRun:
        """Run failed steps again, and keep those that succeeded."""
        return self._module("runs").resume(definition, self.settings, id, mark)

    def artifacts(self, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
        """What a step that succeeded made, and where it lies."""
        return self._module("runs").artifacts(self.settings, id, step)

    def read(self, uri: str) -> bytes:
        """A file of an artifact; FileNotFoundError where there is none."""
        return self._module("runs").read(self.settings, uri)

    def lowered(self, schedule: ScheduleSpec) -> Lowered:
        """The schedule in the platform's words; RequestError where it cannot keep to
        it."""
        return self._module("schedule").lowered(schedule, self.settings)

    def set_schedule(self, definition: Definition, schedule: ScheduleSpec, name: str) -> Schedule:
        """Create the schedule called `name`, or change it to this."""
        return self._module("schedule").set_(definition, self.settings, schedule, name)

    def list_schedules(self) -> tuple[Schedule, ...]:
        """The schedules that rekindle set here, also those of other configs, by name."""
        return self._module("schedule").list_(self.settings)

    def pause_schedule(self, name: str) -> Schedule:
        """Start nothing by it until it is set again."""
        return self._module("schedule").pause(self.settings, name)

    def delete_schedule(self, name: str) -> bool:
        """Whether there was one; runs that it started go on."""
        return self._module("schedule").delete(self.settings, name)

    def permissions(self, needs: Needs) -> str:
        """The least that steps need, as a file of the platform's own kind."""
        return self._module("doctor").permissions(self.settings, needs)

    def checks(self, definition: Definition | None, needs: Needs) -> Iterator[PlatformCheck]:
        """The checks of the config and of what would be sent; none where it does not say
        where."""
        return self._module("doctor").checks(self.settings, definition, needs)

    def endpoint(self, deploy: DeploySpec, name: str) -> Endpoint:
        """Where the model `name` is deployed."""
        endpoint_class = getattr(self._module("endpoint"), ENDPOINTS[self.name])
        if deploy.max_p99_ms and not endpoint_class.sees_latency:
            message = f"answers on {self.name} are not judged by latency"
            raise RequestError(message, where="deploy.max_p99_ms", fix="leave it out")
        endpoint: Endpoint = endpoint_class(self.settings, deploy, name)
        return endpoint

    def alarms(self, definition: Definition, model: str, folder: Path) -> Monitoring:
        """Where alarms of the pipeline and of the endpoint of `model` are kept; where
        these are files, they lie in `folder`."""
        alarms: Monitoring = self._module("alarms").Alarms(self.settings, definition, model, folder)
        return alarms

    def publisher(self, name: str) -> Publisher:
        """Where versions of the model `name` are published."""
        return self.endpoint(DeploySpec(), name)  # type: ignore[return-value]

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{PLATFORMS[self.name]}.{name}")
