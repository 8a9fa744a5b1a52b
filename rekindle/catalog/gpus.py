"""What a GPU has, and what it can do at most; the rows are in gpus.yaml."""

import dataclasses
import datetime
import functools
import re
from collections.abc import Mapping
from pathlib import Path

from rekindle.catalog.tables import rows, unknown


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU by our `name`. `tflops` are dense peaks by precision (fp32, tf32, bf16, fp16, fp8),
    those that are known. `asked_as` is the name that people ask for it by: `H100-NVL` is an H100.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    tflops: Mapping[str, float]
    source: str
    as_of: datetime.date
    match: str
    asked_as: str

    def product_tflops(self, precision: str, tf32: bool = True) -> float | None:
        """Of products in that precision: those in fp32 use TF32, where the GPU has it, if `tf32`.

        `gpu("H100").product_tflops("fp32")` is 494, and 67 without."""
        known = self.tflops.get(precision)
        return self.tflops.get("tf32", known) if precision == "fp32" and tf32 else known


@functools.cache
def gpus() -> Mapping[str, Gpu]:
    """All GPUs by name, in the order in which names of devices are looked up."""
    return {
        row["name"]: Gpu(
            row["name"], row["memory_mib"] * 2**20, row["gb_per_second"] * 1e9, row["tflops"],
            row["source"], row["as_of"], row["match"], row.get("asked_as", row["name"]),
        )
        for row in rows(Path(__file__).with_suffix(".yaml"))
    }  # fmt: skip


def gpu(name: str) -> Gpu:
    """The GPU that is called so; RequestError with the nearest name if there is none.
    `gpu("H100").memory_bytes` is 85,520,809,984 (81,559 MiB)."""
    if name not in gpus():
        raise unknown("GPU", name, gpus())
    return gpus()[name]


def recognised(device_name: str) -> Gpu | None:
    """The GPU that torch calls so; None where no row knows it.

    `recognised("NVIDIA A100-SXM4-80GB").name` is `A100-80GB`."""
    words = ((row, rf"\b(?:{row.match})\b") for row in gpus().values())
    return next((row for row, pattern in words if re.search(pattern, device_name)), None)


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> float | None:
    """Dense floating-point operations a second, those in fp32 by way of TF32 if `tf32`; None where
    no row knows the device.

    `peak_flops("NVIDIA H200", "bf16")` is 9.89e14."""
    found = recognised(device_name)
    tflops = found.product_tflops(precision, tf32) if found else None
    return tflops * 1e12 if tflops else None
