"""What a definition for SageMaker will make of an account, read from the definition itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Planned

SUFFIX = ".sagemaker.json"


def steps(definition: Definition) -> tuple[Planned, ...]:
    """The jobs by name, those of every branch: on machines of which type."""
    return tuple(planned for planned, _, _ in jobs(definition))


def jobs(definition: Definition) -> Iterator[tuple[Planned, str, str]]:
    """The same, each with its kind, `processing` or `training`, and its image."""
    found = json.loads(definition.text)
    return _jobs(found["Steps"])


def _jobs(steps: list[Mapping[str, Any]]) -> Iterator[tuple[Planned, str, str]]:
    for step in steps:
        job, name = step["Arguments"], step["Name"]
        if step["Type"] == "Processing":
            cluster = job["ProcessingResources"]["ClusterConfig"]
            planned = Planned(name, cluster["InstanceType"], cluster["InstanceCount"])
            yield planned, "processing", job["AppSpecification"]["ImageUri"]
        elif step["Type"] == "Training":
            resources, spot = job["ResourceConfig"], job.get("EnableManagedSpotTraining", False)
            planned = Planned(name, resources["InstanceType"], resources["InstanceCount"], spot)
            yield planned, "training", job["AlgorithmSpecification"]["TrainingImage"]
        else:
            for inner in ("IfSteps", "ElseSteps", "ForEachBody"):
                yield from _jobs(job.get(inner, []))
