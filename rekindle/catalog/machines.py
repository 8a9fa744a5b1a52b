"""What a machine has: GPUs, CPUs, memory, and the links inside and between machines.

The rows are in machines.yaml, in families. What could not be confirmed is None; plans say so."""

import dataclasses
import datetime
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rekindle.catalog.tables import rows, unknown

Cloud = Literal["aws", "gcp", "azure", "local"]
THIS_CPU = "this-cpu"


@dataclasses.dataclass(frozen=True)
class Link:
    """How fast data goes at most, one way: from a GPU to another one of its machine, or from a
    machine to others, all its network interfaces together."""

    technology: str
    bytes_per_second: float | None


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine by its cloud's name. `inside` connects its GPUs, None where it has one or none;
    `between` is None where nothing is known of its network, which `nics` interfaces carry."""

    name: str
    cloud: Cloud
    gpu: str | None
    gpus: int
    vcpus: int | None
    memory_bytes: int | None
    inside: Link | None
    between: Link | None
    nics: int | None
    source: str
    as_of: datetime.date


@functools.cache
def machines() -> Mapping[str, Machine]:
    """All machines by name; `this-cpu` is the one that this runs on, without its GPUs."""
    families = rows(Path(__file__).with_suffix(".yaml"))
    found = {}
    for family in families:
        for name, (gpus, vcpus, gib, technology, gbit, nics) in family["sizes"].items():
            inside = Link(family["inside"][0], family["inside"][1] * 1e9) if gpus > 1 else None
            speed = None if gbit is None else gbit * 1e9 / 8
            found[name] = Machine(
                name, family["cloud"], family.get("gpu"), gpus, vcpus,
                None if gib is None else gib * 2**30,
                inside, Link(technology, speed) if technology else None, nics,
                " ".join(family["source"].split()), family["as_of"],
            )  # fmt: skip
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    here = dataclasses.replace(found[THIS_CPU], vcpus=os.cpu_count(), memory_bytes=memory_bytes)
    return {**found, THIS_CPU: here}


def machine(name: str) -> Machine:
    """The machine that a platform calls so; RequestError with the nearest name if there is none.
    `machine("ml.p5.48xlarge")` is EC2's p5.48xlarge: 8 H100, 400e9 bytes/s between machines."""
    plain = name.removeprefix("ml.")
    if plain not in machines():
        raise unknown("machine", name, machines())
    return machines()[plain]
