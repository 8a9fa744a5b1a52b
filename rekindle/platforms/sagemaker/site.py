"""Where everything of one compilation for SageMaker lies, and what it is called."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from rekindle.ir.flatten import Flat, Given, Guard, Output, sources
from rekindle.ir.graph import Importer, Step
from rekindle.ir.rewrite import OWN_IMAGES
from rekindle.spec.places import SageMakerSpec

ECR = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/.+")


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

    def given(self, flat: Flat) -> dict[str, str]:
        """The pipeline's parameters that the step reads from its environment, each with its
        variable there."""
        guarding = [s for guard in self.guarded[flat.path] for s in guard.values.values()]
        given = (*flat.parameters.values(), *guarding)
        read = [s for source in given for s in sources(source)]
        names = dict.fromkeys(s.name for s in read if isinstance(s, Given))
        open_ = [name for name in names if name in self.values and name not in self.fixed]
        return {name: f"REKINDLE_P{i}" for i, name in enumerate(open_)}

    def image(self, step: Step) -> str:
        """The image that the step runs in: its own, where the service can pull it."""
        image = step.container.image
        if image.startswith(OWN_IMAGES) or (step.container.source and not ECR.fullmatch(image)):
            return self.place.image or image
        return image

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

    def folder(self, job: str, *more: str) -> dict[str, Any]:
        """What a job of this execution writes to."""
        return joined(f"{self.root}/runs", {"Get": "Execution.PipelineExecutionId"}, job, *more)


def joined(*parts: Any, on: str = "/") -> dict[str, Any]:
    """Text that the service puts together."""
    return {"Std:Join": {"On": on, "Values": list(parts)}}


def is_training(step: Step | Importer) -> bool:
    """Whether the step becomes a Training job: several machines, or GPUs."""
    if isinstance(step, Importer):
        return False
    return step.distribution is not None or bool(step.container.resources.accelerator_type)
