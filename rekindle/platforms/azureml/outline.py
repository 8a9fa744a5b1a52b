"""What a definition for Azure ML will make of a workspace, read from the definition itself."""

import graphlib
import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from rekindle.ir.compile import LOADER
from rekindle.platforms.cache_diff import CacheKey, of_bundle
from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Planned

SUFFIX = ".azureml.yaml"
_READ = re.compile(r"parent\.jobs\.(\w+)\.outputs")
_VALUE = re.compile(r"\$\{\{parent\.inputs\.(\w+)\}\}")


def steps(definition: Definition) -> tuple[Planned, ...]:
    """The steps by name, as they may begin: on which cluster, or on machines of which size."""
    jobs = _job_of(definition)["jobs"]
    needs = {name: _READ.findall(str(command["inputs"])) for name, command in jobs.items()}
    return tuple(
        _planned(name, jobs[name]) for name in graphlib.TopologicalSorter(needs).static_order()
    )


def _planned(name: str, command: dict[str, Any]) -> Planned:
    resources = command["resources"]
    cluster = command.get("compute", "").removeprefix("azureml:")
    machine = f"cluster {cluster}" if cluster else resources["instance_type"]
    spot = command.get("queue_settings", {}).get("job_tier") == "spot"
    return Planned(name, machine, resources["instance_count"], spot)


def images(definition: Definition) -> frozenset[str]:
    """Images of the steps."""
    jobs = _job_of(definition)["jobs"].values()
    return frozenset(one["component"]["environment"]["image"] for one in jobs)


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """The steps as the cache sees them, from the files that `compile` writes.

    A component that is deterministic is taken from an earlier job if component, values and the
    places of its inputs are the same."""
    job = _job_of(Definition(files))
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


def _job_of(definition: Definition) -> dict[str, Any]:
    job: dict[str, Any] = yaml.load(definition.text, LOADER)  # noqa: S506 - the safe one
    return job
