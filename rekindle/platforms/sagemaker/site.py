"""Where everything of one compilation for SageMaker lies, and what it is called."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.ir.flatten import Flat, Given, Guard, Item, Output, sources
from rekindle.ir.graph import Importer, Step
from rekindle.platforms import bundle
from rekindle.platforms.submission import plain_name
from rekindle.platforms.user_code import ECR
from rekindle.spec.platforms import SageMakerSpec


@dataclasses.dataclass(frozen=True)
class Site:
    """What all jobs of one compilation share: the flat steps by path, the conditions that a step
    looks at itself (`guarded`), the names of jobs, the values of the pipeline's parameters with
    their types, and those that a run cannot change (`fixed`)."""

    place: SageMakerSpec
    flats: Mapping[str, Flat]
    guarded: Mapping[str, tuple[Guard, ...]]
    names: Mapping[str, str]
    types: Mapping[str, str]
    values: Mapping[str, Any]
    fixed: frozenset[str]

    @property
    def root(self) -> str:
        """The artifact root without a slash at its end."""
        return self.place.artifact_root.rstrip("/")

    def given(self, flat: Flat) -> dict[str, tuple[str, str, str]]:
        """What the step reads from its environment, the pipeline's parameters and the item of the
        loop around it: the variable, its type in the IR, and what the definition gets for it."""
        guarding = [s for guard in self.guarded[flat.path] for s in guard.values.values()]
        given = (*flat.parameters.values(), *guarding)
        read = [s for source in given for s in sources(source) if isinstance(s, Given)]
        found: dict[str, tuple[str, str, str]] = {}
        for one in {one.name: one for one in read}.values():
            variable = f"REKINDLE_P{len(found)}"
            if isinstance(one, Item):
                found[one.name] = variable, one.type, "ForEach.CurrentItem"
            elif one.name in self.values and one.name not in self.fixed:
                found[one.name] = variable, self.types[one.name], f"Parameters.{one.name}"
        return found

    def uri(self, source: Output) -> Any:
        """Where an output of a step lies, as a property of its job. A Training job's lies where the
        service puts the uncompressed model."""
        producer, name = self.flats[source.path].step, self.names[source.path]
        if isinstance(producer, Importer):
            return producer.uri.literal or ""
        if is_training(producer):
            folder = {"Get": f"Steps.{name}.OutputDataConfig.S3OutputPath"}
            job = {"Get": f"Steps.{name}.TrainingJobName"}
            return joined(folder, job, "output/model", source.name)
        outputs = f"Steps.{name}.ProcessingOutputConfig.Outputs"
        return {"Get": f"{outputs}['{source.name}'].S3Output.S3Uri"}

    def folder(self, job: str, *more: Any) -> dict[str, Any]:
        """What a job of this execution writes to."""
        return joined(f"{self.root}/runs", {"Get": "Execution.PipelineExecutionId"}, job, *more)

    def output(self, flat: Flat, name: str) -> dict[str, Any]:
        """Where a Processing job leaves an output; in a loop each turn has a folder of its own."""
        turn = [{"Get": "Execution.ProcessingJobName"}] if flat.loop else []
        return self.folder(self.names[flat.path], *turn, name)


def image_of(step: Step, place: SageMakerSpec) -> str:
    """The image that a step runs in: its own, where the service can pull it."""
    image = bundle.image_of(step, place.image)
    return (place.image or image) if step.container.source and not ECR.fullmatch(image) else image


def gets_secrets(step: Step, place: SageMakerSpec) -> bool:
    """Whether the step finds `platforms.sagemaker.secrets` in its environment."""
    return bool(place.secrets) and image_of(step, place) == place.image


def joined(*parts: Any, on: str = "/") -> dict[str, Any]:
    """Text that the service puts together."""
    return {"Std:Join": {"On": on, "Values": list(parts)}}


def is_training(step: Step | Importer) -> bool:
    """Whether the step becomes a Training job: several machines, or GPUs."""
    if isinstance(step, Importer):
        return False
    return step.distribution is not None or bool(step.container.resources.accelerator_type)


_ILLEGAL = r"[^A-Za-z0-9_-]+"


def names_of(paths: Iterable[str]) -> dict[str, str]:
    """A job name a step: its path, shortened by a hash where it is too long."""
    names: dict[str, str] = {}
    for path in paths:
        names[path] = plain_name(path, _ILLEGAL, 64, taken=names.values()).strip("-")
    return names


def condition_name(path: str) -> str:
    """The name of the Condition step for the condition at `path`."""
    return plain_name(f"if-{path}", _ILLEGAL, 64)
