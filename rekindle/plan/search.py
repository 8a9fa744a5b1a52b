"""Which layout: every candidate is weighed by time and memory on the machines at hand; what is as
fast as the best within the model's own error goes to the simplest.

Candidates are the layouts that a config allows there, each with its micro-batches and ways to
recompute; what is legal, spec/layout.py and spec/layout_support.py say. Decides what fits, and in
which order options stand. Every layout that is not taken has one reason."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import Profile, profile_of
from rekindle.plan.memory import Memory, least_bytes, memory, needed
from rekindle.plan.request import Asked, on_gpu
from rekindle.plan.steptime import StepTime, step_time
from rekindle.plan.work import Checkpointing, Work, lora_targets
from rekindle.spec.layout import Layout, Shape, problems_of, undivided
from rekindle.spec.layout_support import SCHEDULES, cell_of, level, refusal
from rekindle.spec.model import LayoutSpec

LARGEST_MICRO_BATCH = 64
RECOMPUTED: tuple[Checkpointing, ...] = ("none", "selective", "full")

# of the model's error, what two layouts on the same machines do not share: a guess
SHARED = 1 / 3


@dataclasses.dataclass(frozen=True)
class Option:
    """A layout that can train there; `proven` as support.level has it, composed otherwise. `met` is
    how many tokens an example had where this work was measured, 0 where it was not."""

    work: Work
    cluster: Cluster
    memory: Memory
    step: StepTime
    profile: Profile
    examples: int
    proven: bool = True
    met: int = 0

    @property
    def sequence(self) -> int:
        """Tokens of an example: as many as were met, or as it may have."""
        return self.met or self.work.sequence

    @property
    def tokens_per_second(self) -> float:
        """Of the whole cluster."""
        return self.examples * self.sequence / self.step.seconds

    @property
    def seconds_between(self) -> tuple[float, float]:
        """The interval around the seconds of a step: nine of ten lay within."""
        spread = self.profile.spread
        return self.step.seconds / (1 + spread), self.step.seconds * (1 + spread)


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A layout and the reason why it was not taken; `needed_bytes` where that is memory."""

    layout: str
    reason: str
    needed_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """The options, best first, one a layout; what was weighed in all; and why not the others."""

    options: tuple[Option, ...]
    rejected: tuple[Rejected, ...]
    weighed: int


def search(asked: Asked, cluster: Cluster) -> Found:
    asked = on_gpu(asked, cluster.gpu)
    gpu, precision = cluster.gpu, asked.train.precision
    if precision not in gpu.tflops:
        knows = f"knows no {precision} peak of {gpu.name}, but {', '.join(gpu.tflops)}"
        return Found((), (Rejected("all", f"the catalog {knows}"),), 0)
    profile = profile_of(cluster.gpu.name, asked.train.compile, asked.train.engine)
    best: dict[str, Option] = {}
    rejected: dict[str, Rejected] = {}
    weighed, constants = 0, profile.constants
    for layout in _layouts(asked, cluster):
        name, reason = str(layout), _illegal(asked, cluster, layout)
        ways = [] if reason else list(_works(asked, layout))
        if not ways:
            rejected[name] = Rejected(name, reason or "no micro-batch size feeds it")
            continue
        timed = [_Timed(step_time(work, cluster, constants), work, known) for work, known in ways]
        weighed += len(timed)
        if fitting := _fastest_that_fits(timed, cluster.gpu.memory_bytes):
            one, held = fitting
            examples = asked.train.global_batch_size
            best[name] = Option(one.work, cluster, held, one.step, profile, examples, one.proven)
        else:
            rejected[name] = _too_large(name, timed, cluster)
    tie, ranked = profile.spread * SHARED, sorted(best.values(), key=_order)
    if ranked:  # the simplest of those that are as fast as the fastest, then by their time
        fastest = ranked[0].step.seconds
        as_fast = [option for option in ranked if option.step.seconds <= fastest * (1 + tie)]
        first = min(as_fast, key=lambda option: _order(option)[::-1])
        ranked = [first, *(option for option in ranked if option is not first)]
    late = [Rejected(str(o.work.layout), _slower(o, ranked[0], tie)) for o in ranked[1:]]
    return Found(tuple(ranked), (*late, *rejected.values()), weighed)


class _Timed(NamedTuple):
    """A work and the time of its step, in the order of preference."""

    step: StepTime
    work: Work
    proven: bool


def _fastest_that_fits(timed: Sequence[_Timed], room: int) -> tuple[_Timed, Memory] | None:
    """With its memory, which takes longer to find than the time of a step."""
    for one in sorted(timed, key=_order):
        if needed(least_bytes(one.work)) <= room:
            held = memory(one.work)
            if needed(held.peak_bytes) <= room:
                return one, held
    return None


def _order(one: _Timed | Option) -> tuple[float, tuple[int, ...]]:
    """Faster ones first; then proven ones, then simple axes and schedules, then recomputation."""
    layout = one.work.layout
    data = (layout.shard > 1) + (layout.shard > 1 and layout.dp > 1)
    axes = 4 * (layout.tp > 1) + 8 * (layout.pp > 1) + 16 * (layout.cp > 1)
    schedule, again = SCHEDULES.index(layout.schedule), RECOMPUTED.index(one.work.checkpointing)
    return one.step.seconds, (int(not one.proven), data + axes, schedule, again)


def _too_large(name: str, timed: Sequence[_Timed], cluster: Cluster) -> Rejected:
    least = min(one.work.layout.micro_batch_size for one in timed)
    smallest = (memory(o.work) for o in timed if o.work.layout.micro_batch_size == least)
    held = min(smallest, key=lambda memory: memory.peak_bytes)
    size, here = needed(held.peak_bytes), cluster.gpu.memory_bytes / 2**30
    reason = f"needs {size / 2**30:.0f} of {here:.0f} GiB, most of it {held.dominant}"
    return Rejected(name, reason, size)


def _slower(option: Option, best: Option, tie: float) -> str:
    by = option.step.seconds / best.step.seconds - 1
    if by <= tie:
        return f"as fast within the error ({by:+.0%}), and less simple"
    ours, its = best.step.terms, option.step.terms
    return f"slower by {by:.0%}: {max(its, key=lambda name: its[name] - ours.get(name, 0.0))}"


def _layouts(asked: Asked, cluster: Cluster) -> Iterator[Layout]:
    """Those of as many ranks as there are GPUs; the one that the config asks for, if it does."""
    world, spec = cluster.gpus, asked.train.layout
    if asked.zero is not None:  # the engine has no other
        yield Layout(world)
        return
    if isinstance(spec, LayoutSpec):
        others = spec.shard * spec.tp * spec.pp * spec.cp
        dp = spec.dp or max(1, world // others)
        yield Layout(dp, spec.shard, spec.tp, spec.pp, spec.cp, spec.schedule)
        return
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for tp, pp, cp in itertools.product(divisors, repeat=3):
        rest, odd = divmod(world, tp * pp * cp)
        if odd or not rest:
            continue
        shards = {1, rest, math.gcd(rest, max(1, cluster.gpus_per_node // (tp * cp)))}
        for shard in sorted(shards):
            for schedule in SCHEDULES if pp > 1 else SCHEDULES[:1]:
                yield Layout(rest // shard, shard, tp, pp, cp, schedule)


def _illegal(asked: Asked, cluster: Cluster, layout: Layout) -> str:
    """Why the engine would refuse it, or why it is not worth trying; "" for neither."""
    shape = asked.shape
    if layout.tp > cluster.gpus_per_node:
        return f"tp {layout.tp} does not stay inside a node of {cluster.gpus_per_node} GPUs"
    if layout.cp > 1 and asked.sequence % (2 * layout.cp):
        return f"cp {layout.cp} does not cut {asked.sequence} tokens into pairs of chunks"
    if asked.teacher is not None and layout.tp * layout.pp * layout.cp > 1:
        return "a teacher needs whole examples and scores"
    if layout.data > asked.train.global_batch_size:
        return f"{layout.data} data ranks share {asked.train.global_batch_size} examples"
    arithmetic = Shape(shape.model_type, shape.layers, shape.heads, shape.kv_heads)
    problem = next(problems_of(layout, cluster.gpus, arithmetic, asked.train), None)
    problem = problem or next(undivided(layout, asked.lora), None)
    if problem is not None:
        return problem.what
    if not any(True for _ in _ways(asked, layout)):
        cell = cell_of(asked.kind, layout, asked.train, asked.lora is not None)
        return refusal(cell, asked.train.untested)
    return ""


def _ways(asked: Asked, layout: Layout) -> Iterator[tuple[Checkpointing, bool]]:
    """Ways to recompute with which the layout trains, and whether a test has shown that."""
    free = "activation_checkpointing" in asked.free
    for choice in RECOMPUTED if free else (asked.train.activation_checkpointing,):
        train = asked.train.model_copy(update={"activation_checkpointing": choice})
        cell = cell_of(asked.kind, layout, train, asked.lora is not None)
        if not refusal(cell, asked.train.untested):
            yield choice, level(cell) == "proven"


def _works(asked: Asked, layout: Layout) -> Iterator[tuple[Work, bool]]:
    train, total = asked.train, asked.train.global_batch_size
    each = total // layout.data
    sizes = [n for n in range(1, min(each, LARGEST_MICRO_BATCH) + 1) if each % n == 0]
    if "micro_batch_size" not in asked.free and isinstance(train.micro_batch_size, int):
        sizes = [train.micro_batch_size]
    for checkpointing, proven in _ways(asked, layout):
        for size in sizes:
            work = work_of(asked, dataclasses.replace(layout, micro_batch_size=size), checkpointing)
            turns, even = work.accumulation, layout.schedule != "1f1b"
            if layout.pp == 1 or (turns >= layout.pp and not (even and turns % layout.pp)):
                yield work, proven


def work_of(asked: Asked, layout: Layout, checkpointing: Checkpointing) -> Work:
    """What each rank does in one step of that layout, on a GPU that `asked` is for (`on_gpu`)."""
    train, lora = asked.train, asked.lora
    assert train.precision != "auto"
    micro_batches = math.ceil(train.global_batch_size / layout.micro_batch_size)
    return Work(
        shape=asked.shape,
        layout=layout,
        accumulation=math.ceil(micro_batches / layout.data),
        sequence=asked.sequence,
        precision=train.precision,
        checkpointing=checkpointing,
        compile=train.compile,
        weights_bytes=2 if train.weights == "bf16" else 4,
        lora_rank=lora.rank if lora else 0,
        lora_targets=lora_targets(asked.shape, lora.targets) if lora else (),
        teacher=asked.teacher,
        tf32=not train.deterministic,
        zero=asked.zero,
        optimizer=train.optimizer,
        quantised=lora is not None and lora.base == "4bit",
    )
