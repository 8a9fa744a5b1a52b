"""Which platforms are installed: ours, and those of other packages.

A platform is a class (rekindle/platforms/api.py) that is named here, or by an entry point
of another package in the group `rekindle.platforms`. Classes are found by name: nothing
below the floor of platforms imports one. One that cannot be used is left out, by name."""

import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol, get_args

from pydantic import BaseModel

from rekindle.spec.section import PlatformSection

# the version of the seam that a platform of another package has to be written for
SEAM = 1
PLATFORM = "rekindle.platforms.api.Platform"
Verdict = Literal["native", "emulated", "noticed", "ignored", "refused"]
ENTRY_POINTS = "rekindle.platforms"
BUILT_IN = {  # in the order that their sections have in the schema
    "kubeflow": "rekindle.platforms.kubeflow.platform:Kubeflow",
    "vertex": "rekindle.platforms.vertex.platform:Vertex",
    "sagemaker": "rekindle.platforms.sagemaker.platform:SageMaker",
    "azureml": "rekindle.platforms.azureml.platform:AzureML",
}


class PlatformFacts(Protocol):
    """What is asked of a platform's class where none of its objects is there yet."""

    name: ClassVar[str]
    """What configs, options and records call it."""
    seam: ClassVar[int]
    """The version of the seam that it was written for."""
    section: ClassVar[type[PlatformSection]]
    """Its section of the config."""
    cloud: ClassVar[str]
    """Whose machines and prices the planner looks at: aws, azure or gcp; "" for none."""

    @classmethod
    def features(cls) -> Mapping[str, str | Mapping[str, str]]:
        """Its column of the feature table (rekindle/catalog/features.yaml): a verdict for
        each feature, or a verdict with its reason. What is not in it is refused."""

    @classmethod
    def gpu_machines(cls) -> tuple[str, ...] | None:
        """Its names of machines with GPUs; None: as its cloud calls them."""

    @classmethod
    def publishes(cls) -> bool:
        """Whether it has a model registry that champions can be published in."""


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A platform that cannot be used, from which package, and why."""

    name: str
    package: str
    reason: str

    def __str__(self) -> str:
        return f"the platform `{self.name}` of {self.package} is left out: {self.reason}"


@dataclasses.dataclass(frozen=True)
class InstalledPlatforms:
    """The classes of platforms by name, and those that cannot be used."""

    classes: Mapping[str, type[PlatformFacts]]
    left_out: tuple[LeftOut, ...]


@functools.cache
def installed_platforms() -> InstalledPlatforms:
    """The platforms of rekindle, then those of other packages by name."""
    classes: dict[str, type[PlatformFacts]] = {}
    left_out = []
    candidates = [(name, target, "rekindle") for name, target in BUILT_IN.items()]
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS)):
        package = entry.dist.name if entry.dist else entry.value
        candidates.append((entry.name, entry.value, package))
    for name, target, package in candidates:
        if name == "local" or name in classes:
            left_out.append(LeftOut(name, package, "there is a platform of that name"))
            continue
        try:
            classes[name] = _class_of(name, target)
        # another author's code, which must not stop ours: not by `sys.exit` either
        except (Exception, SystemExit) as error:  # noqa: BLE001
            reason = str(error) or type(error).__name__
            left_out.append(LeftOut(name, package, reason))
    return InstalledPlatforms(classes, tuple(left_out))


def _class_of(name: str, target: str) -> type[PlatformFacts]:
    """The class `module:Class`; raises what importing it and asking it raises, and ValueError
    for one that is not a platform of this seam. All that is asked of it where no object of it
    is there yet is asked here, so that what is installed can be used."""
    module, _, attribute = target.partition(":")
    platform_class: type[PlatformFacts] = getattr(importlib.import_module(module), attribute)
    seam = getattr(platform_class, "seam", None)
    if seam != SEAM:
        raise ValueError(f"it was written for version {seam} of the seam, and this is {SEAM}")
    if platform_class.name != name:
        raise ValueError(f"its class calls itself `{platform_class.name}`")
    # the name of a section, and of a field of the object that holds all sections
    if not name.isidentifier() or hasattr(BaseModel, name):
        raise ValueError(f"`{name}` cannot be the name of a section")
    bases = {f"{base.__module__}.{base.__qualname__}" for base in platform_class.__mro__}
    if PLATFORM not in bases:
        raise ValueError(f"{attribute} is not a {PLATFORM}")
    abstract = sorted(getattr(platform_class, "__abstractmethods__", ()))
    if abstract:
        raise ValueError(f"{attribute} has no {', '.join(abstract)}")
    section = platform_class.section
    if not (isinstance(section, type) and issubclass(section, PlatformSection)):
        raise ValueError(f"{section!r} is not a PlatformSection")
    missing = {"image", "artifact_root"} - section.model_fields.keys()
    if missing:
        raise ValueError(f"{section.__name__} has no {', '.join(sorted(missing))}")
    section.model_validate({})  # a config that does not name the platform has its defaults
    _check_features(platform_class.features())
    platform_class.gpu_machines()
    platform_class.publishes()
    return platform_class


def _check_features(column: Mapping[str, str | Mapping[str, str]]) -> None:
    """ValueError for a cell without one of the verdicts."""
    for feature, cell in column.items():
        words = {cell} if isinstance(cell, str) else set(cell)
        if len(words.intersection(get_args(Verdict))) != 1:
            verdicts = ", ".join(get_args(Verdict))
            raise ValueError(f"its feature `{feature}` has none of the verdicts {verdicts}")


def platform_names() -> tuple[str, ...]:
    """The names of all platforms but this machine, sorted."""
    return tuple(sorted(installed_platforms().classes))


def publishing_platforms() -> tuple[str, ...]:
    """Those with a model registry that champions can be published in, sorted."""
    classes = installed_platforms().classes
    return tuple(name for name in platform_names() if classes[name].publishes())
