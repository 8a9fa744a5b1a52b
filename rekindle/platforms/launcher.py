"""The step that has a platform run a distributed step as a job of its own, and follows that job.

A launcher keeps nothing in memory that matters: at every poll it looks at the jobs of its step and
does what attempts.py concludes from them. So it may be killed anywhere; the next one finds the job
and follows it. It also looks whether the run goes on. If the run ends, its jobs are cancelled; a
launcher that is stopped while the run goes on (its machine is drained) leaves the job to the next
one. If that cannot be found out the job goes on, too: its node rank 0 ends it when the run is over.
"""

import abc
import logging
import signal
import threading

from rekindle.errors import RekindleError
from rekindle.http import HttpError
from rekindle.platforms.attempts import Allowed, Cause, Finish, Follow, GiveUp, Job, Start, decide

log = logging.getLogger(__name__)

TERMINATED = 128 + signal.SIGTERM


class Launcher(abc.ABC):
    """One launcher at work; platforms say how its questions are asked and its orders given. `stop`
    is set by SIGTERM, and ends every wait."""

    def __init__(self, allowed: Allowed, poll_seconds: float, stop: threading.Event) -> None:
        self.allowed, self.poll_seconds, self.stop = allowed, poll_seconds, stop

    def run(self) -> int:
        """Follow the step to its end; the exit code."""
        try:
            while not self.stop.is_set() and not self.ending():
                action, surplus = decide(self.jobs(), self.cause, self.allowed)
                for job in surplus:
                    log.info("%s runs beside an older job of this step: cancelled", job.number)
                    self.cancel(job)
                match action:
                    case Start():
                        self.start(action)
                    case Follow(job):
                        self.follow(job)
                    case Finish(job):
                        self.follow(job)
                        return self.deliver(job)
                    case GiveUp(job):
                        self.follow(job)
                        return self.give_up(action)
                self.stop.wait(self.poll_seconds)
        except (HttpError, RekindleError) as error:
            if not self.stop.is_set():
                return self.failed(error)
        return self.terminated()

    def terminated(self) -> int:
        """Cancel the jobs if the run ends, else leave them; the exit code after SIGTERM."""
        self.hurry()
        try:
            if reason := self.ending():
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
    def jobs(self) -> list[Job]:
        """All jobs of this step that there are."""

    @abc.abstractmethod
    def cause(self, job: Job) -> Cause:
        """Why an ended job did not succeed."""

    @abc.abstractmethod
    def start(self, attempt: Start) -> None:
        """Create one more job. It need not be there afterwards: the next poll shows it."""

    @abc.abstractmethod
    def follow(self, job: Job) -> None:
        """Show what is new about the job that counts, once a poll and once at its end."""

    @abc.abstractmethod
    def cancel(self, job: Job) -> None:
        """Have the platform end it."""

    @abc.abstractmethod
    def deliver(self, job: Job) -> int:
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
