"""Which examples each data rank trained on, step by step: `train.ledger: true`.

One JSON line a step and rank in `ledger/rank-<n>.jsonl` beside the loss curve: step, rank, ids. A
resumed run first forgets the steps that it is about to do again, whatever the number of ranks was;
so what is left at the end is what shaped the weights, and `read_ledger` can be held against the
order of the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rekindle.records import write_atomically

FOLDER = "ledger"


class Ledger:
    """This rank's pages; tp, cp and pp peers see the same examples and write none."""

    def __init__(self, working: Path, rank: int) -> None:
        self.rank, self.path = rank, working / FOLDER / f"rank-{rank}.jsonl"

    def append(self, step: int, ids: Sequence[str]) -> None:
        """Note the examples of a step (counted from 1) that has been done."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "rank": self.rank, "ids": list(ids)}) + "\n")


def forget(working: Path, after: int) -> str:
    """Remove what all ranks noted of steps after `after`, and lines that a kill cut off. Returns
    what is wrong with the rest, or ""."""
    damaged = 0
    for path in (working / FOLDER).glob("rank-*.jsonl"):
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]
        notes = [(line, _note(line)) for line in lines]
        damaged += sum(note is None for _, note in notes)
        kept = [line for line, note in notes if note is not None and note[0] <= after]
        write_atomically(path, b"".join(kept).decode())
    if not damaged:
        return ""
    return f"{damaged} line(s) of the ledger in {working / FOLDER} were damaged and are left out"


def read_ledger(working: Path) -> dict[int, list[str]]:
    """The ids of each step over all ranks, sorted; as often as they were trained on. Raises
    ValueError for a damaged line."""
    found: dict[int, list[str]] = {}
    for path in sorted((working / FOLDER).glob("rank-*.jsonl")):
        for line in path.read_bytes().splitlines():
            note = _note(line)
            if note is None:
                raise ValueError(f"{path} holds a damaged line")
            found.setdefault(note[0], []).extend(note[1])
    return {step: sorted(ids) for step, ids in sorted(found.items())}


def _note(line: bytes) -> tuple[int, list[str]] | None:
    """The step and the ids of a line; None for one that is damaged."""
    try:
        note = json.loads(line)
        return int(note["step"]), list(note["ids"])
    except (ValueError, KeyError, TypeError):
        return None
