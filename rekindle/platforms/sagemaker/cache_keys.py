"""The steps of a definition for SageMaker as its cache sees them.

The service's key holds image, environment and inputs, the latter as URIs: whatever an execution
writes lies at a new one, so all that reads it runs again, too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.platforms.cache_diff import CacheKey
from rekindle.platforms.cache_keys import of_bundle

_READ = re.compile(r"Steps\.([\w-]+)\.")
_PARAMETER = re.compile(r'"Parameters\.([^"]+)"')


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """From the files that `compile` writes."""
    (name,) = (name for name in files if name.endswith(".sagemaker.json"))
    definition = json.loads(files[name])
    defaults = {p["Name"]: json.dumps(p["DefaultValue"]) for p in definition["Parameters"]}
    return tuple(_unit(step, defaults, files) for step in _jobs(definition["Steps"]))


def _jobs(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for step in steps:
        if step["Type"] == "Condition":
            yield from _jobs([*step["Arguments"]["IfSteps"], *step["Arguments"]["ElseSteps"]])
        elif step["Type"] == "ForEach":
            over = step["Arguments"]["IterableItems"]
            yield from ({**one, "IterableItems": over} for one in step["Arguments"]["ForEachBody"])
        else:
            yield step


def _unit(
    step: dict[str, Any], defaults: Mapping[str, str], files: Mapping[str, bytes]
) -> CacheKey:
    job = step["Arguments"]
    inputs = {i["InputName"]: i["S3Input"]["S3Uri"] for i in job.get("ProcessingInputs", ())}
    inputs |= {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
        for c in job.get("InputDataConfig", ())
    }
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
