"""The loss curve on disk, one JSON line an optimizer step; and, where `train.ledger` asks
for it, the ids of the examples that each data rank saw in each step.

The ledger has one JSON line a step and rank, in `ledger/rank-<n>.jsonl` beside the curve.
Both are appended to while training. A resumed run first removes the lines of the steps
that it is about to do again, also those of ranks that it no longer has."""

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
        """Remove the rows after `step`, since those steps are about to be done again.

        `carried` is the text of the curve in the checkpoint, if there is one; it replaces
        what is left on this machine. Returns what is wrong with the curve up to `step`,
        or ""."""
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
        """Add the results of a later validation to the row of `step`, if it is the last row."""
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
    """The rows of a history, without damaged ones."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # a process that is killed may leave half a line
                with contextlib.suppress(ValidationError):
                    yield HistoryRow.model_validate_json(line)


class ExampleLedger:
    """This rank's file of the ledger. Among tp, cp and pp peers, which see the same
    examples, only the first has one."""

    def __init__(self, working: Path, rank: int) -> None:
        self.rank = rank
        self.path = working / FOLDER / f"rank-{rank}.jsonl"

    def append(self, step: int, ids: Sequence[str]) -> None:
        """Note the examples of a step (counted from 1) that has been done."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "rank": self.rank, "ids": list(ids)}) + "\n")


def forget_steps(working: Path, after: int) -> str:
    """Remove the steps after `after` from the ledger, and damaged lines; returns how many
    of these there were, in words, or ""."""
    damaged = 0
    for path in (working / FOLDER).glob("rank-*.jsonl"):
        remaining_lines = []
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):  # a process that is killed may leave half a line
                continue
            step = _step_of(line)
            if step is None:
                damaged += 1
            elif step <= after:
                remaining_lines.append(line)
        write_atomically(path, b"".join(remaining_lines).decode())
    if not damaged:
        return ""
    return f"{damaged} line(s) of the ledger in {working / FOLDER} were damaged and are left out"


def _step_of(line: bytes) -> int | None:
    """The step of a line of the ledger; None where the line is damaged."""
    try:
        entry = json.loads(line)
        step = int(entry["step"])
        return step if isinstance(entry["ids"], list) else None
    except (ValueError, KeyError, TypeError):
        return None
