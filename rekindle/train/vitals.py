"""One rank's signs of life, its last words, and the faults that a rehearsal asks for.

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
from collections.abc import Iterator
from pathlib import Path

from rekindle.errors import Problem, RekindleError
from rekindle.launch.fault import Fault
from rekindle.launch.signs import Phase, SignFile, stacks_path

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
_SMALLER = (
    "lower train.micro_batch_size, set train.activation_checkpointing: full, "
    "or shard the model over more ranks (train.layout.shard)"
)


class Vitals:
    """One rank's signs of life, and the faults that a rehearsal asks for. One a process, made as
    early as possible: what comes before it counts as torchrun's start.

    `status` is the attempt's folder on this machine, where the supervisor looks."""

    def __init__(self, status: Path, rank: int) -> None:
        self._signs = SignFile(status, rank, threading.main_thread().ident or 0)
        # stays open as long as the process: the handler writes to its file descriptor
        self._stacks = stacks_path(status, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        faulthandler.enable()  # a crash in C++ leaves the stacks in the log
        self._fault = Fault.current(rank)

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
        problem = explain(error)
        self._signs.say(
            {
                "time": time.time(),
                "message": problem.what[:_LONGEST_TEXT],
                "where": problem.where[:_LONGEST_TEXT],
                "fix": problem.fix[:_LONGEST_TEXT],
                "peer_lost": is_peer_lost(error),
            }
        )


def explain(error: BaseException) -> Problem:
    """What went wrong, where, and what to do; a full disk and missing memory are recognised
    wherever in the chain of causes they are."""
    if isinstance(error, RekindleError):
        return error.problems[0]
    kind = type(error).__name__
    for cause in _chain(error):
        name = type(cause).__name__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return Problem(
                f"the disk is full: {cause.strerror}",
                str(cause.filename or ""),
                "free some space or lower train.checkpoint.keep; the same command resumes",
            )
        if isinstance(cause, MemoryError) or name == "OutOfMemoryError" or _cannot_allocate(cause):
            return Problem(f"out of memory ({name}): {cause}".rstrip(": "), fix=_SMALLER)
    return Problem(f"{kind}: {error}", fix="see the step's log for the traceback")


def is_peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away."""
    if any(base.__name__ == "DistError" for base in type(error).__mro__):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _PEER_WORDS)


def _cannot_allocate(error: BaseException) -> bool:
    """torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__
