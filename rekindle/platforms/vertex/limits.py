"""What Vertex AI takes: counts, lengths, patterns, names of machines. The rows are in limits.yaml,
with source and date."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.tables import rows


def limits() -> Mapping[str, Any]:
    """All of them by name."""
    table: Mapping[str, Any] = rows(Path(__file__).with_name("limits.yaml"))
    return table
