"""The feature table: what each platform does with each feature of KFP.

The one contract for admission, documentation and tests; `make generate` writes docs/features.md."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast, get_args

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
    raw = rows(Path(__file__).with_suffix(".yaml"))
    return {
        name: Feature(
            name, row["what"], {on: _carried(cell) for on, cell in row.items() if on != "what"}
        )
        for name, row in raw.items()
    }


def _carried(cell: str | dict[str, str]) -> Carried:
    if isinstance(cell, str):
        return Carried(cast("Verdict", cell))
    verdict = next(word for word in get_args(Verdict) if word in cell)
    return Carried(verdict, cell[verdict], cell.get("source", ""))
