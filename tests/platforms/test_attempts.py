"""What a launcher concludes from the jobs of its step."""

from __future__ import annotations

import pytest

from rekindle.platforms.launcher import Action, Allowed, Attempt, Cause, GiveUp, Start, decide
from rekindle.platforms.vertex.launcher import job_of


def job(name: str, state: str, created: float, ended: float | None = None) -> Attempt:
    return Attempt(name, state, created, created if ended else None, ended)


A, B, C = (
    {
        state: job(
            name,
            state,
            at,
            None if state in ("QUEUED", "RUNNING", "CANCELLING", "PAUSED") else at + 5,
        )
        for state in (
            "QUEUED",
            "RUNNING",
            "CANCELLING",
            "PAUSED",
            "SUCCEEDED",
            "FAILED",
            "CANCELLED",
            "EXPIRED",
            "PARTIALLY_SUCCEEDED",
        )
    }
    for name, at in (("a", 10.0), ("b", 20.0), ("c", 30.0))
)
DURING_A = job("b", "RUNNING", 12)
GAVE_WAY = job("b", "CANCELLED", 12, 14)

CASES: dict[str, tuple[list[Attempt], Action, list[Attempt]]] = {
    "nothing is there": ([], Start(1, 100), []),
    "one is waiting": ([A["QUEUED"]], A["QUEUED"], []),
    "one is paused": ([A["PAUSED"]], A["PAUSED"], []),
    "one succeeded": ([A["SUCCEEDED"]], A["SUCCEEDED"], []),
    "one failed": ([A["FAILED"]], Start(2, 95), []),
    "one expired": ([A["EXPIRED"]], Start(2, 95), []),
    "one succeeded in part": ([A["PARTIALLY_SUCCEEDED"]], Start(2, 95), []),
    "two failed": (
        [B["FAILED"], A["FAILED"]],
        GiveUp(B["FAILED"], "failed", "2 of 2 attempts failed"),
        [],
    ),
    "somebody cancelled it": (
        [A["CANCELLED"]],
        GiveUp(A["CANCELLED"], "cancelled", "another user or process cancelled it"),
        [],
    ),
    "two at once": ([DURING_A, A["RUNNING"]], A["RUNNING"], [DURING_A]),
    "two at once, one being cancelled": ([A["RUNNING"], B["CANCELLING"]], A["RUNNING"], []),
    "the older of two failed": ([A["FAILED"], DURING_A], Start(2, 95), [DURING_A]),
    "one gave way, the other failed": ([A["FAILED"], GAVE_WAY], Start(2, 95), []),
    "one gave way, the other runs": ([A["RUNNING"], GAVE_WAY], A["RUNNING"], []),
    "the younger of two succeeded": (
        [A["RUNNING"], B["SUCCEEDED"]],
        B["SUCCEEDED"],
        [A["RUNNING"]],
    ),
    "an unknown state": ([job("a", "NEW", 10)], job("a", "NEW", 10), []),
    "the time is up": (
        [job("a", "FAILED", 10, 110)],
        GiveUp(job("a", "FAILED", 10, 110), "failed", "0.0277778 h are all that the step may take"),
        [],
    ),
    "the same moment": (
        [job("b", "QUEUED", 10), job("a", "QUEUED", 10)],
        job("a", "QUEUED", 10),
        [job("b", "QUEUED", 10)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_follows_from(case: str) -> None:
    jobs, action, surplus = CASES[case]

    def cause(job: Attempt) -> Cause:
        return {"CANCELLED": "cancelled", "EXPIRED": "expired"}.get(job.state, "failed")  # type: ignore[return-value]

    allowed = Allowed(failures=1, preemptions=1, seconds=100)
    assert decide(jobs, cause, allowed) == (action, surplus)
    assert decide(jobs[::-1], cause, allowed) == (action, surplus), "the order told something"


def test_preemptions_and_failures_are_counted_apart() -> None:
    causes: dict[str, Cause] = {"a": "preempted", "b": "failed"}
    allowed = Allowed(failures=1, preemptions=1, seconds=100)
    jobs = [A["FAILED"], B["FAILED"]]
    assert decide(jobs, lambda job: causes[job.name], allowed) == (Start(3, 90), [])
    for cause, why in (
        ("preempted", "its machines were taken away 2 times"),
        ("failed", "2 of 2 attempts failed"),
    ):
        causes["c"] = cause  # type: ignore[assignment]
        action, _ = decide([*jobs, C["FAILED"]], lambda job: causes[job.name], allowed)
        assert action == GiveUp(C["FAILED"], cause, why)  # type: ignore[arg-type]


def test_times_are_read_as_the_service_writes_them() -> None:
    container = {"imageUri": "i", "command": ["python3", "/gcs/b/x/node.pyz"]}
    raw = {
        "name": "projects/1/locations/l/customJobs/7",
        "createTime": "2026-11-22T10:00:00.123456789Z",
        "startTime": "2026-11-22T10:00:01Z",
        "updateTime": "2026-11-22T10:00:03.5Z",
        "jobSpec": {"workerPoolSpecs": [{"containerSpec": container}]},
        "state": "JOB_STATE_EXPIRED",
        "error": {"message": "late"},
    }
    found = job_of(raw)
    assert (found.number, found.state, found.error, found.ran_seconds) == (
        "7",
        "EXPIRED",
        "late",
        2.5,
    )
    assert found.ended is not None, "an expired job may have no endTime"
    assert not found.alive
    assert job_of({**raw, "state": "JOB_STATE_PAUSED"}).alive
