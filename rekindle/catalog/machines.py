"""What a machine has: GPUs, CPUs, memory, and the links inside and between machines; and
what a GPU has, and what it can do at most.

The rows are in machines.yaml, in families, and in gpus.yaml. What could not be confirmed
is None; plans say so."""

import dataclasses
import datetime
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from rekindle.catalog.tables import unknown
from rekindle.tables import rows

Cloud = Literal["aws", "gcp", "azure", "local"]
THIS_CPU = "this-cpu"


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine by its cloud's name. Data goes so fast at most, one way: from a GPU to
    another one inside, None where it has one or none; and between it and others, over all
    its network interfaces together, None where that is not known."""

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
    catalog = {}
    for family in rows(Path(__file__).with_suffix(".yaml")):
        for name, size in family["sizes"].items():
            catalog[name] = _machine_of(name, family, size)
    # the catalog has no row of CPUs: what this one has is asked of the system
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    catalog[THIS_CPU] = dataclasses.replace(
        catalog[THIS_CPU], vcpus=os.cpu_count(), memory_bytes=memory_bytes
    )
    return catalog


# GPUs, CPUs, GiB of memory, the network, its Gbit/s, and the interfaces that carry it
_Size = tuple[int, int | None, int | None, str, float | None, int | None]


class _Family(TypedDict):
    """A row of machines.yaml: machines that share all but their sizes."""

    cloud: Cloud
    gpu: NotRequired[str]
    inside: tuple[str, float]  # the link between GPUs, and its peak in GB/s
    sizes: Mapping[str, _Size]
    source: str
    as_of: datetime.date


def _machine_of(name: str, family: _Family, size: _Size) -> Machine:
    """A family's machine of one of its sizes."""
    gpus, vcpus, memory_gib, _, network_gbit, _ = size
    memory_bytes = None
    if memory_gib is not None:
        memory_bytes = memory_gib * 2**30
    link_speed = None
    if gpus > 1:
        link_speed = family["inside"][1] * 1e9
    network_speed = None
    if network_gbit is not None:
        network_speed = network_gbit * 1e9 / 8  # bits to bytes
    return Machine(
        name=name,
        cloud=family["cloud"],
        gpu=family.get("gpu"),
        gpus=gpus,
        vcpus=vcpus,
        memory_bytes=memory_bytes,
        inside_bytes_per_second=link_speed,
        between_bytes_per_second=network_speed,
        source=" ".join(family["source"].split()),
        as_of=family["as_of"],
    )


def machine(name: str) -> Machine:
    """The machine that a platform calls so; RequestError with the nearest name if there
    is none. `machine("ml.p5.48xlarge")` is EC2's p5.48xlarge: 8 H100, 400e9 bytes/s
    between machines."""
    cloud_name = name.removeprefix("ml.")  # SageMaker's name of a machine of EC2
    if cloud_name not in machines():
        raise unknown("machine", name, machines())
    return machines()[cloud_name]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU by our `name`. `tflops` are dense peaks by precision (fp32, tf32, bf16, fp16,
    fp8), those that are known. `asked_as` is what people ask for it by: `H100-NVL` is an
    H100."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    tflops: Mapping[str, float]
    source: str
    as_of: datetime.date
    match: str
    asked_as: str

    def product_tflops(self, precision: str, tf32: bool = True) -> float | None:
        """Peak of products in that precision; fp32 as TF32, where the GPU has it, if
        `tf32`: `gpu("H100").product_tflops("fp32")` is 494, and 67 without."""
        if precision == "fp32" and tf32 and "tf32" in self.tflops:
            return self.tflops["tf32"]
        return self.tflops.get(precision)


@functools.cache
def gpus() -> Mapping[str, Gpu]:
    """All GPUs by name, in the order in which names of devices are looked up."""
    catalog = {}
    for row in rows(Path(__file__).with_name("gpus.yaml")):
        catalog[row["name"]] = Gpu(
            name=row["name"],
            memory_bytes=row["memory_mib"] * 2**20,
            bandwidth_bytes_per_second=row["gb_per_second"] * 1e9,
            tflops=row["tflops"],
            source=row["source"],
            as_of=row["as_of"],
            match=row["match"],
            asked_as=row.get("asked_as", row["name"]),
        )
    return catalog


def gpu(name: str) -> Gpu:
    """The GPU that is called so; RequestError with the nearest name if there is none.
    `gpu("H100").memory_bytes` is 85,520,809,984 (81,559 MiB)."""
    if name not in gpus():
        raise unknown("GPU", name, gpus())
    return gpus()[name]


def recognised(device_name: str) -> Gpu | None:
    """The GPU that torch calls so, or None: `NVIDIA A100-SXM4-80GB` is `A100-80GB`."""
    for gpu in gpus().values():  # the first that matches
        if re.search(rf"\b(?:{gpu.match})\b", device_name):
            return gpu
    return None


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> float | None:
    """Dense floating-point operations a second (fp32 as TF32 if `tf32`), or None for an
    unknown device: `peak_flops("NVIDIA H200", "bf16")` is 9.89e14."""
    device = recognised(device_name)
    tflops = device.product_tflops(precision, tf32) if device else None
    return tflops * 1e12 if tflops else None
