"""Out of memory, explained: which term of the plan asked for more than there was, and what makes it
smaller.

Decides the term by where the engine was: the innermost frame of ours in the traceback. The terms
are those of `rekindle plan`. No torch is imported: what ran out of it may be imported already."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle import formats
from rekindle.errors import Problem

_SHARD = "shard the model over more ranks (train.layout.shard)"
_FEWER = "lower train.micro_batch_size"
_ANYTHING = f"{_FEWER}, set train.activation_checkpointing: full, or {_SHARD}"
_STATE = f"{_SHARD}, train adapters (model.lora), or set train.weights: bf16"

FIXES: Mapping[str, str] = {
    "parameters": _STATE,
    "optimizer": _STATE,
    "gradients": f"{_SHARD}, train adapters (model.lora), or {_FEWER}",
    "activations": f"{_FEWER}, set train.activation_checkpointing: full, or divide the sequence "
    "(train.layout.cp)",
    "attention": f"{_FEWER}, lower data.max_length, or divide the heads (train.layout.tp) or the "
    "sequence (train.layout.cp)",
    "logits": f"{_FEWER}, or divide the vocabulary (train.layout.tp)",
    "scoring": f"{_SHARD}, or take GPUs with more memory for the step `score`",
    "teacher": f"take a smaller model.teacher, set train.precision: bf16, or {_FEWER}",
    "copies for a checkpoint": "raise the container's memory limit, or shard the model over more "
    "machines (train.layout.shard)",
}

# file, and functions in it ("" stands for any) -> term
_PLACES: tuple[tuple[str, frozenset[str], str], ...] = tuple(
    (file, frozenset(functions.split()), term)
    for file, functions, term in (
        ("attention.py", "", "attention"),
        ("tokens.py", "_lesson", "teacher"),
        ("cross_entropy.py", "taught", "teacher"),
        ("part.py", "states hidden", "activations"),
        ("linear_loss.py", "judge_targets judged", "scoring"),
        ("tokens.py", "score", "scoring"),
        ("classes.py", "score", "scoring"),
        ("tags.py", "score", "scoring"),
        ("linear_loss.py", "", "logits"),
        ("tokens.py", "", "logits"),
        ("cross_entropy.py", "", "logits"),
        ("classes.py", "", "logits"),
        ("tags.py", "", "logits"),
        ("teacher.py", "", "teacher"),
        ("scorer.py", "", "scoring"),
        ("snapshot.py", "", "copies for a checkpoint"),
        ("optimizer.py", "collect _local_gradient add_up _add_up", "gradients"),
        ("optimizer.py", "", "optimizer"),
        ("weights.py", "", "parameters"),
        ("parallel.py", "_on_device _distribute settle", "parameters"),
        ("parallel.py", "_again", "activations"),
        ("loop.py", "_backward _warm_up", "gradients"),
        ("loop.py", "losses validate", "activations"),
        ("pipeline.py", "", "activations"),
    )
)
_TEACHING = ("_lesson", "taught")  # whatever a teacher computes there, is the teacher's
_HERE = Path(__file__).parent


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the host or of a GPU ran out. torch's CPU allocator, and some of CUDA's
    libraries, raise a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    words = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def explain(error: BaseException, held: Mapping[str, int]) -> Problem:
    """The term that ran out of memory, what else this rank holds, and the setting that helps."""
    term = term_of(error)
    what = f"out of memory{f' for {term}' if term else ''} ({type(error).__name__}): {error}"
    sizes = [f"{name} {formats.binary(number)}" for name, number in held.items()]
    rest = _allocated() - sum(held.values())
    sizes += [f"everything else {formats.binary(rest)}"] if held and rest > 0 else []
    known = f"; this rank holds {', '.join(sizes)}" if sizes else ""
    return Problem(what.strip().rstrip(":") + known, fix=FIXES.get(term, _ANYTHING))


def term_of(error: BaseException) -> str:
    """What the engine was making, by the innermost frame of ours; "" if none tells."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [code for code in codes if Path(code.co_filename).is_relative_to(_HERE)]
    teaching = [code for code in ours if code.co_name in _TEACHING]
    for code in reversed(teaching or ours):
        for name, functions, term in _PLACES:
            if Path(code.co_filename).name == name and (not functions or code.co_name in functions):
                return term
    return ""


def _allocated() -> int:
    """Bytes of tensors on this rank's GPU; 0 without one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_allocated())
