"""What a platform takes: counts, lengths, patterns, names. A file a platform, each with its source
and date."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def limits(platform: str) -> Mapping[str, Any]:
    """The rows of `<platform>.yaml`."""
    path = Path(__file__).with_name(f"{platform}.yaml")
    rows: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return rows
