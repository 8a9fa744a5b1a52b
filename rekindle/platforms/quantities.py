"""Kubernetes quantities, and the smallest machine that has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|[kKMGTP]i?)?")
_UNITS = {
    "": 1.0, "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip


def amount(quantity: str) -> float:
    """`500m` is 0.5, `4Gi` is 4,294,967,296; ValueError for anything else."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None or (match[2] or "") not in _UNITS:
        raise ValueError(f"{quantity!r} is no quantity")
    return float(match[1]) * _UNITS[match[2] or ""]


def machine_for(
    cpu: str, memory: str, default: str, machines: Mapping[str, Sequence[float]]
) -> str | None:
    """The first of `machines` (CPUs, GiB; smallest first) with so much; `default` where nothing is
    asked; None if none has it."""
    if not cpu and not memory:
        return default
    cpus, gib = amount(cpu or "0"), amount(memory or "0") / 2**30
    return next((name for name, has in machines.items() if has[0] >= cpus and has[1] >= gib), None)
