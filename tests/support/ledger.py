"""The ledger of a training, as a user reads it: JSON lines of each rank."""

from __future__ import annotations

import json
from pathlib import Path

from rekindle.train.history import FOLDER


def read_ledger(working: Path) -> dict[int, list[str]]:
    """The ids of each step over all ranks, sorted. Raises ValueError for a damaged line."""
    found: dict[int, list[str]] = {}
    for path in sorted((working / FOLDER).glob("rank-*.jsonl")):
        for line in path.read_bytes().splitlines():
            note = json.loads(line)
            found.setdefault(note["step"], []).extend(note["ids"])
    return {step: sorted(ids) for step, ids in sorted(found.items())}
