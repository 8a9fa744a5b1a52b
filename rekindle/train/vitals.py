"""One rank's heartbeats, its last words, and the faults that a rehearsal asks for.

Decides what a rank tells its supervisor: a beat at least once a micro-batch, stacks of all threads
on SIGUSR1, and, when it fails, the cause with what to do about it, and whether another rank is to
blame. gloo says the latter only in the text of a RuntimeError."""

from __future__ import annotations

import errno
import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from rekindle.errors import Problem, RekindleError
from rekindle.launch.fault import Fault
from rekindle.launch.heartbeats import HeartbeatFile, Phase, stacks_path
from rekindle.spec import heartbeat
from rekindle.train import exhausted

_PEER_WORDS = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "timed out waiting",
    "gloo",
    "broken pipe",
    "socket timeout",
)
_LONGEST_TEXT = 2_000


class Vitals:
    """One rank's heartbeats, and the faults that a rehearsal asks for. One a process, made as
    early as possible: what comes before it counts as torchrun's start.

    `status` is the attempt's folder on this machine, where the supervisor looks."""

    def __init__(self, status: Path, rank: int) -> None:
        self._signs = HeartbeatFile(status, rank, threading.main_thread().ident or 0)
        # stays open as long as the process: the handler writes to its file descriptor
        self._stacks = stacks_path(status, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        faulthandler.enable()  # a crash in C++ leaves the stacks in the log
        self._fault = Fault.current(rank)
        self.held: dict[str, int] = {}
        heartbeat.connect(self._signs.go_on)

    def beat(self, step: int, phase: Phase) -> None:
        """This rank is alive and about to work on `step`, counted from 1 (0: none yet). Costs about
        two microseconds. Call it at least once a micro-batch and a batch of validation, before
        anything that may wait for others."""
        self._signs.beat(step, phase)
        fault = self._fault
        if fault is not None and phase == "step" and step >= fault.step:
            self._fault = None
            fault.happen()

    def failed(self, error: BaseException) -> None:
        """Leave the cause as last words, and the traceback in the log."""
        traceback.print_exception(error, file=sys.stdout)
        sys.stdout.flush()
        problem = explain(error, self.held)
        self._signs.say(
            {
                "time": time.time(),
                "message": problem.what[:_LONGEST_TEXT],
                "where": problem.where[:_LONGEST_TEXT],
                "fix": problem.fix[:_LONGEST_TEXT],
                "peer_lost": is_peer_lost(error),
            }
        )


def explain(error: BaseException, held: Mapping[str, int] | None = None) -> Problem:
    """What went wrong, where, and what to do; a full disk and missing memory are recognised
    wherever in the chain of causes they are. `held` are bytes that this rank is known to hold, by
    the plan's terms."""
    if isinstance(error, RekindleError):
        return error.problems[0]
    kind = type(error).__name__
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return Problem(
                f"the disk is full: {cause.strerror}", str(cause.filename or ""),
                "free some space or lower train.checkpoint.keep; the same command resumes",
            )  # fmt: skip
        if exhausted.is_out_of_memory(cause):
            return exhausted.explain(cause, held or {})
    return Problem(f"{kind}: {error}", fix="see the step's log for the traceback")


def is_peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away."""
    if any(base.__name__ == "DistError" for base in type(error).__mro__):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _PEER_WORDS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__
