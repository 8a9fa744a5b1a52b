"""Memory of a layout, traced: what the closed form of rekindle/plan/memory.py is held against.

The engine's own parts run on tensors without values, in a child process (`engine.py`). Two shallow depths are traced and
extrapolated: every block of a stage adds the same.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.families import FAMILIES
from rekindle.plan.memory import Memory, memory
from rekindle.plan.work import Work
from rekindle.spec.model import LoraSpec

ROOT = Path(__file__).parents[3]
SHALLOW = 3  # blocks a stage: the fewest in which the first, the last and one between differ
_BUFFERS = "pipeline buffers"


@dataclasses.dataclass(frozen=True)
class Finalist:
    """What is asked about: the model's and a teacher's Hugging Face config, the task, the work."""

    config: Mapping[str, Any]
    task: str
    work: Work
    classes: int = 2
    lora: LoraSpec | None = None
    teacher: Mapping[str, Any] | None = None


class TraceError(Exception):
    """A child that gave no answer; its text says why."""


def trace(finalist: Finalist, limit_seconds: float = 120) -> Memory:
    """Memory of the worst rank. TraceError where the child gives no answer."""
    closed = memory(finalist.work)
    short = dataclasses.replace(finalist, work=_few(finalist.work))
    jobs = [job(short, closed.pp_rank, depth) for depth in depths(short.work)]
    deep = extrapolated(asked(jobs, limit_seconds), finalist.work, closed.pp_rank)
    # and the buffers that a pipeline has for each of the other micro-batches
    few = memory(short.work, closed.pp_rank).terms.get(_BUFFERS, 0)
    if more := closed.terms.get(_BUFFERS, 0) - few:
        terms = {**deep.terms, _BUFFERS: deep.terms.get(_BUFFERS, 0) + more}
        deep = dataclasses.replace(deep, terms=terms)
    return deep


def depths(work: Work) -> tuple[int, int]:
    """How many blocks a stage has at least, in the two traces."""
    low = max(1, min(SHALLOW, work.shape.layers // work.layout.stages))
    return low, low + 2


def _few(work: Work) -> Work:
    """With as many micro-batches as it takes until each only repeats the one before."""
    layout = work.layout
    enough = layout.pp + 1 if layout.schedule == "1f1b" else 2 * layout.pp
    return dataclasses.replace(work, accumulation=min(work.accumulation, enough))


def asked(jobs: Sequence[Mapping[str, Any]], limit_seconds: float) -> list[dict[str, Any]]:
    """What the child says of each job. TraceError where it fails or takes too long."""
    command = [sys.executable, "-m", "tests.plan.traced.engine"]
    text = "".join(json.dumps(job) + "\n" for job in jobs)
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=limit_seconds, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        raise TraceError(f"no answer within {limit_seconds:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise TraceError(lines[-1])
    return [json.loads(line) for line in done.stdout.splitlines()]


def job(one: Finalist, pp_rank: int, depth: int) -> dict[str, Any]:
    """What the child is asked, of a model with so many blocks in each stage at least."""
    work, names = one.work, FAMILIES[one.work.shape.model_type].names
    layers = depth * work.layout.stages + work.shape.layers % work.layout.stages
    key = names.get("num_hidden_layers", "num_hidden_layers")
    config = {k: v for k, v in one.config.items() if k != "num_hidden_layers"} | {key: layers}
    weights = "bf16" if work.weights_bytes == 2 else "fp32"
    # fp8 keeps for the backward pass what bf16 does
    precision = "bf16" if work.precision == "fp8" else work.precision
    train = {
        "precision": precision,
        "weights": weights,
        "compile": work.compile,
        "activation_checkpointing": work.checkpointing,
        "optimizer": work.optimizer,
    }
    return {
        "config": config,
        "task": one.task,
        "layout": dataclasses.asdict(work.layout),
        "train": train,
        "sequence": work.sequence,
        "accumulation": work.accumulation,
        "pp_rank": pp_rank,
        "classes": one.classes,
        "lora": one.lora.model_dump(mode="json") if one.lora else None,
        "teacher": one.teacher,
    }


def extrapolated(pair: Sequence[Mapping[str, Any]], work: Work, pp_rank: int) -> Memory:
    """From two depths to the work's own: straight lines for each phase, the largest the peak."""
    low, high = depths(work)
    blocks = work.shape.layers // work.layout.stages  # some have one more, at both depths, too

    def line(shallow: float, deep: float) -> int:
        return round(shallow + (deep - shallow) * (blocks - low) / (high - low))

    shallow, deep = pair
    phases = {name: line(shallow["phases"][name], deep["phases"][name]) for name in deep["phases"]}
    phase = max(phases, key=lambda name: phases[name])
    names = dict.fromkeys([*deep["terms"], *shallow["terms"]])
    terms = {n: max(0, line(shallow["terms"].get(n, 0), deep["terms"].get(n, 0))) for n in names}
    # terms are those of the peak, which may have been in another phase at one of the depths
    missing = phases[phase] - sum(terms.values())
    largest = max(terms, key=lambda name: terms[name])
    where = "temporaries" if terms.get("temporaries", 0) + missing >= 0 else largest
    terms[where] = terms.get(where, 0) + missing
    return Memory({name: size for name, size in terms.items() if size}, phase, pp_rank)
