"""Settings of NCCL and libfabric by the machine's name; the rows are in network.yaml, each with
what it `needs` that a step does not bring."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def _rows() -> Sequence[Mapping[str, Any]]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    rows: Sequence[Mapping[str, Any]] = yaml.safe_load(text)
    return rows


def network(machine: str) -> Mapping[str, str]:
    """The variables that several machines of this name need to talk to each other; nothing for one
    that is not known. `network("ml.p5.48xlarge")["FI_PROVIDER"]` is `efa`."""
    for row in _rows():
        if re.fullmatch(row["machines"], machine):
            found: Mapping[str, str] = row["environment"]
            return found
    return {}
