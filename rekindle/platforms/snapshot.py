"""The state of a run on a platform, in the terms of RunRecord, and how it updates a
record."""

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.records import RunRecord, RunStatus, StepRecord, StepStatus

ENDED_RUN: frozenset[RunStatus] = frozenset({"succeeded", "failed", "cancelled", "preempted"})
ENDED_STEP: frozenset[StepStatus] = frozenset({"succeeded", "failed", "skipped", "cancelled"})


@dataclasses.dataclass(frozen=True)
class RunSnapshot:
    """What a platform reports about a run when it is queried."""

    status: RunStatus
    steps: tuple[StepRecord, ...] = ()
    """The steps that the platform knows by now; `log` is its address of a step's log."""
    error: str = ""
    ended_at: datetime.datetime | None = None
    """None while it runs."""


def merged(record: RunRecord, snapshot: RunSnapshot, now: datetime.datetime) -> RunRecord:
    """`record` updated by `snapshot`.

    Planned steps keep their order; others, such as turns of loops, follow in that of the
    snapshot. In a run that is over, steps that never began are skipped, with the reason."""
    new_steps = {step.name: step for step in snapshot.steps}
    steps = []
    for step in record.steps:
        new_step = new_steps.pop(step.name, None)
        if new_step is None:
            steps.append(step)
        else:  # the platform does not report which component a step runs
            steps.append(new_step.model_copy(update={"component": step.component}))
    steps += new_steps.values()
    if snapshot.status in ENDED_RUN:
        steps = [_closed(step, snapshot.status) for step in steps]
    failed = first_failed(steps)
    error = f"step `{failed.name}` failed: {failed.error}".rstrip(": ") if failed else ""
    began = datetime.datetime.fromisoformat(record.started_at)
    seconds = round(((snapshot.ended_at or now) - began).total_seconds(), 3)
    return record.model_copy(
        update={
            "status": snapshot.status,
            "steps": tuple(steps),
            "seconds": max(0.0, seconds),
            "error": snapshot.error or error,
        }
    )


def step_times(
    began: datetime.datetime | None, ended: datetime.datetime | None, now: datetime.datetime
) -> dict[str, object]:
    """`started_at` and `seconds` of a StepRecord; {} for a step that has not begun. The
    seconds of a running step are those until `now`."""
    if began is None:
        return {}
    seconds = max(0.0, round(((ended or now) - began).total_seconds(), 3))
    utc = began.astimezone(datetime.UTC).isoformat(timespec="seconds")
    return {"started_at": utc, "seconds": seconds}


def moment(body: Mapping[str, Any], name: str) -> datetime.datetime | None:
    """The time under a name of a platform's JSON; None where it has no such member."""
    text = body.get(name)
    return datetime.datetime.fromisoformat(text) if text else None


def first_failed(steps: Iterable[StepRecord]) -> StepRecord | None:
    """The step that failed first."""
    failed = [step for step in steps if step.status == "failed"]
    return min(failed, key=lambda step: step.started_at, default=None)


def _closed(step: StepRecord, status: RunStatus) -> StepRecord:
    """The step as it is in a run that ended with `status`."""
    if step.status == "pending":
        why = "a condition chose otherwise" if status == "succeeded" else "the run ended before"
        return step.model_copy(update={"status": "skipped", "reason": step.reason or why})
    if step.status == "running":
        return step.model_copy(update={"status": "cancelled", "reason": f"the run {status}"})
    return step
