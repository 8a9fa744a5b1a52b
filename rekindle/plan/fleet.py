"""Which machines could train: what the config names, any of a cloud that has the GPUs, or this one.

Decides `Fleet`, machines of one kind in one region with their price, and in which order fleets are
weighed. This machine has GPUs, as the driver names them, or a share of its CPU, measured in a
moment, because no catalog has rows of CPUs."""

import dataclasses
import datetime
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from rekindle.catalog import machines as catalog
from rekindle.catalog.machines import THIS_CPU, Cloud, Gpu, Machine, gpu, machine, machines
from rekindle.catalog.prices import Price, PriceBook
from rekindle.catalog.tables import limits
from rekindle.errors import RequestError
from rekindle.launch.process import driver_says
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import CPU
from rekindle.spec.model import AUTO, ResourcesSpec

MOST_NODES = 64
HERE = "this machine"
CLOUDS: Mapping[str, Cloud] = {"sagemaker": "aws", "vertex": "gcp", "azureml": "azure"}
PATIENCE_SECONDS = 30
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
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclasses.dataclass(frozen=True)
class Fleet:
    """`nodes` machines called `name` by their platform, on each of which `gpus_per_node` GPUs
    train, or as many ranks share the CPU. `price` is that of one machine in `region`."""

    name: str
    machine: Machine
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    region: str
    price: Price | None

    @property
    def cluster(self) -> Cluster:
        links = self.machine.inside_bytes_per_second, self.machine.between_bytes_per_second
        return Cluster(self.gpu, self.gpus_per_node, self.nodes, *links)

    def usd_per_hour(self, spot: bool = False) -> float | None:
        """Of all machines together."""
        if self.price is None:
            return None
        one = self.price.spot_usd_per_hour if spot else self.price.on_demand_usd_per_hour
        return None if one is None else one * self.nodes

    @property
    def here(self) -> bool:
        return self.name == HERE

    def __str__(self) -> str:
        gpus = f"{self.gpus_per_node} x {self.gpu.name}"
        if self.nodes == 1:
            return f"{self.name} ({gpus})"
        return f"{self.nodes} x {self.name} ({gpus} each)"


def fleets(
    resources: ResourcesSpec, platform: str, region: str, book: PriceBook, ranks: int = 1
) -> tuple[Fleet, ...]:
    """Those that the config allows, small ones first; this machine with `ranks` processes for the
    platform `local`, and where nothing is named. RequestError for no GPUs that the catalog has."""
    named = resources.machine or resources.accelerator or resources.gpus_per_node
    if platform == "local" or not (platform or named):
        found, count, inside = here(ranks)
        own = dataclasses.replace(
            machines()[THIS_CPU], gpu=found.name, gpus=count, inside_bytes_per_second=inside
        )
        return (Fleet(HERE, own, found, 1, ranks, "", None),)
    names = list(_names(resources, platform))
    if not names:
        fix = "name a machine: resources.machine, or `auto`"
        raise RequestError("no machine of the catalog has these GPUs", where="resources", fix=fix)
    allowed = []
    for name in names:
        has = machine(name)
        if has.gpu is None:
            continue
        place = region or _cheapest_region(name, book)
        price = book.find(name, place)
        gpus_per_node = resources.gpus_per_node or has.gpus
        for nodes in _counts(resources, has):
            allowed.append(Fleet(name, has, gpu(has.gpu), nodes, gpus_per_node, place, price))
    return tuple(sorted(allowed, key=lambda fleet: fleet.nodes * fleet.gpus_per_node))


def _names(resources: ResourcesSpec, platform: str) -> Iterator[str]:
    """The machine that is named, all for `auto`, else the smallest with the GPUs."""
    if resources.machine != AUTO and not resources.gpus_per_node:
        message = "the config asks for no GPUs, and the planner has CPU data only for this machine"
        fix = "set gpus_per_node, and accelerator or machine; machine: auto; or --platform local"
        raise RequestError(message, where="resources.gpus_per_node", fix=fix)
    if resources.machine not in ("", AUTO):
        has = machine(resources.machine)
        if has.gpus < resources.gpus_per_node:
            message = f"{resources.machine} has {has.gpus or 'no'} GPUs, "
            message += f"not {resources.gpus_per_node}"
            fix = "name one that has them, or `auto`"
            raise RequestError(message, where="resources.machine", fix=fix)
        yield resources.machine
        return
    # machines with GPUs by the platform's own names; of all clouds where none is named
    clouds = {CLOUDS[platform]} if platform in CLOUDS else {*CLOUDS.values()}
    offered = [n for n, has in machines().items() if has.gpu is not None and has.cloud in clouds]
    if platform == "sagemaker":
        offered = limits(platform)["gpu_machines"]
    wanted, fewest = resources.accelerator.upper(), max(1, resources.gpus_per_node)
    known = [
        name
        for name in offered
        if (has := machine(name)).gpu is not None
        and wanted in ("", has.gpu, gpu(has.gpu).asked_as)
        and has.gpus >= fewest
    ]
    if resources.machine == AUTO:
        yield from known
        return
    yield from sorted(known, key=lambda name: machine(name).gpus)[:1]


def _counts(resources: ResourcesSpec, has: Machine) -> Sequence[int]:
    """How many nodes: as asked, or for `auto` powers of two, of machines with all their GPUs."""
    if resources.machine != AUTO or "nodes" in resources.model_fields_set:
        return [resources.nodes]
    if has.between_bytes_per_second is None:
        return [1]
    return [2**n for n in range(MOST_NODES.bit_length())]


def _cheapest_region(name: str, book: PriceBook) -> str:
    def usd(region: str) -> float:
        price = book.find(name, region)
        return (price and price.on_demand_usd_per_hour) or float("inf")

    return min(book.regions(name), key=usd, default="")


def here(ranks: int) -> tuple[Gpu, int, float | None]:
    """What `ranks` processes train on, how many, and how fast data goes from one to another.
    RequestError without enough."""
    names = gpu_names()
    if not names:
        return _cpu(ranks), ranks, None
    if len(names) < ranks:
        message = f"{ranks} ranks have {len(names)} GPUs here"
        raise RequestError(message, where="platforms.local.ranks", fix=f"at most {len(names)}")
    found = catalog.recognised(names[0])
    if found is None:
        raise RequestError(f"the catalog does not know the GPU {names[0]}")
    like = [each.inside_bytes_per_second for each in machines().values() if each.gpu == found.name]
    return found, len(names), next(filter(None, like), None)


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """Of the GPUs here, as NVIDIA's driver has them; none where there is no driver."""
    return tuple(driver_says("name"))


@functools.cache
def _cpu(ranks: int) -> Gpu:
    """A rank's share: a core, or less where ranks outnumber cores; memory in equal parts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    busy = min(ranks, cores or 1)
    words, env = [sys.executable, "-c", _PROBE], {**os.environ, **_ONE_THREAD}
    pipe = subprocess.PIPE
    probes = [subprocess.Popen(words, stdout=pipe, text=True, env=env) for _ in range(busy)]
    said = [json.loads(probe.communicate(timeout=PATIENCE_SECONDS)[0]) for probe in probes]
    flops, moved = (sum(each) / ranks for each in zip(*said, strict=True))
    memory_bytes = machines()[THIS_CPU].memory_bytes or 0
    return Gpu(
        CPU,
        memory_bytes // ranks,
        moved,
        {"fp32": flops / 1e12},
        "measured here",
        datetime.datetime.now(datetime.UTC).date(),
        CPU,
        CPU,
    )
