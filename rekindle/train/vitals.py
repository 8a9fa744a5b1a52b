"""One rank's heartbeats, its last words, and the faults that a rehearsal asks for.

What a rank leaves for its supervisor: a heartbeat at least once a micro-batch; the stacks
of all threads, on SIGUSR1; and, when it fails, the cause, what to do about it, and
whether another rank is to blame, which gloo says only in the text of a RuntimeError.
Where memory ran out, the innermost frame of the engine decides which of the plan's terms
needed it. No torch is imported here."""

import errno
import faulthandler
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rekindle import formats
from rekindle.errors import Problem, RekindleError
from rekindle.launch.fault import RehearsedFault
from rekindle.launch.heartbeats import HeartbeatFile, Phase, stacks_path
from rekindle.spec import heartbeat

_LONGEST_TEXT = 2_000
"""Characters of each part of a rank's last words, which have to fit into its heartbeat file."""
# the folders with the code of the engine
_ENGINE = (Path(__file__).parent, Path(__file__).parents[1] / "objectives")


class MemoryPlace(NamedTuple):
    """A place in the engine's code, and the term of `rekindle plan` that it makes tensors of."""

    file: str
    """How the path of a file of the engine ends."""
    functions: frozenset[str]
    """Names of functions in that file; empty: all of them."""
    term: str


def _place(file: str, functions: str, term: str) -> MemoryPlace:
    return MemoryPlace(file, frozenset(functions.split()), term)


# The first place that fits a frame counts: functions stand before the rest of a file.
_PLACES = (
    _place("attention.py", "", "attention"),
    _place("tokens/loss.py", "_lesson", "teacher"),
    _place("part.py", "teacher_logits", "teacher"),
    _place("part.py", "logits", "logits"),
    _place("part.py", "states hidden", "activations"),
    _place("tokens/loss.py", "score", "scoring"),
    _place("cross_entropy.py", "judge_targets judge_logits", "scoring"),
    _place("classes/loss.py", "score", "scoring"),
    _place("tokens/loss.py", "", "logits"),
    _place("cross_entropy.py", "", "logits"),
    _place("classes/loss.py", "", "logits"),
    _place("tags/loss.py", "", "logits"),
    _place("numbers/loss.py", "", "logits"),
    _place("objectives/loss.py", "exact", "logits"),
    _place("teacher.py", "load_teacher ready _sharded arrange", "teacher"),
    _place(
        "score_rank.py",
        "of score next_token _forward _batches _batch encode generate _parts",
        "scoring",
    ),
    _place("snapshot.py", "", "copies for a checkpoint"),
    _place("optimizer.py", "collect _local_gradient add_up _add_up", "gradients"),
    _place("optimizer.py", "", "optimizer"),
    _place("weights.py", "", "parameters"),
    _place("parallel.py", "put _distribute settle", "parameters"),
    _place("parallel.py", "_again", "activations"),
    _place("loop.py", "_backward _warm_up", "gradients"),
    _place("loop.py", "validate", "activations"),
    _place("evaluation.py", "losses", "activations"),
    _place("pipeline.py", "", "activations"),
)
# A teacher runs the student's code: what is computed below these is the teacher's.
_TEACHER_FUNCTIONS = ("_lesson", "teacher_logits")

_DIVIDE_STATE = (
    "shard the model over more ranks (train.layout.shard), train adapters (model.lora), or set "
    "train.weights: bf16"
)
FIXES: Mapping[str, str] = {
    "parameters": _DIVIDE_STATE,
    "optimizer": _DIVIDE_STATE,
    "gradients": "shard the model over more ranks (train.layout.shard), train adapters "
    "(model.lora), or lower train.micro_batch_size",
    "activations": "lower train.micro_batch_size, set train.activation_checkpointing: full, or "
    "divide the sequence (train.layout.cp)",
    "attention": "lower train.micro_batch_size, lower data.max_length, or divide the heads "
    "(train.layout.tp) or the sequence (train.layout.cp)",
    "logits": "lower train.micro_batch_size, or divide the vocabulary (train.layout.tp)",
    "scoring": "shard the model over more ranks (train.layout.shard), or take GPUs with more "
    "memory for the step `score`",
    "teacher": "take a smaller model.teacher, set train.precision: bf16, or lower "
    "train.micro_batch_size",
    "copies for a checkpoint": "raise the container's memory limit, or shard the model over more "
    "machines (train.layout.shard)",
}
"""The settings that help where memory for a term ran out."""
_FIX_OF_ANY_TERM = (
    "lower train.micro_batch_size, set train.activation_checkpointing: full, or shard the model "
    "over more ranks (train.layout.shard)"
)

# words of the errors of collectives whose peer went away, in lower case
_WORDS_OF_A_LOST_PEER = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "timed out waiting",
    "gloo",
    "broken pipe",
    "socket timeout",
)
# torch raises a plain RuntimeError where its allocator for CPUs, a kernel or cuBLAS gets none
_WORDS_OF_MISSING_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class Vitals:
    """One rank's heartbeats, last words and rehearsed fault.

    `status` is the folder of this attempt on this machine. A rank makes its Vitals before
    anything that may fail or take long."""

    held_bytes: Mapping[str, int]
    """What this rank holds throughout the training, by the plan's terms, for the message
    about memory that ran out; empty until the training is set up."""

    def __init__(self, status: Path, rank: int) -> None:
        self._heartbeats = HeartbeatFile(status, rank, threading.main_thread().ident or 0)
        # stays open as long as the process: the handler writes to its file descriptor
        self._stacks = stacks_path(status, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        faulthandler.enable()  # a crash in C++ leaves the stacks in the log
        self._fault = RehearsedFault.current(rank)
        self.held_bytes = {}
        heartbeat.connect(self._heartbeats.go_on)

    def beat(self, step: int, phase: Phase) -> None:
        """Note that this rank is about to work on `step`, counted from 1 (0: none yet).

        It takes about two microseconds. Call it once a micro-batch, and before anything
        that may wait for other ranks."""
        self._heartbeats.beat(step, phase)
        fault = self._fault
        if fault is not None and phase == "step" and step >= fault.step:
            self._fault = None
            fault.happen()

    def failed(self, error: BaseException) -> None:
        """Leave the cause as last words, and the traceback in the log."""
        traceback.print_exception(error, file=sys.stdout)
        sys.stdout.flush()
        problem = explain(error, self.held_bytes)
        self._heartbeats.say(
            {
                "time": time.time(),
                "message": problem.what[:_LONGEST_TEXT],
                "where": problem.where[:_LONGEST_TEXT],
                "fix": problem.fix[:_LONGEST_TEXT],
                "peer_lost": is_peer_lost(error),
            }
        )


def explain(error: BaseException, held_bytes: Mapping[str, int] | None = None) -> Problem:
    """What went wrong, where, and what to do.

    A full disk and missing memory are recognised anywhere in the chain of causes:
    libraries wrap them in errors of their own. `held_bytes`: see `Vitals`."""
    if isinstance(error, RekindleError):
        return error.problems[0]
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space or lower train.checkpoint.keep; the same command resumes"
            message = f"the disk is full: {cause.strerror}"
            return Problem(message, str(cause.filename or ""), fix)
        if is_out_of_memory(cause):
            return _explain_out_of_memory(cause, held_bytes or {})
    return Problem(f"{type(error).__name__}: {error}", fix="see the step's log for the traceback")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, what caused that, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _explain_out_of_memory(error: BaseException, held_bytes: Mapping[str, int]) -> Problem:
    """The term that memory ran out for, what else this rank holds, and the setting that helps."""
    term = term_of(error)
    sizes = [f"{name} {formats.binary(size)}" for name, size in held_bytes.items()]
    other_bytes = _allocated_bytes() - sum(held_bytes.values())
    if held_bytes and other_bytes > 0:
        sizes.append(f"everything else {formats.binary(other_bytes)}")
    purpose = f" for {term}" if term else ""
    message = f"out of memory{purpose} ({type(error).__name__}): {error}".strip().rstrip(":")
    if sizes:
        message += f"; this rank holds {', '.join(sizes)}"
    return Problem(message, fix=FIXES.get(term, _FIX_OF_ANY_TERM))


def _allocated_bytes() -> int:
    """What torch has allocated on this rank's GPU; 0 where torch or the GPU is not in use."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_allocated())


def is_peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away."""
    # torch.distributed.DistError by its name, because torch is not imported here
    if any(base.__name__ == "DistError" for base in type(error).__mro__):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _WORDS_OF_A_LOST_PEER)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the host or of a GPU ran out, also as torch's plain RuntimeErrors."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(w in text for w in _WORDS_OF_MISSING_MEMORY)


def term_of(error: BaseException) -> str:
    """The term whose tensors the engine was making, by its innermost frame in the error's
    traceback; "" where no frame tells."""
    engine_codes = []  # outermost first
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if any(file.is_relative_to(folder) for folder in _ENGINE):
            engine_codes.append(frame.f_code)
    teacher_codes = [code for code in engine_codes if code.co_name in _TEACHER_FUNCTIONS]
    for code in reversed(teacher_codes or engine_codes):
        for place in _PLACES:
            if _is_at(place, code):
                return place.term
    return ""


def _is_at(place: MemoryPlace, code: types.CodeType) -> bool:
    """Whether `code`, a function of the engine, belongs to this place."""
    if not Path(code.co_filename).as_posix().endswith(f"/{place.file}"):
        return False
    return not place.functions or code.co_name in place.functions
