"""What a step asks of a machine, and the smallest one of a platform's catalog that has
it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rekindle.catalog.machines import gpu, machine
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
    """The GPU's own name: `NVIDIA_TESLA_T4` and `nvidia-tesla-t4` are `T4`,
    `NVIDIA_A100_80GB` is `A100-80GB`, `nvidia.com/gpu` is "", any."""
    parts = re.split(r"[^A-Za-z0-9]+", accelerator)
    kind = "-".join(word.upper() for word in parts if word and not _NOT_A_KIND.fullmatch(word))
    if kind == "A100" and "80GB" in accelerator.upper():  # the one kind of two sizes
        return "A100-80GB"
    return kind


def gpus_of(step: Step) -> tuple[str, int]:
    """The kind of GPU of each of the step's machines ("" = any), and how many;
    UnsupportedError for a number that is not one."""
    distribution = step.distribution
    if distribution is not None and distribution.gpus_per_node:
        return gpu_kind(distribution.accelerator), distribution.gpus_per_node
    resources = step.container.resources
    if not resources.accelerator_type:
        return "", 0
    if not re.fullmatch(r"\d*", resources.accelerator_count):
        message = f"`{step.path}` asks for {resources.accelerator_count!r} accelerators"
        raise UnsupportedError(message, where=step.where, fix="write a whole number")
    return gpu_kind(resources.accelerator_type), int(resources.accelerator_count or 1)


def machine_for(platform: str, offered: Mapping[str, Any], step: Step, default: str) -> str:
    """The first of the `machines` and `gpu_machines` that the platform has `offered` (in its
    limits.yaml) with what the step asks for, the fewest GPUs first; `default` where it asks
    for nothing. UnsupportedError if none has it."""
    resources = step.container.resources
    kind, gpus = gpus_of(step)
    cpu = resources.cpu_limit or resources.cpu_request
    memory = resources.memory_limit or resources.memory_request
    if step.distribution is not None and step.distribution.machine:
        return step.distribution.machine
    if not cpu and not memory and not gpus:
        return default
    gpu_machines = with_gpus(offered["gpu_machines"])
    candidates: list[tuple[str, Sequence[float]]] = []
    if gpus:
        candidates += _with_at_least(gpus, kind, gpu_machines)
    else:
        candidates += sizes(offered["machines"])
    try:
        name = smallest(resources, candidates)
    except ValueError as error:
        fix = "write it as 500m, 4 or 16G"
        problem = beyond(platform, step.path, step.where, f"it asks for {error}", fix)
        raise UnsupportedError([problem]) from error
    if name:
        return name
    amounts = []
    if gpus:
        amounts.append(f"{gpus} GPUs {kind}".rstrip())
    if cpu:
        amounts.append(f"{cpu} CPUs")
    if memory:
        amounts.append(memory)
    how = f"no machine has the {', '.join(amounts)} that it asks for"
    if gpus:
        how += f"; there are {those_there(gpu_machines)}"
    fix = "ask for less, or name a machine: rekindle.distribute(task, nodes=1, machine=...)"
    raise UnsupportedError([beyond(platform, step.path, step.where, how, fix)])


def _with_at_least(
    gpus: int, kind: str, machines: Mapping[str, tuple[str, int, float, float]]
) -> list[tuple[str, Sequence[float]]]:
    """CPUs and GiB of the machines with so many GPUs of the kind, the fewest GPUs
    first."""
    rows = []
    for name, (machine_kind, count, cpus, gib) in machines.items():
        if count >= gpus and kind in ("", machine_kind):
            rows.append((count, name, (cpus, gib)))
    rows.sort(key=lambda row: row[0])  # and as the catalog has them
    return [(name, size) for _, name, size in rows]


def smallest(resources: Resources, machines: Iterable[tuple[str, Sequence[float]]]) -> str | None:
    """The first of the machines (name; CPUs, GiB) with the CPU and memory that are asked
    for; None if none has it, ValueError for what is not a quantity."""
    cpus = amount(resources.cpu_limit or resources.cpu_request or "0")
    gib = amount(resources.memory_limit or resources.memory_request or "0") / 2**30
    for name, (machine_cpus, machine_gib) in machines:
        if machine_cpus >= cpus and machine_gib >= gib:
            return name
    return None


def sizes(names: Iterable[str]) -> Iterator[tuple[str, tuple[float, float]]]:
    """CPUs and GiB of machines, by the catalog."""
    for name in names:
        facts = machine(name)
        if facts.vcpus is not None and facts.memory_bytes is not None:
            yield name, (facts.vcpus, facts.memory_bytes / 2**30)


def with_gpus(names: Iterable[str]) -> dict[str, tuple[str, int, float, float]]:
    """The machines with GPUs: the GPU by the name that people use, how many, CPUs and
    GiB."""
    machines = {}
    for name, (cpus, gib) in sizes(names):
        facts = machine(name)
        if facts.gpu:
            machines[name] = (gpu(facts.gpu).asked_as, facts.gpus, cpus, gib)
    return machines


def those_there(rows: Mapping[str, Sequence[Any]]) -> str:
    """The GPUs that machines have, and how many at most: `A100 (up to 8), T4 (up to
    4)`."""
    most: dict[str, int] = {}
    for kind, count, *_ in rows.values():
        most[kind] = max(count, most.get(kind, 0))
    return ", ".join(f"{kind} (up to {count})" for kind, count in sorted(most.items()))
