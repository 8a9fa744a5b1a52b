"""What to do next about a distributed step, from the jobs that it has had and nothing else.

The launcher asks this at every poll, so it does not matter which launcher started what, or
whether it lived to hear of it. Jobs are put in the order in which they were created. One that was
created while an older one was alive is surplus: two launchers, or one that was killed in the middle
of `create` and its successor, did not know of each other; every launcher comes to the same
conclusion, cancels it and follows the older one. The others are the attempts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

SUCCEEDED = "SUCCEEDED"
ENDED_RUN = frozenset({SUCCEEDED, "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"})

# `preempted`: its machines were taken away, or it stopped itself after a save (exit code 75)
Cause = Literal["preempted", "failed", "expired", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Job:
    """One attempt of a step; times in seconds since 1970. An unknown state counts as alive: nothing
    is started beside it."""

    name: str
    state: str
    created: float
    started: float | None = None
    ended: float | None = None
    error: str = ""
    command: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        """The last part of its name."""
        return self.name.rpartition("/")[2]

    @property
    def alive(self) -> bool:
        return self.state not in ENDED_RUN

    @property
    def ran_seconds(self) -> float:
        return max(0.0, self.ended - self.started) if self.ended and self.started else 0.0


@dataclasses.dataclass(frozen=True)
class Allowed:
    """How many attempts may fail by themselves beside the last one, how many may lose their
    machines, and how long all may run together."""

    failures: int
    preemptions: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Start:
    """Create attempt `number` (from 1), which may run for so long."""

    number: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Follow:
    """Wait for this one."""

    job: Job


@dataclasses.dataclass(frozen=True)
class Finish:
    """This one succeeded."""

    job: Job


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """The last attempt ended for this cause, and there is no other."""

    job: Job
    cause: Cause
    why: str


Action = Start | Follow | Finish | GiveUp


def decide(
    jobs: Sequence[Job], cause: Callable[[Job], Cause], allowed: Allowed
) -> tuple[Action, list[Job]]:
    """What to do, and the jobs to cancel first."""
    attempts = standing(jobs)
    won = next((job for job in _in_order(jobs) if job.state == SUCCEEDED), None)
    keep = won or next((job for job in attempts if job.alive), None)
    surplus = [job for job in jobs if job.alive and job != keep and job.state != "CANCELLING"]
    if won:
        return Finish(won), surplus
    return (Follow(keep) if keep else _next(attempts, cause, allowed)), surplus


def standing(jobs: Sequence[Job]) -> list[Job]:
    """The attempts, oldest first: every job but those created while an older attempt was alive."""
    found: list[Job] = []
    for job in _in_order(jobs):
        if not found or (found[-1].ended is not None and found[-1].ended <= job.created):
            found.append(job)
    return found


def _in_order(jobs: Sequence[Job]) -> list[Job]:
    return sorted(jobs, key=lambda job: (job.created, job.name))


def _next(attempts: Sequence[Job], cause: Callable[[Job], Cause], allowed: Allowed) -> Action:
    """The next attempt, if there is one; none is alive."""
    left = allowed.seconds - sum(job.ran_seconds for job in attempts)
    if not attempts:
        return Start(1, left)
    causes = [cause(job) for job in attempts]
    last, why = attempts[-1], causes[-1]
    preempted = causes.count("preempted")
    failed = len(causes) - preempted
    if why == "cancelled":
        return GiveUp(last, why, "another user or process cancelled it")
    if left < 1:
        return GiveUp(last, why, f"{allowed.seconds / 3_600:g} h are all that the step may take")
    if why == "preempted" and preempted > allowed.preemptions:
        return GiveUp(last, why, f"its machines were taken away {preempted} times")
    if why != "preempted" and failed > allowed.failures:
        return GiveUp(last, why, f"{failed} of {allowed.failures + 1} attempts failed")
    return Start(len(attempts) + 1, left)
