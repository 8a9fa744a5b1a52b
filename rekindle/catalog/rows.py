"""Rows of the catalog's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def rows(path: Path) -> Any:
    """What the YAML beside a module holds, read by PyYAML's parser in C where there is one."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506 - a safe one
