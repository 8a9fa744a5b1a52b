"""What the machine that this runs on has for its ranks: GPUs, as the driver names them, or a share
of its CPU, measured in a moment, because no catalog has rows of CPUs."""

from __future__ import annotations

import datetime
import functools
import json
import os
import subprocess
import sys

from rekindle.catalog.gpus import Gpu, recognised
from rekindle.catalog.machines import THIS_CPU, Link, machines
from rekindle.errors import RequestError
from rekindle.launch.process import driver_says
from rekindle.plan.constants import CPU

PATIENCE_SECONDS = 30
# One thread, as the engine gives each rank: products of 768 x 768, and copies beyond any cache; the
# best of some, because others run here, too.
_PROBE = """
import json, time
import numpy as np
def best(work):
    times = []
    for _ in range(5):
        before = time.perf_counter(); work(); times.append(time.perf_counter() - before)
    return min(times)
a = np.ones((768, 768), np.float32)
source, target = np.ones(2**24, np.float32), np.empty(2**24, np.float32)
flops = 2 * 768**3 / best(lambda: a @ a)
print(json.dumps([flops, 2 * source.nbytes / best(lambda: np.copyto(target, source))]))
"""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def here(ranks: int) -> tuple[Gpu, int, Link | None]:
    """What each of `ranks` processes trains on, how many of these there are, and the links between
    them. RequestError where there are fewer GPUs than ranks, or some that the catalog does not
    know."""
    names = gpu_names()
    if not names:
        return _cpu(ranks), ranks, None
    if len(names) < ranks:
        raise RequestError(
            f"{ranks} ranks have {len(names)} GPUs here", where="platforms.local.ranks",
            fix=f"at most {len(names)}",
        )  # fmt: skip
    found = recognised(names[0])
    if found is None:
        raise RequestError(f"the catalog does not know the GPU {names[0]}")
    like = (each.inside for each in machines().values() if each.gpu == found.name and each.inside)
    return found, len(names), next(like, None)


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """Of the GPUs here, as NVIDIA's driver has them; none where there is no driver."""
    return tuple(driver_says("name"))


@functools.cache
def _cpu(ranks: int) -> Gpu:
    """A rank's share: a core, or less where there are more ranks than cores, of which as many as
    there are ranks compute at once; memory in equal parts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    busy = min(ranks, cores or 1)
    probes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROBE], stdout=subprocess.PIPE, text=True,
            env={**os.environ, **_ONE_THREAD},
        )
        for _ in range(busy)
    ]  # fmt: skip
    said = [json.loads(probe.communicate(timeout=PATIENCE_SECONDS)[0]) for probe in probes]
    flops, moved = (sum(each) / ranks for each in zip(*said, strict=True))
    memory_bytes = machines()[THIS_CPU].memory_bytes or 0
    return Gpu(
        CPU, memory_bytes // ranks, moved, {"fp32": flops / 1e12}, "measured here",
        datetime.datetime.now(datetime.UTC).date(), CPU, CPU,
    )  # fmt: skip
