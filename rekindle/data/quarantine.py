"""Rows with faults that are left out where `data.on_bad_rows` is `drop`: how many may be,
and the file `bad_rows.jsonl` beside the examples that lists them.

A line has the `kind` of a fault, the `place` such as `reviews.jsonl:17`, the `value` at
fault, shortened, and for how many `rows` it stands. The first `MOST` rows of each kind
are listed, the others counted."""

import json
import logging
from pathlib import Path

from rekindle.rows.findings import MOST, Findings
from rekindle.spec.model import DataSpec

log = logging.getLogger(__name__)

QUARANTINE = "bad_rows.jsonl"


def is_too_many(data: DataSpec, bad: int, good: int) -> bool:
    """Whether so many bad rows beside `good` ones are more than may be left out."""
    if not good:
        return True
    limit = data.max_bad_rows
    if limit >= 1:  # a number of rows, else a share
        return bad > limit
    return bad / (bad + good) > limit


def leave_out(data: DataSpec, findings: Findings, good: int, folder: Path) -> dict[str, int]:
    """How many rows are left out, by kind of fault, beside `good` ones; {} where none may
    be, and the findings stay. A row with several faults counts for each kind, and once
    for the limit."""
    (folder / QUARANTINE).unlink(missing_ok=True)
    if data.on_bad_rows != "drop" or not findings.droppable:
        return {}
    bad = findings.rows
    rows = f"{bad:,} of {bad + good:,} rows"
    if is_too_many(data, bad, good):
        findings.note(
            f"{rows} have faults, more than data.max_bad_rows ({data.max_bad_rows:,})",
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
    by_kind = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
    message = f"left out {rows} ({by_kind}): see {QUARANTINE}"
    if max(counts.values()) > MOST:
        message += f", the first {MOST:,} of a kind"
    log.warning("%s", message)
    return counts
