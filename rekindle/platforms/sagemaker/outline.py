"""What a definition for SageMaker will make of an account, read from the definition itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Planned

SUFFIX = ".sagemaker.json"


def definition_file(definition: Definition) -> str:
    """Name of the definition's file; the others are bundles of its steps."""
    (name,) = (name for name in definition.files if name.endswith(SUFFIX))
    return name


def steps(definition: Definition) -> tuple[Planned, ...]:
    """The jobs by name, those of every branch: on machines of which type."""
    found = json.loads(definition.files[definition_file(definition)])
    return tuple(_jobs(found["Steps"]))


def _jobs(steps: list[Mapping[str, Any]]) -> Iterator[Planned]:
    for step in steps:
        job = step["Arguments"]
        if step["Type"] == "Processing":
            cluster = job["ProcessingResources"]["ClusterConfig"]
            yield Planned(step["Name"], cluster["InstanceType"], cluster["InstanceCount"])
        elif step["Type"] == "Training":
            resources, spot = job["ResourceConfig"], job.get("EnableManagedSpotTraining", False)
            machine, count = resources["InstanceType"], resources["InstanceCount"]
            yield Planned(step["Name"], machine, count, spot)
        else:
            for inner in ("IfSteps", "ElseSteps", "ForEachBody"):
                yield from _jobs(job.get(inner, []))
