"""The loss curve on disk: one JSON line an optimizer step, appended while training, cut
back when resuming; and with `train.ledger: true` the examples of each data rank, step by
step.

The ledger has one JSON line a step and rank in `ledger/rank-<n>.jsonl` beside the curve.
A resumed run first forgets the steps that it is about to do again, whatever the number of
ranks was."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from rekindle.records import HistoryRow, write_atomically

FOLDER = "ledger"


class History:
    """The growing `history.jsonl` of a run key (`Job.curve`); only rank 0 writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, step: int, carried: str | None = None) -> str:
        """Forget rows after `step`: those steps are about to be done again. `carried` is
        the curve that came with a checkpoint, if one did: it counts, whatever is left on
        this machine. Returns what is wrong with the curve up to there, or ""."""
        if carried is not None:
            write_atomically(self.path, carried)
        rows = [row for row in read_history(self.path) if row.step <= step]
        self._write(rows)
        missing = step - len({row.step for row in rows})
        if not missing:
            return ""
        return (
            f"the loss curve lacks {missing} of {step} steps: {self.path} was cut or damaged. "
            "The weights do not depend on it"
        )

    def amend(self, step: int, validation: Mapping[str, float]) -> None:
        """Add to the row of `step`, if it is the last, what a later validation found."""
        rows = list(read_history(self.path))
        if rows and rows[-1].step == step:
            rows[-1] = rows[-1].model_copy(update=validation)
            self._write(rows)

    def _write(self, rows: Sequence[HistoryRow]) -> None:
        write_atomically(self.path, "".join(row.model_dump_json() + "\n" for row in rows))

    def append(self, row: HistoryRow) -> None:
        """Add the row of a step."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(row.model_dump_json() + "\n")


def read_history(path: Path) -> Iterator[HistoryRow]:
    """All rows of a history but damaged ones, such as a last line that a kill left."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                with contextlib.suppress(ValidationError):
                    yield HistoryRow.model_validate_json(line)


class ExampleLedger:
    """This rank's pages; tp, cp and pp peers see the same examples and write none."""

    def __init__(self, working: Path, rank: int) -> None:
        self.rank = rank
        self.path = working / FOLDER / f"rank-{rank}.jsonl"

    def append(self, step: int, ids: Sequence[str]) -> None:
        """Note the examples of a step (counted from 1) that has been done."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "rank": self.rank, "ids": list(ids)}) + "\n")


def forget(working: Path, after: int) -> str:
    """Remove later steps, and lines that a kill cut off; what is wrong with the rest, or ""."""
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


def _note(line: bytes) -> tuple[int, list[str]] | None:
    """The step and the ids of a line; None for one that is damaged."""
    try:
        note = json.loads(line)
        return int(note["step"]), list(note["ids"])
    except (ValueError, KeyError, TypeError):
        return None
