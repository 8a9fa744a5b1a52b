"""The step that has a platform run a distributed step as a job of its own, and follows
that job.

A launcher keeps nothing in memory that matters: at every poll it looks at the jobs of its
step and does what `decide` concludes from them. So it may be killed anywhere; the next
one finds the job and follows it. It also looks whether the run goes on. If the run ends,
its jobs are cancelled; a launcher that is stopped while the run goes on (its machine is
drained) leaves the job to the next one. If that cannot be found out the job goes on, too:
its node rank 0 ends it when the run is over.

`decide` knows the jobs that the step has had and nothing else, in the order in which they
were created. One that was created while an older one was alive is surplus: two launchers,
or one that was killed in the middle of `create` and its successor, did not know of each
other; every launcher comes to the same conclusion, cancels it and follows the older one.
The others are the attempts."""

import abc
import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from rekindle.errors import RekindleError
from rekindle.http import HttpError

SUCCEEDED = "SUCCEEDED"
ENDED_RUN = frozenset({SUCCEEDED, "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"})

# `preempted`: its machines were taken away, or it stopped itself after a save (exit code
# 75)
Cause = Literal["preempted", "failed", "expired", "cancelled"]
log = logging.getLogger(__name__)
TERMINATED = 128 + signal.SIGTERM


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt of a step; times in seconds since 1970. An unknown state counts as
    alive."""

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
    """How many attempts may fail, how many may lose their machines, and how long all may
    run."""

    failures: int
    preemptions: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Start:
    """Create attempt `number` (from 1), which may run for so long."""

    number: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """The last attempt ended for this cause, and there is no other."""

    job: Attempt
    cause: Cause
    why: str


Action = Start | Attempt | GiveUp  # a Job is followed, unless it has succeeded


def decide(
    jobs: Sequence[Attempt], cause: Callable[[Attempt], Cause], allowed: Allowed
) -> tuple[Action, list[Attempt]]:
    """What to do, and the jobs to cancel first."""
    ordered = sorted(jobs, key=lambda job: (job.created, job.name))
    attempts: list[Attempt] = []  # all but those that were created while an older attempt was alive
    for job in ordered:
        before = attempts[-1] if attempts else None
        if before is None or (before.ended is not None and before.ended <= job.created):
            attempts.append(job)
    succeeded = [job for job in ordered if job.state == SUCCEEDED]
    # also a surplus one: its results are as good
    candidates = succeeded or [job for job in attempts if job.alive]
    followed = candidates[0] if candidates else None
    surplus = [job for job in jobs if job.alive and job != followed and job.state != "CANCELLING"]
    return followed or _next(attempts, cause, allowed), surplus


def _next(
    attempts: Sequence[Attempt], cause: Callable[[Attempt], Cause], allowed: Allowed
) -> Action:
    """The next attempt, if there is one; none is alive."""
    remaining_seconds = allowed.seconds - sum(job.ran_seconds for job in attempts)
    if not attempts:
        return Start(1, remaining_seconds)
    causes = [cause(job) for job in attempts]
    last_job = attempts[-1]
    last_cause = causes[-1]
    preemptions = causes.count("preempted")
    failures = len(causes) - preemptions
    if last_cause == "cancelled":
        return GiveUp(last_job, last_cause, "another user or process cancelled it")
    if remaining_seconds < 1:
        why = f"{allowed.seconds / 3_600:g} h are all that the step may take"
        return GiveUp(last_job, last_cause, why)
    if last_cause == "preempted" and preemptions > allowed.preemptions:
        why = f"its machines were taken away {preemptions} times"
        return GiveUp(last_job, last_cause, why)
    if last_cause != "preempted" and failures > allowed.failures:
        why = f"{failures} of {allowed.failures + 1} attempts failed"
        return GiveUp(last_job, last_cause, why)
    return Start(len(attempts) + 1, remaining_seconds)


class Launcher(abc.ABC):
    """One launcher at work, which platforms complete. `stop` is set by SIGTERM, and ends
    waits."""

    def __init__(self, allowed: Allowed, poll_seconds: float, stop: threading.Event) -> None:
        self.allowed = allowed
        self.poll_seconds = poll_seconds
        self.stop = stop

    def run(self) -> int:
        """Follow the step to its end, and return the exit code."""
        try:
            while not self.stop.is_set() and not self.ending():
                action, surplus = decide(self.jobs(), self.cause, self.allowed)
                for job in surplus:
                    log.info("%s runs beside an older job of this step: cancelled", job.number)
                    self.cancel(job)
                match action:
                    case Start():
                        self.start(action)
                    case GiveUp(job):
                        self.follow(job)
                        return self.give_up(action)
                    case Attempt():
                        self.follow(action)
                        if action.state == SUCCEEDED:
                            return self.deliver(action)
                self.stop.wait(self.poll_seconds)
        except (HttpError, RekindleError) as error:
            if not self.stop.is_set():
                return self.failed(error)
        return self.terminated()

    def terminated(self) -> int:
        """Cancel the jobs if the run ends, else leave them; the exit code after
        SIGTERM."""
        self.hurry()
        try:
            reason = self.ending()
            if reason:
                for job in self.jobs():
                    if job.alive and job.state != "CANCELLING":
                        self.cancel(job)
                        log.info("the run ends, %s: %s is cancelled", reason, job.number)
            else:
                log.info("this launcher was stopped, the run goes on: so does the job")
        except (HttpError, RekindleError) as error:
            log.error("the job goes on until its node 0 sees that the run is over: %s", error)
        return TERMINATED

    @abc.abstractmethod
    def ending(self) -> str:
        """Why the run, or this step of it, is at its end; "" while it goes on."""

    @abc.abstractmethod
    def jobs(self) -> list[Attempt]:
        """All jobs of this step that there are."""

    @abc.abstractmethod
    def cause(self, job: Attempt) -> Cause:
        """Why an ended job did not succeed."""

    @abc.abstractmethod
    def start(self, attempt: Start) -> None:
        """Create one more job. It need not be there afterwards: the next poll shows
        it."""

    @abc.abstractmethod
    def follow(self, job: Attempt) -> None:
        """Show what is new about the job that counts, once a poll and once at its end."""

    @abc.abstractmethod
    def cancel(self, job: Attempt) -> None:
        """Have the platform end it."""

    @abc.abstractmethod
    def deliver(self, job: Attempt) -> int:
        """Hand the results of the job that succeeded to the pipeline; the exit code."""

    @abc.abstractmethod
    def give_up(self, end: GiveUp) -> int:
        """Show why the step failed; the exit code."""

    @abc.abstractmethod
    def failed(self, error: Exception) -> int:
        """Show why this launcher cannot go on; the exit code."""

    @abc.abstractmethod
    def hurry(self) -> None:
        """From now on requests are made although `stop` is set, with little patience."""
