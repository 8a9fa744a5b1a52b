"""Memory of a finalist, traced: the engine's own parts run on tensors without values, in a child
process that has torch (`python -m rekindle.train.trace`), and `rekindle plan` itself never does.

Two shallow depths are traced and extrapolated: every block of a stage adds the same. A tiny model
whose bytes are known is traced first; where that fails, where torch is not there, or where it takes
too long, the closed form answers and says why."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.families import FAMILIES
from rekindle.plan.memory import Memory, memory
from rekindle.plan.work import Work
from rekindle.spec.model import LoraSpec

SHALLOW = 3  # blocks a stage: the fewest in which the first, the last and one between differ
LIMIT_SECONDS = 55.0
AT_MOST = 2  # finalists
_BUFFERS = "pipeline buffers"

# One rank, fp32: weights [8, 8] of a table and a head, one block of 4 + 3 matrices and 3 norms.
_TINY: Mapping[str, Any] = {
    "config": {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "vocab_size": 8,
    },
    "task": "causal_lm", "layout": {}, "train": {}, "sequence": 8, "accumulation": 1,
}  # fmt: skip
_TINY_PARAMETERS = 9 * 8 * 8 + 3 * 8
_TINY_STATIC = 3 * 4 * _TINY_PARAMETERS + 4 * 12  # weights, two moments, and a count of steps each


@dataclasses.dataclass(frozen=True)
class Finalist:
    """What is asked about: the model's and a teacher's Hugging Face config, the task, the work."""

    config: Mapping[str, Any]
    task: str
    work: Work
    classes: int = 2
    lora: LoraSpec | None = None
    teacher: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """Memory of the worst rank; `traced`: whether the engine was asked; `note`: why not."""

    memory: Memory
    traced: bool
    note: str = ""


class _TraceError(Exception):
    """A child that gave no answer; its text is the note."""


def trace(
    finalists: Sequence[Finalist], limit_seconds: float = LIMIT_SECONDS,
    python: str = sys.executable, at_most: int = AT_MOST,
) -> list[Answer]:  # fmt: skip
    """Answers in the order of `finalists`, all of them by one child process."""
    computed = [memory(one.work) for one in finalists]
    short = [dataclasses.replace(one, work=_few(one.work)) for one in finalists]
    pairs = list(zip(short[:at_most], computed, strict=False))
    asked = [_job(one, m.pp_rank, depth) for one, m in pairs for depth in depths(one.work)]
    try:
        tiny, *said = _asked([_TINY, *asked], limit_seconds, python)
        if tiny["static"] - _TINY_STATIC not in range(512):  # and what a loop keeps
            found = f"{tiny['static']} bytes where {_TINY_STATIC} were expected"
            raise _TraceError(f"torch does not do what is known of it: its self-test found {found}")
    except _TraceError as error:
        note = f"from the closed form, not traced: {error}"
        return [Answer(closed, False, note) for closed in computed]
    answers = []
    for number, (one, closed) in enumerate(zip(finalists, computed, strict=True)):
        if number >= at_most:
            note = f"from the closed form: only {at_most} finalists are traced"
            answers.append(Answer(closed, False, note))
            continue
        pair = said[2 * number : 2 * number + 2]
        deep = extrapolated(pair, one.work, closed.pp_rank)
        # and the buffers that a pipeline has for each of the other micro-batches
        few = memory(short[number].work, closed.pp_rank).terms.get(_BUFFERS, 0)
        if more := closed.terms.get(_BUFFERS, 0) - few:
            terms = {**deep.terms, _BUFFERS: deep.terms.get(_BUFFERS, 0) + more}
            deep = dataclasses.replace(deep, terms=terms)
        answers.append(Answer(deep, True, "; ".join(pair[1]["notes"])))
    return answers


def depths(work: Work) -> tuple[int, int]:
    """How many blocks a stage has at least, in the two traces."""
    low = max(1, min(SHALLOW, work.shape.layers // work.layout.stages))
    return low, low + 2


def _few(work: Work) -> Work:
    """With as many micro-batches as it takes until each only repeats the one before."""
    layout = work.layout
    enough = layout.pp + 1 if layout.schedule == "1f1b" else 2 * layout.pp
    return dataclasses.replace(work, accumulation=min(work.accumulation, enough))


def _asked(
    jobs: Sequence[Mapping[str, Any]], limit_seconds: float, python: str
) -> list[dict[str, Any]]:
    command = [python, "-m", "rekindle.train.trace"]
    text = "".join(json.dumps(job) + "\n" for job in jobs)
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise _TraceError(f"no answer within {limit_seconds:.0f} s") from None
    except OSError as error:
        raise _TraceError(f"{python} does not start: {error.strerror}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise _TraceError(lines[-1])
    return [json.loads(line) for line in done.stdout.splitlines()]


def _job(one: Finalist, pp_rank: int, depth: int) -> dict[str, Any]:
    """What the child is asked, of a model with so many blocks in each stage at least."""
    work, names = one.work, FAMILIES[one.work.shape.model_type].names
    layers = depth * work.layout.stages + work.shape.layers % work.layout.stages
    key = names.get("num_hidden_layers", "num_hidden_layers")
    config = {k: v for k, v in one.config.items() if k != "num_hidden_layers"} | {key: layers}
    weights = "bf16" if work.weights_bytes == 2 else "fp32"
    # fp8 keeps for the backward pass what bf16 does
    precision = "bf16" if work.precision == "fp8" else work.precision
    train = {
        "precision": precision, "weights": weights, "compile": work.compile,
        "activation_checkpointing": work.checkpointing, "optimizer": work.optimizer,
    }  # fmt: skip
    return {
        "config": config, "task": one.task, "layout": dataclasses.asdict(work.layout),
        "train": train, "sequence": work.sequence, "accumulation": work.accumulation,
        "pp_rank": pp_rank, "classes": one.classes,
        "lora": one.lora.model_dump(mode="json") if one.lora else None, "teacher": one.teacher,
    }  # fmt: skip


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
