"""The loss curve on disk: one JSON line an optimizer step, appended while training, cut back when
resuming."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from rekindle.records import HistoryRow, write_atomically


class History:
    """The growing `history.jsonl` of a run key (`Job.curve`); only rank 0 writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, step: int, carried: str | None = None) -> str:
        """Forget rows after `step`: those steps are about to be done again. `carried` is the curve
        that came with a checkpoint, if one did: it counts, whatever is left on this machine.
        Returns what is wrong with the curve up to there, or ""."""
        if carried is not None:
            write_atomically(self.path, carried)
        kept = [row for row in read_history(self.path) if row.step <= step]
        write_atomically(self.path, "".join(row.model_dump_json() + "\n" for row in kept))
        missing = step - len({row.step for row in kept})
        if not missing:
            return ""
        return (
            f"the loss curve lacks {missing} of {step} steps: {self.path} was cut or damaged. The "
            "weights do not depend on it"
        )

    def amend(self, step: int, found: Mapping[str, float]) -> None:
        """Add to the row of `step`, if it is the last, what a later validation found."""
        rows = list(read_history(self.path))
        if rows and rows[-1].step == step:
            rows[-1] = rows[-1].model_copy(update=found)
            write_atomically(self.path, "".join(row.model_dump_json() + "\n" for row in rows))

    def append(self, row: HistoryRow) -> None:
        """Add a step."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(row.model_dump_json() + "\n")


def read_history(path: Path) -> Iterator[HistoryRow]:
    """All rows of a history; an unfinished last line, as a kill leaves it, is left out, and so is a
    damaged one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                with contextlib.suppress(ValidationError):
                    yield HistoryRow.model_validate_json(line)
