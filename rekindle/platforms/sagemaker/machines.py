"""The smallest machine that has what a step asks for, of those in catalog/sagemaker.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rekindle.catalog.limits import limits
from rekindle.ir.graph import Resources

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|[kKMGTP]i?)?")
_UNITS = {
    "": 1.0, "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip
_NOT_A_KIND = re.compile(r"nvidia|tesla|mega|com|gpu|\d+gb", re.IGNORECASE)


def amount(quantity: str) -> float:
    """`500m` is 0.5, `4Gi` is 4,294,967,296; ValueError for anything else."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None or (match[2] or "") not in _UNITS:
        raise ValueError(f"{quantity!r} is no quantity")
    return float(match[1]) * _UNITS[match[2] or ""]


def gpu_kind(accelerator: str) -> str:
    """The GPU's own name: `NVIDIA_TESLA_T4` and `nvidia-tesla-t4` are `T4`, `NVIDIA_A100_80GB` is
    `A100-80GB`, `nvidia.com/gpu` is "", any."""
    words = re.split(r"[^A-Za-z0-9]+", accelerator)
    kind = "-".join(word.upper() for word in words if word and not _NOT_A_KIND.fullmatch(word))
    return "A100-80GB" if kind == "A100" and "80GB" in accelerator.upper() else kind


def machine_for(asked: Resources, default: str, gpu: str = "", gpus: int = 0) -> str | None:
    """The first machine with so much, `default` where nothing is asked, None if none has it. `gpu`
    is a kind, "" for any."""
    cpu, memory = asked.cpu_limit or asked.cpu_request, asked.memory_limit or asked.memory_request
    if not cpu and not memory and not gpus:
        return default
    cpus, gib = amount(cpu or "0"), amount(memory or "0") / 2**30
    rows = _with_gpus(gpu, gpus) if gpus else limits("sagemaker")["machines"].items()
    return next((name for name, has in rows if has[0] >= cpus and has[1] >= gib), None)


def _with_gpus(gpu: str, gpus: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """Machines with at least so many GPUs, fewest first; their CPUs and GiB."""
    rows = limits("sagemaker")["gpu_machines"].items()
    for name, (kind, count, cpus, gib) in sorted(rows, key=lambda row: int(row[1][1])):
        if count >= gpus and gpu in ("", kind):
            yield name, (cpus, gib)
