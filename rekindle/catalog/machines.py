"""What a machine has: GPUs, CPUs, memory, and the links inside and between machines; and what a GPU
has, and what it can do at most.

The rows are in machines.yaml, in families, and in gpus.yaml. What could not be confirmed is None;
plans say so."""

import dataclasses
import datetime
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rekindle.catalog.tables import unknown
from rekindle.tables import rows

Cloud = Literal["aws", "gcp", "azure", "local"]
THIS_CPU = "this-cpu"


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine by its cloud's name. Data goes so fast at most, one way: from a GPU to another one
    inside, None where it has one or none; and between it and others, over all its network
    interfaces together, None where that is not known."""

    name: str
    cloud: Cloud
    gpu: str | None
    gpus: int
    vcpus: int | None
    memory_bytes: int | None
    inside_bytes_per_second: float | None
    between_bytes_per_second: float | None
    source: str
    as_of: datetime.date


@functools.cache
def machines() -> Mapping[str, Machine]:
    """All machines by name; `this-cpu` is the one that this runs on, without its GPUs."""
    found = {}
    for family in rows(Path(__file__).with_suffix(".yaml")):
        for name, (gpus, vcpus, gib, _, gbit, _) in family["sizes"].items():
            found[name] = Machine(
                name,
                family["cloud"],
                family.get("gpu"),
                gpus,
                vcpus,
                None if gib is None else gib * 2**30,
                family["inside"][1] * 1e9 if gpus > 1 else None,
                None if gbit is None else gbit * 1e9 / 8,
                " ".join(family["source"].split()),
                family["as_of"],
            )
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


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU by our `name`. `tflops` are dense peaks by precision (fp32, tf32, bf16, fp16, fp8),
    those that are known. `asked_as` is what people ask for it by: `H100-NVL` is an H100."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    tflops: Mapping[str, float]
    source: str
    as_of: datetime.date
    match: str
    asked_as: str

    def product_tflops(self, precision: str, tf32: bool = True) -> float | None:
        """Of products in that precision; fp32 as TF32, where the GPU has it, if `tf32`:
        `gpu("H100").product_tflops("fp32")` is 494, and 67 without."""
        known = self.tflops.get(precision)
        return self.tflops.get("tf32", known) if precision == "fp32" and tf32 else known


@functools.cache
def gpus() -> Mapping[str, Gpu]:
    """All GPUs by name, in the order in which names of devices are looked up."""
    return {
        row["name"]: Gpu(
            row["name"],
            row["memory_mib"] * 2**20,
            row["gb_per_second"] * 1e9,
            row["tflops"],
            row["source"],
            row["as_of"],
            row["match"],
            row.get("asked_as", row["name"]),
        )
        for row in rows(Path(__file__).with_name("gpus.yaml"))
    }


def gpu(name: str) -> Gpu:
    """The GPU that is called so; RequestError with the nearest name if there is none.
    `gpu("H100").memory_bytes` is 85,520,809,984 (81,559 MiB)."""
    if name not in gpus():
        raise unknown("GPU", name, gpus())
    return gpus()[name]


def recognised(device_name: str) -> Gpu | None:
    """The GPU that torch calls so, or None: `NVIDIA A100-SXM4-80GB` is `A100-80GB`."""
    words = ((row, rf"\b(?:{row.match})\b") for row in gpus().values())
    return next((row for row, pattern in words if re.search(pattern, device_name)), None)


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> float | None:
    """Dense floating-point operations a second (fp32 as TF32 if `tf32`), or None for an unknown
    device: `peak_flops("NVIDIA H200", "bf16")` is 9.89e14."""
    found = recognised(device_name)
    tflops = found.product_tflops(precision, tf32) if found else None
    return tflops * 1e12 if tflops else None
