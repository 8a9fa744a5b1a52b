"""What a definition for Azure ML will make of a workspace, read from the definition itself."""

from __future__ import annotations

import graphlib
import re
from typing import Any

import yaml

from rekindle.ir.compile import LOADER
from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Planned

SUFFIX = ".azureml.yaml"
_READ = re.compile(r"parent\.jobs\.(\w+)\.outputs")


def steps(definition: Definition) -> tuple[Planned, ...]:
    """The steps by name, as they may begin: on which cluster, or on machines of which size."""
    job = yaml.load(definition.text, LOADER)  # noqa: S506 - the safe one
    jobs = job["jobs"]
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
    job = yaml.load(definition.text, LOADER)  # noqa: S506 - the safe one
    return frozenset(one["component"]["environment"]["image"] for one in job["jobs"].values())
