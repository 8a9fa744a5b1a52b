"""What a platform is: the class that the application talks to, and what it may be able to do
beside running pipelines.

A platform is a folder, or a package of its own, with a class that is a `Platform`, and that may
have the methods of `SchedulesPipelines`, `DeploysModels`, `RaisesAlarms` and `PublishesModels`.
What it cannot do is refused by name, with what to do instead. It brings its section of the config,
its column of the feature table (`features.yaml` beside its module) and its limits. One of another
package is found by an entry point of the group `rekindle.platforms`:

    [project.entry-points."rekindle.platforms"]
    toy = "rekindle_toy:Toy"

Its methods import what speaks to the platform when they are called: the class itself is imported
by everything that reads a config."""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from rekindle.errors import RequestError
from rekindle.spec.installed import SEAM, installed_platforms, platform_names
from rekindle.spec.section import PlatformSection
from rekindle.tables import rows

if TYPE_CHECKING:
    from rekindle.ir.graph import Graph
    from rekindle.outputs import Schedule
    from rekindle.platforms.alarms import Monitoring
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
    from rekindle.records import ArtifactRecord, StepRecord
    from rekindle.serve.messages import ServedModel
    from rekindle.serve.rollout import Endpoint
    from rekindle.spec.deploy import DeploySpec
    from rekindle.spec.platforms import PlatformsSpec
    from rekindle.spec.schedule import ScheduleSpec

SectionT_co = TypeVar("SectionT_co", bound=PlatformSection, covariant=True)


class Platform(abc.ABC, Generic[SectionT_co]):
    """A platform with its section of one config.

    What speaks to the platform raises PlatformError, and UnreachableError where the same
    question may be answered later. `id` is the one that a run has there."""

    name: ClassVar[str]
    """What configs, options and records call it."""
    section: ClassVar[type[PlatformSection]]
    """Its section of the config, the type of `settings`."""
    seam: ClassVar[int] = SEAM
    """The version of this class that it was written for; a literal in another package."""
    cloud: ClassVar[str] = ""
    """Whose machines and prices the planner looks at: aws, azure or gcp; "" for none."""

    sees_latency: ClassVar[bool] = False
    """Whether what its endpoints observe has latencies, by which a version may be judged."""

    def __init__(self, settings: SectionT_co) -> None:
        self.settings = settings

    @classmethod
    def features(cls) -> Mapping[str, str | Mapping[str, str]]:
        """Its column of the feature table, read from `features.yaml` beside its module: a
        verdict (native, emulated, ignored, refused) for each feature, or `{verdict: how or
        why, source: ...}`. What is not in it is refused."""
        return _table_beside(cls, "features")

    @classmethod
    def gpu_machines(cls) -> tuple[str, ...] | None:
        """Its names of machines with GPUs; None: as its cloud calls them."""
        return None

    @classmethod
    def replaces_image(cls, image: str) -> bool:
        """Whether steps in this image run in the section's `image` instead."""
        return False

    @classmethod
    def publishes(cls) -> bool:
        """Whether it has a model registry that champions can be published in."""
        return issubclass(cls, PublishesModels)

    @abc.abstractmethod
    def compile(self, ir_text: str, graph: Graph, arguments: Mapping[str, object]) -> Definition:
        """The definition of a pipeline: the same input gives the same bytes. RequestError
        with all that the platform cannot express."""

    @abc.abstractmethod
    def cache_keys(self, files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
        """The steps of a definition's files as the platform's cache sees them."""

    @abc.abstractmethod
    def preview(self, definition: Definition, token: str) -> SubmissionPreview:
        """What a submission will make; asks nothing."""

    @abc.abstractmethod
    def submit(self, definition: Definition, mark: RunTag) -> SubmittedRun:
        """Start a run of the definition, unless one of the same submission is there."""

    @abc.abstractmethod
    def describe(self, id: str) -> RunSnapshot:
        """The run as it is now, its steps by the names of the preview."""

    @abc.abstractmethod
    def read_log(self, id: str, step: StepRecord, cursor: str) -> LogPiece:
        """What a step printed since `cursor`; all of it where that is empty."""

    @abc.abstractmethod
    def cancel(self, id: str) -> None:
        """Cancel the run; one that has ended stays as it is."""

    @abc.abstractmethod
    def resume(self, definition: Definition, id: str, mark: RunTag) -> SubmittedRun:
        """Run failed steps again, and keep those that succeeded."""

    @abc.abstractmethod
    def artifacts(self, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
        """What a step that succeeded made, and where it lies."""

    @abc.abstractmethod
    def read(self, uri: str) -> bytes:
        """A file of an artifact; FileNotFoundError where there is none."""

    @abc.abstractmethod
    def permissions(self, needs: Needs) -> str:
        """The least that steps need, as a file of the platform's own kind."""

    @abc.abstractmethod
    def checks(self, definition: Definition | None, needs: Needs) -> Iterator[PlatformCheck]:
        """The checks of the config and of what would be sent; none where it does not say
        where."""


ConfiguredPlatform: TypeAlias = Platform[PlatformSection]
"""A platform of any kind, with its section of the config."""


def _table_beside(platform_class: type, name: str) -> Mapping[str, str | Mapping[str, str]]:
    """The YAML file of that name in the folder of the module that a class is from."""
    module = sys.modules[platform_class.__module__]
    table: Mapping[str, str | Mapping[str, str]] = rows(
        Path(str(module.__file__)).with_name(f"{name}.yaml")
    )
    return table


@runtime_checkable
class SchedulesPipelines(Protocol):
    """A platform that starts pipelines by the clock itself."""

    def lowered(self, schedule: ScheduleSpec) -> Lowered:
        """The schedule in the platform's words; RequestError where it cannot keep to
        it."""

    def set_schedule(self, definition: Definition, schedule: ScheduleSpec, name: str) -> Schedule:
        """Create the schedule called `name`, or change it to this."""

    def list_schedules(self) -> tuple[Schedule, ...]:
        """The schedules that rekindle set here, also those of other configs, by name."""

    def pause_schedule(self, name: str) -> Schedule:
        """Start nothing by it until it is set again."""

    def delete_schedule(self, name: str) -> bool:
        """Whether there was one; runs that it started go on."""


@runtime_checkable
class DeploysModels(Protocol):
    """A platform that models are deployed to."""

    def endpoint(self, deploy: DeploySpec, name: str) -> Endpoint:
        """Where the model `name` is deployed."""


@runtime_checkable
class RaisesAlarms(Protocol):
    """A platform whose monitoring has alarms and dashboards."""

    def alarms(self, definition: Definition, model: str, folder: Path) -> Monitoring:
        """Where alarms of the pipeline and of the endpoint of `model` are kept; where
        these are files, they lie in `folder`."""


class Publisher(Protocol):
    """The model registry of a platform."""

    def publish(self, model: ServedModel, lineage: Mapping[str, str]) -> str:
        """Make the version the champion there, with what it was made of; returns its name
        there. A version that is there is found again. RequestError where others made what
        is called so."""


@runtime_checkable
class PublishesModels(Protocol):
    """A platform with a model registry that champions can be published in."""

    def publisher(self, name: str) -> Publisher:
        """Where versions of the model `name` are published."""


def platform_class(name: str) -> type[ConfiguredPlatform]:
    """The class of the platform called `name`; RequestError where there is none, with the
    reason where it is installed and left out."""
    installed = installed_platforms()
    if name in installed.classes:
        found_class = installed.classes[name]
        assert issubclass(found_class, Platform)  # as was looked at when it was found
        return found_class
    refuse_left_out(name)
    fix = f"one of {', '.join(platform_names())}"
    raise RequestError(f"there is no platform `{name}`", fix=fix)


def refuse_left_out(name: str) -> None:
    """RequestError with the reason where a platform of that name is installed and cannot be
    used."""
    for left_out in installed_platforms().left_out:
        if left_out.name == name:
            raise RequestError(str(left_out), fix=f"update or remove {left_out.package}")


def platform_of(name: str, sections: PlatformsSpec) -> ConfiguredPlatform:
    """The platform called `name` with its section; RequestError where there is none."""
    chosen_class = platform_class(name)
    return chosen_class(sections.section(name))


def names_with(ability: type) -> tuple[str, ...]:
    """The platforms that have an ability, one of the protocols above, sorted."""
    return tuple(name for name in platform_names() if issubclass(platform_class(name), ability))


def schedules_of(platform: ConfiguredPlatform) -> SchedulesPipelines:
    """The platform, if it has schedules; else RequestError."""
    if isinstance(platform, SchedulesPipelines):
        return platform
    fix = "start `rekindle submit` by cron, or run `rekindle watch`"
    raise RequestError(f"{platform.name} has no schedules", fix=fix)


def endpoint_of(platform: ConfiguredPlatform, deploy: DeploySpec, name: str) -> Endpoint:
    """Where the model `name` is deployed on the platform; RequestError where models are
    not deployed there, or its answers not judged by what `deploy` says."""
    if not isinstance(platform, DeploysModels):
        fix = f"deploy to one of local, {', '.join(names_with(DeploysModels))}"
        raise RequestError(f"models are not deployed to {platform.name}", fix=fix)
    if deploy.max_p99_ms and not platform.sees_latency:
        message = f"answers on {platform.name} are not judged by latency"
        raise RequestError(message, where="deploy.max_p99_ms", fix="leave it out")
    return platform.endpoint(deploy, name)


def alarms_of(platform: ConfiguredPlatform) -> RaisesAlarms:
    """The platform, if its monitoring has alarms; else RequestError."""
    if isinstance(platform, RaisesAlarms):
        return platform
    fix = f"they are written for {', '.join(names_with(RaisesAlarms))}"
    raise RequestError(f"rekindle writes no alarms for {platform.name}", fix=fix)


def publisher_of(platform: ConfiguredPlatform, name: str) -> Publisher:
    """Where versions of the model `name` are published; RequestError where the platform
    has no model registry."""
    if isinstance(platform, PublishesModels):
        return platform.publisher(name)
    fix = f"one of {', '.join(names_with(PublishesModels))}"
    raise RequestError(f"{platform.name} has no model registry", where="register.publish", fix=fix)
