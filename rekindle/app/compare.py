"""Compare runs of a home: find them, and put side by side what their steps recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rekindle.app.runs import find_run
from rekindle.errors import RequestError
from rekindle.outputs import Compared
from rekindle.records import RunRecord
from rekindle.report.collect import collect
from rekindle.report.comparison import Pair, compared

MOST = 20


def side_by_side(home: Path, names: Sequence[str]) -> tuple[list[Pair], Compared]:
    """The runs that `names` name, and what differs between them; raises as `found_records`."""
    pairs = [(record, collect(record)) for record in found_records(home, names)]
    return pairs, compared(pairs)


def found_records(home: Path, wanted: Sequence[RunRecord | str]) -> list[RunRecord]:
    """The records of the runs that are `wanted` by name (see `find_run`), or as they are.

    Raises RequestError for fewer than two, more than `MOST`, or the same one twice."""
    if not 2 <= len(wanted) <= MOST:
        raise RequestError(
            f"{len(wanted)} run{'' if len(wanted) == 1 else 's'} cannot be compared", where="RUN",
            fix=f"name 2 to {MOST} of them; `rekindle runs` lists them",
        )  # fmt: skip
    records = [one if isinstance(one, RunRecord) else find_run(home, one) for one in wanted]
    ids = [record.run_id for record in records]
    if twice := [run_id for run_id in ids if ids.count(run_id) > 1]:
        raise RequestError(f"`{twice[0]}` is named twice", where="RUN", fix="name each run once")
    return records
