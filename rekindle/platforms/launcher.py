"""The launcher step: it has the platform run a distributed step as a job of its own, and
follows that job.

A launcher keeps nothing in memory that matters: at every poll it reads the jobs of its
step from the platform and does what `decide` concludes from them. So it may be killed at
any moment; the next launcher finds the job and follows it. It also reads whether the run
goes on. If the run ends, its jobs are cancelled; a launcher that is stopped while the run
goes on (its machine is drained) leaves the job to the next one. If the platform does not
answer that, the job goes on, too: its nodes end it when the run is over.

`decide` knows nothing but the jobs that the step has had, in the order in which they were
created. A job that was created while an older one was alive is surplus: it comes from two
launchers, or from one that was killed while it created a job and the next one, which did
not know of each other. Every launcher concludes the same: it cancels the surplus job and
follows the older one. The other jobs are the attempts of the step."""

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

# why a job ended; `preempted`: its machines were taken away, or it stopped itself after a
# save (exit code 75)
Cause = Literal["preempted", "failed", "expired", "cancelled"]
log = logging.getLogger(__name__)
TERMINATED = 128 + signal.SIGTERM


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A job that is an attempt of a step; times are in seconds since 1970. A job in a state
    that rekindle does not know counts as alive."""

    name: str
    state: str
    created: float
    started: float | None = None
    ended: float | None = None
    error: str = ""
    command: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        """The last part of its name, by which logs call it."""
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
    """Fail the step: its last attempt ended for `cause`, and `why` says why none follows."""

    job: Attempt
    cause: Cause
    why: str


# what a launcher does next; an Attempt is to be followed or, if it succeeded, delivered
Action = Start | Attempt | GiveUp


def decide(
    jobs: Sequence[Attempt], cause: Callable[[Attempt], Cause], allowed: Allowed
) -> tuple[Action, list[Attempt]]:
    """What to do next, and the jobs to cancel first."""
    ordered = sorted(jobs, key=lambda job: (job.created, job.name))
    attempts: list[Attempt] = []  # all but those that were created while an older attempt was alive
    for job in ordered:
        before = attempts[-1] if attempts else None
        if before is None or (before.ended is not None and before.ended <= job.created):
            attempts.append(job)
    succeeded = [job for job in ordered if job.state == SUCCEEDED]
    # a surplus job that succeeded counts, too: its results are as good
    candidates = succeeded or [job for job in attempts if job.alive]
    followed = candidates[0] if candidates else None
    surplus = [job for job in jobs if job.alive and job != followed and job.state != "CANCELLING"]
    return followed or _next(attempts, cause, allowed), surplus


def _next(
    attempts: Sequence[Attempt], cause: Callable[[Attempt], Cause], allowed: Allowed
) -> Action:
    """Start the next attempt, or give up, where no attempt is alive."""
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
    """A launcher, whose requests each platform adds. SIGTERM sets `stop`, which ends its
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
        """Cancel the jobs if the run ends, else leave them to the next launcher; returns the
        exit code after SIGTERM."""
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
        """Ask the platform for one more job. It may fail: the next poll shows what exists."""

    @abc.abstractmethod
    def follow(self, job: Attempt) -> None:
        """Log what is new about the followed job; called at every poll and once at its end."""

    @abc.abstractmethod
    def cancel(self, job: Attempt) -> None:
        """Ask the platform to end the job."""

    @abc.abstractmethod
    def deliver(self, job: Attempt) -> int:
        """Hand the results of a job that succeeded to the pipeline; returns the exit code."""

    @abc.abstractmethod
    def give_up(self, end: GiveUp) -> int:
        """Log why the step failed; returns the exit code."""

    @abc.abstractmethod
    def failed(self, error: Exception) -> int:
        """Log why this launcher cannot go on; returns the exit code."""

    @abc.abstractmethod
    def hurry(self) -> None:
        """Have requests work although `stop` is set, and wait for answers only a short time:
        SIGKILL follows."""
