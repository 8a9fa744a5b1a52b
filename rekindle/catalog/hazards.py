"""How often spot machines are taken away, as four named presets; the rows are in hazards.yaml."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import yaml


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named hazard: interruptions per node-hour of running, and the figures it rests on."""

    name: str
    per_node_hour: float
    measured: str
    source: str
    as_of: str


@functools.cache
def presets() -> Mapping[str, Preset]:
    """All presets by name, from calm to hostile. `presets()["rough"].per_node_hour` is 0.1."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    rows = yaml.safe_load(text)
    return {row["name"]: Preset(**{**row, "as_of": str(row["as_of"])}) for row in rows}
