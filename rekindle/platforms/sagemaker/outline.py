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
    return tuple(planned for planned, _ in _jobs(json.loads(definition.text)["Steps"]))


def images(definition: Definition) -> frozenset[str]:
    """Images of the jobs."""
    return frozenset(image for _, image in _jobs(json.loads(definition.text)["Steps"]))


def _jobs(steps: list[Mapping[str, Any]]) -> Iterator[tuple[Planned, str]]:
    for step in steps:
        job, name = step["Arguments"], step["Name"]
        if step["Type"] == "Processing":
            cluster = job["ProcessingResources"]["ClusterConfig"]
            planned = Planned(name, cluster["InstanceType"], cluster["InstanceCount"])
            yield planned, job["AppSpecification"]["ImageUri"]
        elif step["Type"] == "Training":
            resources, spot = job["ResourceConfig"], job.get("EnableManagedSpotTraining", False)
            planned = Planned(name, resources["InstanceType"], resources["InstanceCount"], spot)
            yield planned, job["AlgorithmSpecification"]["TrainingImage"]
        else:
            for inner in ("IfSteps", "ElseSteps", "ForEachBody"):
                yield from _jobs(job.get(inner, []))
