"""Which machines could train: what the config names, any of a cloud that has the GPUs, or
this one.

Decides `Fleet`, machines of one kind in one region with their price, and in which order
fleets are weighed. This machine has GPUs, as the driver names them, or a share of its
CPU, measured in a moment, because no catalog has rows of CPUs."""

import dataclasses
import datetime
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import get_args

from rekindle.catalog import machines as catalog
from rekindle.catalog.machines import (
    THIS_CPU,
    Cloud,
    Gpu,
    Machine,
    gpu,
    machine,
    machines,
)
from rekindle.catalog.prices import Price, PriceBook
from rekindle.errors import RequestError, first_line
from rekindle.launch.process import driver_says
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import CPU
from rekindle.spec.installed import installed_platforms
from rekindle.spec.model import AUTO, ResourcesSpec

MOST_NODES = 64  # that `auto` looks at
HERE = "this machine"
PATIENCE_SECONDS = 30  # for a probe, which takes half a second on an idle core
# One thread, as each rank has: products, and copies beyond any cache; the best of some.
_PROBE = """
import json, timeit
import numpy as np
a = np.ones((768, 768), np.float32)
source, target = np.ones(2**24, np.float32), np.empty(2**24, np.float32)
flops = 2 * 768**3 / min(timeit.repeat(lambda: a @ a, number=1))
seconds = min(timeit.repeat(lambda: np.copyto(target, source), number=1))
print(json.dumps([flops, 2 * source.nbytes / seconds]))
"""
# of whichever library numpy was built with
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclasses.dataclass(frozen=True)
class Fleet:
    """`nodes` machines called `name` by their platform, on each of which `gpus_per_node`
    GPUs train, or as many ranks share the CPU. `price` is that of one machine in
    `region`."""

    name: str
    machine: Machine
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    region: str
    price: Price | None

    @property
    def cluster(self) -> Cluster:
        """Its machines and their links, without names and prices."""
        return Cluster(
            gpu=self.gpu,
            gpus_per_node=self.gpus_per_node,
            nodes=self.nodes,
            inside_bytes_per_second=self.machine.inside_bytes_per_second,
            between_bytes_per_second=self.machine.between_bytes_per_second,
        )

    def usd_per_hour(self, spot: bool = False) -> float | None:
        """Price of all machines together; None where it is not known."""
        if self.price is None:
            return None
        machine_usd = self.price.on_demand_usd_per_hour
        if spot:
            machine_usd = self.price.spot_usd_per_hour
        return None if machine_usd is None else machine_usd * self.nodes

    @property
    def here(self) -> bool:
        """Whether it is this machine."""
        return self.name == HERE

    def __str__(self) -> str:
        gpus = f"{self.gpus_per_node} x {self.gpu.name}"
        if self.nodes == 1:
            return f"{self.name} ({gpus})"
        return f"{self.nodes} x {self.name} ({gpus} each)"


def fleets(
    resources: ResourcesSpec, platform: str, region: str, book: PriceBook, ranks: int = 1
) -> tuple[Fleet, ...]:
    """The machines that the config allows, small ones first; this machine with `ranks`
    processes for the platform `local`, and where nothing is named. RequestError for no
    GPUs that the catalog has."""
    named = resources.machine or resources.accelerator or resources.gpus_per_node
    if platform == "local" or not (platform or named):
        device, count, link_speed = local_devices(ranks)
        this_machine = dataclasses.replace(
            machines()[THIS_CPU],
            gpu=device.name,
            gpus=count,
            inside_bytes_per_second=link_speed,
        )
        return (Fleet(HERE, this_machine, device, 1, ranks, "", None),)
    names = list(_names(resources, platform))
    if not names:
        raise RequestError(
            "no machine of the catalog has these GPUs",
            where="resources",
            fix="name a machine: resources.machine, or `auto`",
        )
    allowed = []
    for name in names:
        row = machine(name)
        if row.gpu is None:
            continue
        book_region = region or _cheapest_region(name, book)
        price = book.find(name, book_region)
        gpus_per_node = resources.gpus_per_node or row.gpus
        for nodes in _counts(resources, row):
            allowed.append(Fleet(name, row, gpu(row.gpu), nodes, gpus_per_node, book_region, price))
    return tuple(sorted(allowed, key=lambda fleet: fleet.nodes * fleet.gpus_per_node))


def _names(resources: ResourcesSpec, platform: str) -> Iterator[str]:
    """The machine that is named, all for `auto`, else the smallest with the GPUs."""
    if resources.machine != AUTO and not resources.gpus_per_node:
        raise RequestError(
            "the config asks for no GPUs, and the planner has CPU data only for this machine",
            where="resources.gpus_per_node",
            fix="set gpus_per_node, and accelerator or machine; machine: auto; or --platform local",
        )
    if resources.machine not in ("", AUTO):
        row = machine(resources.machine)
        if row.gpus < resources.gpus_per_node:
            raise RequestError(
                f"{resources.machine} has {row.gpus or 'no'} GPUs, not {resources.gpus_per_node}",
                where="resources.machine",
                fix="name one that has them, or `auto`",
            )
        yield resources.machine
        return
    matching = [name for name in _offered_names(platform) if _has_gpus(name, resources)]
    if resources.machine == AUTO:
        yield from matching
        return
    yield from sorted(matching, key=lambda name: machine(name).gpus)[:1]


def _offered_names(platform: str) -> Sequence[str]:
    """Machines with GPUs by the platform's own names;
    of all clouds where none is named."""
    platform_class = installed_platforms().classes.get(platform)
    if platform_class is not None:
        own_names = platform_class.gpu_machines()
        if own_names is not None:
            return own_names
    clouds: set[str] = set(get_args(Cloud))
    if platform_class is not None and platform_class.cloud:
        clouds = {platform_class.cloud}
    return [name for name, row in machines().items() if row.gpu is not None and row.cloud in clouds]


def has_cloud(platform: str) -> bool:
    """Whether the platform has the machines and prices of a cloud that the catalog knows."""
    platform_class = installed_platforms().classes.get(platform)
    return platform_class is not None and platform_class.cloud != ""


def _has_gpus(name: str, resources: ResourcesSpec) -> bool:
    """Whether a machine has the GPUs that the config asks for, and as many."""
    row = machine(name)
    if row.gpu is None:
        return False
    accelerator = resources.accelerator.upper()
    if accelerator not in ("", row.gpu, gpu(row.gpu).asked_as):
        return False
    return row.gpus >= max(1, resources.gpus_per_node)


def _counts(resources: ResourcesSpec, row: Machine) -> Sequence[int]:
    """How many nodes: as asked, or for `auto` powers of two,
    of machines with all their GPUs."""
    if resources.machine != AUTO or "nodes" in resources.model_fields_set:
        return [resources.nodes]
    # without a network that is known the time of an exchange would be a guess
    if row.between_bytes_per_second is None:
        return [1]
    return [2**n for n in range(MOST_NODES.bit_length())]


def _cheapest_region(name: str, book: PriceBook) -> str:
    """The region with the lowest price on demand; "" where the book has none."""

    def usd(region: str) -> float:
        price = book.find(name, region)
        if price is None:
            return float("inf")
        return price.on_demand_usd_per_hour or float("inf")

    return min(book.regions(name), key=usd, default="")


def local_devices(ranks: int) -> tuple[Gpu, int, float | None]:
    """What `ranks` processes train on here, how many there are, and how fast data goes
    from one to another. RequestError without enough."""
    names = gpu_names()
    if not names:
        return _cpu(ranks), ranks, None
    if len(names) < ranks:
        raise RequestError(
            f"{ranks} ranks have {len(names)} GPUs here",
            where="platforms.local.ranks",
            fix=f"at most {len(names)}",
        )
    device = catalog.recognised(names[0])
    if device is None:
        raise RequestError(f"the catalog does not know the GPU {names[0]}")
    # the driver does not say how GPUs are linked: as in the first machine of a cloud with
    # these
    for row in machines().values():
        if row.gpu == device.name and row.inside_bytes_per_second:
            return device, len(names), row.inside_bytes_per_second
    return device, len(names), None


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """The names of the GPUs here, as NVIDIA's driver has them;
    none where there is no driver."""
    return tuple(driver_says("name"))


@functools.cache
def _cpu(ranks: int) -> Gpu:
    """A rank's share: a core, or less where ranks outnumber cores;
    memory in equal parts."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # of Linux alone
        cores = len(os.sched_getaffinity(0))
    speeds = _measured_speeds(min(ranks, cores or 1))
    flops_per_second = sum(flops for flops, _ in speeds) / ranks
    bytes_per_second = sum(moved for _, moved in speeds) / ranks
    memory_bytes = machines()[THIS_CPU].memory_bytes or 0
    return Gpu(
        name=CPU,
        memory_bytes=memory_bytes // ranks,
        bandwidth_bytes_per_second=bytes_per_second,
        tflops={"fp32": flops_per_second / 1e12},
        source="measured here",
        as_of=datetime.datetime.now(datetime.UTC).date(),
        match=CPU,
        asked_as=CPU,
    )


def _measured_speeds(cores: int) -> list[tuple[float, float]]:
    """Operations and bytes a second of each of so many cores, all busy at once, because
    they share caches and the memory's bandwidth. RequestError where they do not answer."""
    probes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROBE],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ONE_THREAD},
        )
        for _ in range(cores)
    ]
    speeds: list[tuple[float, float]] = []
    try:
        for probe in probes:
            answer, _ = probe.communicate(timeout=PATIENCE_SECONDS)
            flops_per_second, bytes_per_second = json.loads(answer)
            speeds.append((flops_per_second, bytes_per_second))
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise RequestError(
            f"the speed of this processor could not be measured: {first_line(error)}",
            fix="look at what else runs on this machine, and retry the command",
        ) from None
    finally:
        for probe in probes:
            probe.kill()
            probe.wait()
    return speeds
