"""Tables that are kept as YAML beside the module that reads them."""

import functools
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def rows(path: Path) -> Any:
    """What a YAML file of ours holds, read once, by PyYAML's parser in C where there is
    one."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506 - a safe one
