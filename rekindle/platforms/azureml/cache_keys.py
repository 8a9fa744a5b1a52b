"""The steps of a job for Azure ML as its cache sees them.

A component that is deterministic is taken from an earlier job if component, values and the places
of its inputs are the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from rekindle.ir.compile import LOADER
from rekindle.platforms.cache_diff import CacheKey
from rekindle.platforms.cache_keys import of_bundle

_READ = re.compile(r"parent\.jobs\.(\w+)\.outputs")
_VALUE = re.compile(r"\$\{\{parent\.inputs\.(\w+)\}\}")


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """From the files that `compile` writes."""
    (name,) = (name for name in files if name.endswith(".azureml.yaml"))
    job = yaml.load(files[name], LOADER)  # noqa: S506 - it is the safe one
    found = {name: _unit(name, command, job, files) for name, command in job["jobs"].items()}
    ordered: dict[str, CacheKey] = {}
    while len(ordered) < len(found):  # the file's order is that of the names
        left = [unit for name, unit in found.items() if name not in ordered]
        ordered |= {unit.name: unit for unit in left if set(unit.places) <= ordered.keys()}
    return tuple(ordered.values())


def _unit(
    name: str, command: dict[str, Any], job: Mapping[str, Any], files: Mapping[str, bytes]
) -> CacheKey:
    component, inputs = command["component"], command["inputs"]
    values = {
        where: job["inputs"][match[1]]
        for where, text in inputs.items()
        if (match := _VALUE.fullmatch(str(text)))
    }
    others = {w: text for w, text in inputs.items() if w not in values}
    rest = {k: v for k, v in component.items() if k not in ("code", "environment")}
    parts = {
        "image": json.dumps(component["environment"]),
        "interface": json.dumps([rest, others], sort_keys=True),
        **{f"parameter `{where}`": json.dumps(value) for where, value in values.items()},
        **of_bundle(component["code"].removeprefix("./"), files),
    }
    reads = tuple(dict.fromkeys(_READ.findall(json.dumps(others))))
    return CacheKey(name, bool(component["is_deterministic"]), parts, reads)
