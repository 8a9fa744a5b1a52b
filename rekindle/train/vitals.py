"""One rank's heartbeats, its last words, and the faults that a rehearsal asks for.

A rank tells its supervisor: a beat at least once a micro-batch, stacks of all threads on SIGUSR1,
and, when it fails, the cause with what to do about it, and whether another rank is to blame, which
gloo says only in the text of a RuntimeError. Of memory that ran out it says which term of `rekindle
plan` asked for it, by the innermost frame of ours. No torch is imported here."""

import errno
import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle import formats
from rekindle.errors import Problem, RekindleError
from rekindle.launch.fault import Fault
from rekindle.launch.heartbeats import HeartbeatFile, Phase, stacks_path
from rekindle.spec import heartbeat
from rekindle.tables import rows

_LONGEST_TEXT = 2_000


class Vitals:
    """One rank's heartbeats and faults, made early; `status` is the attempt's folder here."""

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
        """This rank is about to work on `step`, counted from 1 (0: none yet). Costs about two
        microseconds. Call it once a micro-batch, and before anything that may wait for others."""
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
        texts = {"message": problem.what, "where": problem.where, "fix": problem.fix}
        cut = {name: text[:_LONGEST_TEXT] for name, text in texts.items()}
        self._signs.say({"time": time.time(), **cut, "peer_lost": is_peer_lost(error)})


def explain(error: BaseException, held: Mapping[str, int] | None = None) -> Problem:
    """What went wrong, where, and what to do; a full disk and missing memory are recognised in the
    chain of causes. `held` are bytes that this rank is known to hold, by the plan's terms."""
    if isinstance(error, RekindleError):
        return error.problems[0]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space or lower train.checkpoint.keep; the same command resumes"
            what = f"the disk is full: {cause.strerror}"
            return Problem(what, str(cause.filename or ""), fix)
        if is_out_of_memory(cause):
            # the term that ran out, what else this rank holds, and the setting that helps
            term, held = term_of(cause), held or {}
            torch: Any = sys.modules.get("torch")
            on_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
            rest = (int(torch.cuda.memory_allocated()) if on_gpu else 0) - sum(held.values())
            sizes = [f"{name} {formats.binary(number)}" for name, number in held.items()]
            sizes += [f"everything else {formats.binary(rest)}"] if held and rest > 0 else []
            known = f"; this rank holds {', '.join(sizes)}" if sizes else ""
            asked = f" for {term}" if term else ""
            what = f"out of memory{asked} ({type(cause).__name__}): {cause}"
            return Problem(what.strip().rstrip(":") + known, fix=FIXES.get(term, _ANYTHING))
        cause = cause.__cause__ or cause.__context__
    return Problem(f"{type(error).__name__}: {error}", fix="see the step's log for the traceback")


def is_peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away."""
    if any(base.__name__ == "DistError" for base in type(error).__mro__):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _TABLES["lost_peer"])


_HERE = Path(__file__).parent
_TABLES = rows(_HERE / "vitals.yaml")  # read before memory is short
FIXES: Mapping[str, str] = _TABLES["fixes"]
_ANYTHING = _TABLES["anything"]
# file, functions in it (none stands for any), term
_PLACES = [(file, set(words.split()), str(term)) for file, words, term in _TABLES["places"]]
_TEACHING = ("_lesson", "taught")  # whatever a teacher computes there, is the teacher's
_OTHERS = ("Stepped.", "taken")  # of optimizer.py: another engine's memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the host or of a GPU ran out, also as torch's plain RuntimeErrors."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    words = _TABLES["out_of_memory"]
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def term_of(error: BaseException) -> str:
    """What the engine was making, by the innermost frame of ours; "" if none tells."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [code for code in codes if Path(code.co_filename).is_relative_to(_HERE)]
    ours = [code for code in ours if not code.co_qualname.startswith(_OTHERS)]
    teaching = [code for code in ours if code.co_name in _TEACHING]
    for code in reversed(teaching or ours):
        for name, functions, term in _PLACES:
            if Path(code.co_filename).name == name and (not functions or code.co_name in functions):
                return term
    return ""
