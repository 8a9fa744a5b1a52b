"""Names of time zones as platforms have them; the rows are in azure_zones.yaml."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import yaml


@functools.cache
def _azure() -> Mapping[str, str]:
    text = Path(__file__).with_name("azure_zones.yaml").read_text(encoding="utf-8")
    zones: Mapping[str, str] = yaml.safe_load(text)["zones"]
    return {zone: name for name, among in zones.items() for zone in among.split()}


def azure_zone(zone: str) -> str | None:
    """Azure's name of IANA's `zone`, None where it has none. `azure_zone("Europe/Berlin")` is `W.
    Europe Standard Time`."""
    return _azure().get(zone)
