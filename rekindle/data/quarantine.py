"""Rows with faults that are left out where `data.on_bad_rows` is `drop`: how many may be, and the
file `bad_rows.jsonl` beside the examples that lists them.

A line has the `kind` of a fault, the `place` such as `reviews.jsonl:17`, the `value` at fault,
shortened, and for how many `rows` it stands. The first `MOST` rows of each kind are listed, the
others counted."""

import json
import logging
from pathlib import Path

from rekindle.data.validate import MOST, Findings
from rekindle.spec.model import DataSpec

log = logging.getLogger(__name__)

QUARANTINE = "bad_rows.jsonl"


def is_too_many(data: DataSpec, bad: int, kept: int) -> bool:
    """Whether so many bad rows beside `kept` ones are more than may be left out."""
    limit = data.max_bad_rows
    return not kept or (bad > limit if limit >= 1 else bad / (bad + kept) > limit)


def leave_out(data: DataSpec, findings: Findings, kept: int, folder: Path) -> dict[str, int]:
    """How many rows are left out, by kind of fault, beside `kept` ones; {} where none may be, and
    the findings stay. A row with several faults counts for each kind, and once for the limit."""
    (folder / QUARANTINE).unlink(missing_ok=True)
    if data.on_bad_rows != "drop" or not findings.droppable:
        return {}
    bad, limit = findings.rows, data.max_bad_rows
    read = bad + kept
    rows = f"{bad:,} of {read:,} rows"
    if is_too_many(data, bad, kept):
        findings.note(
            f"{rows} have faults, more than data.max_bad_rows ({limit:,})",
            where=data.named,
            fix="correct the rows below, or raise data.max_bad_rows",
        )
        return {}
    faults = findings.settle()
    with (folder / QUARANTINE).open("w", encoding="utf-8", errors="backslashreplace") as file:
        for kind, fault in faults.items():
            for row in fault.first:
                file.write(json.dumps({"kind": kind, **vars(row)}, ensure_ascii=False) + "\n")
    counts = {kind: fault.count for kind, fault in faults.items()}
    listed = f", the first {MOST:,} of a kind" if max(counts.values()) > MOST else ""
    shown = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
    log.warning("left out %s (%s): see %s%s", rows, shown, QUARANTINE, listed)
    return counts
