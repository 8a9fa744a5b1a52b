"""The feature table: what each platform does with each feature of KFP.

The one contract for admission, documentation and tests; `make generate` writes docs/features.md."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from rekindle.catalog.tables import rows

Verdict = Literal["native", "emulated", "ignored", "refused"]


@dataclasses.dataclass(frozen=True)
class Carried:
    """How a platform carries a feature: `how` it is emulated, what is ignored, or why it is
    refused, by which `source`."""

    verdict: Verdict
    how: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Feature:
    """A row: `what` it is in words, and each platform's way with it."""

    name: str
    what: str
    on: Mapping[str, Carried]


@functools.cache
def table() -> Mapping[str, Feature]:
    """All features by name."""
    found = {}
    for name, row in rows(Path(__file__).with_suffix(".yaml")).items():
        on = {}
        for platform, cell in row.items():
            if isinstance(cell, dict):
                verdict = next(word for word in get_args(Verdict) if word in cell)
                on[platform] = Carried(verdict, cell[verdict], cell.get("source", ""))
            elif platform != "what":
                on[platform] = Carried(cell)
        found[name] = Feature(name, row["what"], on)
    return found
