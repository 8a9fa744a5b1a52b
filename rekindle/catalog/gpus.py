"""What a GPU can do at most."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("gpus.yaml").read_text(encoding="utf-8")
    )
    return rows


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense floating-point operations a second; None where no row knows the device.

    `peak_flops("NVIDIA H200", "bf16")` is 9.89e14."""
    row = next((row for row in _rows() if row["match"] in device_name), None)
    tflops = row["tflops"].get(precision) if row else None
    return tflops * 1e12 if tflops else None
