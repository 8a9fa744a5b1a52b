"""What a step asks of a machine, and the smallest one of a platform's catalog that has it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rekindle.catalog.machines import gpu, machine
from rekindle.catalog.tables import limits
from rekindle.errors import UnsupportedError
from rekindle.ir.graph import Resources, Step
from rekindle.platforms.feature_checks import beyond

_QUANTITY = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(m|[kKMGTPE]i?)?")
_UNITS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
    "Ei": 2.0**60,
}
_NOT_A_KIND = re.compile(r"nvidia|tesla|mega|com|gpu|\d+gb", re.IGNORECASE)


def amount(quantity: str) -> float:
    """`500m` is 0.5, `4Gi` is 4,294,967,296; ValueError for anything else."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None or (match[2] or "") not in _UNITS:
        raise ValueError(f"{quantity!r} is not a quantity")
    return float(match[1]) * _UNITS[match[2] or ""]


def gpu_kind(accelerator: str) -> str:
    """The GPU's own name: `NVIDIA_TESLA_T4` and `nvidia-tesla-t4` are `T4`, `NVIDIA_A100_80GB` is
    `A100-80GB`, `nvidia.com/gpu` is "", any."""
    words = re.split(r"[^A-Za-z0-9]+", accelerator)
    kind = "-".join(word.upper() for word in words if word and not _NOT_A_KIND.fullmatch(word))
    return "A100-80GB" if kind == "A100" and "80GB" in accelerator.upper() else kind


def gpus_of(step: Step) -> tuple[str, int]:
    """The kind of GPU of each of the step's machines ("" = any), and how many; UnsupportedError."""
    asked, wanted = step.container.resources, step.distribution
    if wanted is not None and wanted.gpus_per_node:
        return gpu_kind(wanted.accelerator), wanted.gpus_per_node
    if not asked.accelerator_type:
        return "", 0
    if not re.fullmatch(r"\d*", asked.accelerator_count):
        what = f"`{step.path}` asks for {asked.accelerator_count!r} accelerators"
        raise UnsupportedError(what, where=step.where, fix="write a whole number")
    return gpu_kind(asked.accelerator_type), int(asked.accelerator_count or 1)


def machine_for(platform: str, step: Step, default: str) -> str:
    """The first machine of `catalog/<platform>.yaml` that has what the step asks for, the fewest
    GPUs first; `default` where it asks for nothing. UnsupportedError if none has it."""
    asked, (kind, gpus) = step.container.resources, gpus_of(step)
    cpu, memory = asked.cpu_limit or asked.cpu_request, asked.memory_limit or asked.memory_request
    if step.distribution is not None and step.distribution.machine:
        return step.distribution.machine
    if not cpu and not memory and not gpus:
        return default
    there = limits(platform)
    offered = with_gpus(there["gpu_machines"])
    known: Iterable[tuple[str, Sequence[float]]] = sizes(there["machines"])
    if gpus:  # machines with at least so many, the fewest first
        rows = sorted(offered.items(), key=lambda row: row[1][1])
        known = [(n, has[2:]) for n, has in rows if has[1] >= gpus and kind in ("", has[0])]
    try:
        name = smallest(asked, known)
    except ValueError as error:
        fix = "write it as 500m, 4 or 16G"
        problem = beyond(platform, step.path, step.where, f"it asks for {error}", fix)
        raise UnsupportedError([problem]) from error
    if name:
        return name
    wanted = [f"{gpus} GPUs {kind}".rstrip() if gpus else "", f"{cpu} CPUs" if cpu else "", memory]
    how = f"no machine has the {', '.join(filter(None, wanted))} that it asks for"
    if gpus:
        how += f"; there are {those_there(offered)}"
    fix = "ask for less, or name a machine: rekindle.distribute(task, nodes=1, machine=...)"
    raise UnsupportedError([beyond(platform, step.path, step.where, how, fix)])


def smallest(asked: Resources, known: Iterable[tuple[str, Sequence[float]]]) -> str | None:
    """The first of the `known` machines (name; CPUs, GiB) with the CPU and memory that are asked
    for; None if none has it, ValueError for what is not a quantity."""
    cpus = amount(asked.cpu_limit or asked.cpu_request or "0")
    gib = amount(asked.memory_limit or asked.memory_request or "0") / 2**30
    return next((name for name, has in known if has[0] >= cpus and has[1] >= gib), None)


def sizes(names: Iterable[str]) -> Iterator[tuple[str, tuple[float, float]]]:
    """CPUs and GiB of machines, by the catalog."""
    for name in names:
        has = machine(name)
        if has.vcpus is not None and has.memory_bytes is not None:
            yield name, (has.vcpus, has.memory_bytes / 2**30)


def with_gpus(names: Iterable[str]) -> dict[str, tuple[str, int, float, float]]:
    """What machines have: the GPU by the name that people use, how many, CPUs and GiB."""
    found = ((name, machine(name), size) for name, size in sizes(names))
    return {name: (gpu(has.gpu).asked_as, has.gpus, *size) for name, has, size in found if has.gpu}


def those_there(rows: Mapping[str, Sequence[Any]]) -> str:
    """Which GPUs machines have, and how many at most: `A100 (up to 8), T4 (up to 4)`."""
    most: dict[str, int] = {}
    for kind, count, *_ in rows.values():
        most[kind] = max(count, most.get(kind, 0))
    return ", ".join(f"{kind} (up to {count})" for kind, count in sorted(most.items()))
