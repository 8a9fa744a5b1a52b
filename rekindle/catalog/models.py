"""Configs of models that many start from, by their names on the hub; rows in models.yaml."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.catalog.rows import rows


@functools.cache
def known_configs() -> Mapping[str, Mapping[str, Any]]:
    """Hugging Face configs, what shapes a model and no more, by every name that is known.
    `known_configs()["gpt2"]` is `{"model_type": "gpt2"}`."""
    table = rows(Path(__file__).with_suffix(".yaml"))["models"]
    return {
        name: row["config"]
        for first, row in table.items()
        for name in (first, *row.get("also", ()))
    }
