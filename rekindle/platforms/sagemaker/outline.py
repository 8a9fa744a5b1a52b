"""What a definition for SageMaker will make of an account, read from the definition itself."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.platforms.cache_diff import CacheKey, of_bundle
from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Planned

SUFFIX = ".sagemaker.json"
_READ = re.compile(r"Steps\.([\w-]+)\.")
_PARAMETER = re.compile(r'"Parameters\.([^"]+)"')


def steps(definition: Definition) -> tuple[Planned, ...]:
    """The jobs by name, those of every branch: on machines of which type."""
    return tuple(planned for planned, _ in _planned(definition))


def images(definition: Definition) -> frozenset[str]:
    """Images of the jobs."""
    return frozenset(image for _, image in _planned(definition))


def _planned(definition: Definition) -> Iterator[tuple[Planned, str]]:
    for step in _jobs(json.loads(definition.text)["Steps"]):
        job, name = step["Arguments"], step["Name"]
        if step["Type"] == "Processing":
            cluster = job["ProcessingResources"]["ClusterConfig"]
            planned = Planned(name, cluster["InstanceType"], cluster["InstanceCount"])
            yield planned, job["AppSpecification"]["ImageUri"]
        elif step["Type"] == "Training":
            resources, spot = job["ResourceConfig"], job.get("EnableManagedSpotTraining", False)
            planned = Planned(name, resources["InstanceType"], resources["InstanceCount"], spot)
            yield planned, job["AlgorithmSpecification"]["TrainingImage"]


def _jobs(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The steps, those inside of conditions and loops in place of these."""
    for step in steps:
        if step["Type"] == "Condition":
            yield from _jobs([*step["Arguments"]["IfSteps"], *step["Arguments"]["ElseSteps"]])
        elif step["Type"] == "ForEach":
            over = step["Arguments"]["IterableItems"]
            yield from ({**one, "IterableItems": over} for one in step["Arguments"]["ForEachBody"])
        else:
            yield step


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """The steps as the cache sees them, from the files that `compile` writes.

    The service's key holds image, environment and inputs, the latter as URIs: whatever an execution
    writes lies at a new one, so all that reads it runs again, too."""
    definition = json.loads(Definition(files).text)
    defaults = {p["Name"]: json.dumps(p["DefaultValue"]) for p in definition["Parameters"]}
    return tuple(_unit(step, defaults, files) for step in _jobs(definition["Steps"]))


def _unit(
    step: dict[str, Any], defaults: Mapping[str, str], files: Mapping[str, bytes]
) -> CacheKey:
    job = step["Arguments"]
    inputs = {i["InputName"]: i["S3Input"]["S3Uri"] for i in job.get("ProcessingInputs", ())}
    for channel in job.get("InputDataConfig", ()):
        inputs[channel["ChannelName"]] = channel["DataSource"]["S3DataSource"]["S3Uri"]
    environment = json.dumps(job.get("Environment", {}), sort_keys=True)
    given = environment + json.dumps(step.get("IterableItems"))
    bundle = str(inputs.pop("bundle", ""))
    algorithm = job.get("AppSpecification") or job.get("AlgorithmSpecification") or {}
    parts = {
        "image": json.dumps(algorithm, sort_keys=True),
        "environment variables": environment,
        "inputs": json.dumps(inputs, sort_keys=True),
        **{f"parameter `{n}`": defaults.get(n, "") for n in _PARAMETER.findall(given)},
        **of_bundle("bundles" + bundle.partition("/bundles")[2], files),
    }
    reads = _READ.findall(json.dumps([*inputs.values(), job.get("InferenceSpecification")]))
    cached = bool(step.get("CacheConfig", {}).get("Enabled"))
    return CacheKey(step["Name"], cached, parts, tuple(dict.fromkeys(reads)))
