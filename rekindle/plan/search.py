"""Which layout a cluster trains in: every candidate is compared by time and memory, and of
those that are as fast as the fastest within the model's own error, the simplest is first.

Candidates are the layouts that the config allows on these machines, each with its
micro-batch sizes and ways to recompute; spec/layout.py and spec/layout_support.py decide
what is legal. This module decides what fits, and the order of options. Every layout that
is not taken has one reason."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import Calibrated, profile_of
from rekindle.plan.memory import Memory, least_bytes, memory, needed
from rekindle.plan.request import Asked, on_gpu
from rekindle.plan.steptime import StepTime, step_time
from rekindle.plan.work import Checkpointing, Work, lora_targets
from rekindle.spec.layout import Layout, Shape, problems_of, undivided
from rekindle.spec.layout_support import SCHEDULES, cell_of, level, refusal
from rekindle.spec.model import LayoutSpec

LARGEST_MICRO_BATCH = 64
RECOMPUTED: tuple[Checkpointing, ...] = ("none", "selective", "full")

# The part of the time model's error that two layouts on the same machines do not share:
# within it they count as equally fast. A guess, not measured
SHARED = 1 / 3


@dataclasses.dataclass(frozen=True)
class Option:
    """A layout that can train on a cluster, at its fastest micro-batch size that fits."""

    work: Work
    cluster: Cluster
    memory: Memory
    step: StepTime
    profile: Calibrated
    examples: int
    """Examples of a step, over all ranks."""
    proven: bool = True
    """Whether a test has trained all of it together, not only every two parts of it."""
    measured_sequence: int = 0
    """Tokens of an example where this work was measured; 0 where it was not."""

    @property
    def sequence(self) -> int:
        """Tokens of an example: as measured, or else the most that it may have."""
        return self.measured_sequence or self.work.sequence

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all GPUs together."""
        return self.examples * self.sequence / self.step.seconds

    @property
    def seconds_between(self) -> tuple[float, float]:
        """The interval of a step's seconds in which nine of ten measurements lay."""
        spread = self.profile.spread
        return self.step.seconds / (1 + spread), self.step.seconds * (1 + spread)


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A layout and the reason why it was not taken;
    `needed_bytes` where that is memory."""

    layout: str
    reason: str
    needed_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found."""

    options: tuple[Option, ...]
    """One for each layout that fits, the best first."""
    rejected: tuple[Rejected, ...]
    """Every layout but the best, with its reason."""
    weighed: int
    """How many candidates were compared: layouts with a micro-batch size and recomputation."""


def search(asked: Asked, cluster: Cluster) -> SearchResult:
    """Compare every layout that the config allows on these machines."""
    asked = on_gpu(asked, cluster.gpu)
    gpu = cluster.gpu
    precision = asked.train.precision
    if precision not in gpu.tflops:
        reason = f"the catalog knows no {precision} peak of {gpu.name}, but {', '.join(gpu.tflops)}"
        return SearchResult((), (Rejected("all", reason),), 0)
    profile = profile_of(gpu.name, asked.train.compile, asked.train.engine)
    options: list[Option] = []
    rejected: list[Rejected] = []
    weighed = 0
    for layout in _layouts(asked, cluster):
        name = str(layout)
        reason = _illegal(asked, cluster, layout)
        timed = []
        if not reason:
            for work, proven in _works(asked, layout):
                timed.append(_Timed(step_time(work, cluster, profile.constants), work, proven))
        if not timed:
            rejected.append(Rejected(name, reason or "no micro-batch size feeds it"))
            continue
        weighed += len(timed)
        fitting = _fastest_that_fits(timed, gpu.memory_bytes)
        if fitting is None:
            rejected.append(_too_large(name, timed, cluster))
            continue
        candidate, peak_memory = fitting
        options.append(
            Option(
                work=candidate.work,
                cluster=cluster,
                memory=peak_memory,
                step=candidate.step,
                profile=profile,
                examples=asked.train.global_batch_size,
                proven=candidate.proven,
            )
        )
    tie = profile.spread * SHARED
    ranked = _ranked(options, tie)
    slower = [
        Rejected(str(option.work.layout), _slower(option, ranked[0], tie)) for option in ranked[1:]
    ]
    return SearchResult(tuple(ranked), (*slower, *rejected), weighed)


def _ranked(options: Sequence[Option], tie: float) -> list[Option]:
    """The simplest of those that take at most `tie` (a share) longer than the fastest,
    then all others by their time."""
    by_time = sorted(options, key=_order)
    if not by_time:
        return []
    longest = by_time[0].step.seconds * (1 + tie)
    as_fast = [option for option in by_time if option.step.seconds <= longest]
    simplest = min(as_fast, key=lambda option: _order(option)[::-1])
    return [simplest, *(option for option in by_time if option is not simplest)]


class _Timed(NamedTuple):
    """A candidate, and the time of its step."""

    step: StepTime
    work: Work
    proven: bool


def _fastest_that_fits(timed: Sequence[_Timed], memory_bytes: int) -> tuple[_Timed, Memory] | None:
    """The fastest candidate that fits into so much memory, with what it takes there."""
    for candidate in sorted(timed, key=_order):
        # the bound first, because memory takes longer to find than the time of a step
        if needed(least_bytes(candidate.work)) <= memory_bytes:
            peak_memory = memory(candidate.work)
            if needed(peak_memory.peak_bytes) <= memory_bytes:
                return candidate, peak_memory
    return None


def _order(candidate: _Timed | Option) -> tuple[float, tuple[int, ...]]:
    """A key that sorts by preference: faster ones first, then proven ones, then simpler
    axes and schedules, then less recomputation."""
    layout = candidate.work.layout
    # how complicated the axes are: replicas alone, shards, both, and then each other axis
    axes = 0
    if layout.shard > 1:
        axes += 1
        if layout.dp > 1:
            axes += 1
    if layout.tp > 1:
        axes += 4
    if layout.pp > 1:
        axes += 8
    if layout.cp > 1:
        axes += 16
    schedule = SCHEDULES.index(layout.schedule)
    recomputed = RECOMPUTED.index(candidate.work.checkpointing)
    return candidate.step.seconds, (int(not candidate.proven), axes, schedule, recomputed)


def _too_large(name: str, timed: Sequence[_Timed], cluster: Cluster) -> Rejected:
    """The rejection of a layout that does not fit even with its smallest micro-batch."""
    least = min(candidate.work.layout.micro_batch_size for candidate in timed)
    smallest = []
    for candidate in timed:
        if candidate.work.layout.micro_batch_size == least:
            smallest.append(memory(candidate.work))
    peak_memory = min(smallest, key=lambda memory: memory.peak_bytes)
    size = needed(peak_memory.peak_bytes)
    device_gib = cluster.gpu.memory_bytes / 2**30
    reason = f"needs {size / 2**30:.0f} of {device_gib:.0f} GiB, most of it {peak_memory.dominant}"
    return Rejected(name, reason, size)


def _slower(option: Option, best: Option, tie: float) -> str:
    """The reason why an option is not the best: what costs it most time, or that it is less
    simple."""
    change = option.step.seconds / best.step.seconds - 1
    if change <= tie:
        return f"as fast within the error ({change:+.0%}), and less simple"
    terms = option.step.terms
    best_terms = best.step.terms
    costliest = max(terms, key=lambda name: terms[name] - best_terms.get(name, 0.0))
    return f"slower by {change:.0%}: {costliest}"


def _layouts(asked: Asked, cluster: Cluster) -> Iterator[Layout]:
    """The layout that the config names, or all layouts with a rank for each GPU."""
    world = cluster.gpus
    layout_spec = asked.train.layout
    if asked.zero is not None:  # the engine has no other
        yield Layout(world)
        return
    if isinstance(layout_spec, LayoutSpec):
        other_ranks = layout_spec.shard * layout_spec.tp * layout_spec.pp * layout_spec.cp
        yield Layout(
            layout_spec.dp or max(1, world // other_ranks),
            layout_spec.shard,
            layout_spec.tp,
            layout_spec.pp,
            layout_spec.cp,
            layout_spec.schedule,
        )
        return
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for tp, pp, cp in itertools.product(divisors, repeat=3):
        data_ranks, remainder = divmod(world, tp * pp * cp)
        if remainder or not data_ranks:
            continue
        # shard over nothing, over all data ranks, or over those of a node, whose links are fast
        in_node = math.gcd(data_ranks, max(1, cluster.gpus_per_node // (tp * cp)))
        for shard in sorted({1, data_ranks, in_node}):
            for schedule in SCHEDULES if pp > 1 else SCHEDULES[:1]:
                yield Layout(data_ranks // shard, shard, tp, pp, cp, schedule)


def _illegal(asked: Asked, cluster: Cluster, layout: Layout) -> str:
    """Why the engine would refuse a layout, or why it is not worth trying; else ""."""
    shape = asked.shape
    if layout.tp > cluster.gpus_per_node:
        return f"tp {layout.tp} does not stay inside a node of {cluster.gpus_per_node} GPUs"
    if layout.cp > 1 and asked.sequence % (2 * layout.cp):
        return f"cp {layout.cp} does not cut {asked.sequence} tokens into pairs of chunks"
    if asked.teacher is not None and layout.tp * layout.pp * layout.cp > 1:
        return "a teacher needs whole examples and scores"
    if layout.data > asked.train.global_batch_size:
        return f"{layout.data} data ranks share {asked.train.global_batch_size} examples"
    divisible = Shape(shape.model_type, shape.layers, shape.heads, shape.kv_heads)
    problem = next(problems_of(layout, cluster.gpus, divisible, asked.train), None)
    problem = problem or next(undivided(layout, asked.lora), None)
    if problem is not None:
        return problem.what
    if next(_ways(asked, layout), None) is None:
        cell = cell_of(asked.kind, layout, asked.train, asked.lora is not None)
        return refusal(cell, asked.train.untested)
    return ""


def _ways(asked: Asked, layout: Layout) -> Iterator[tuple[Checkpointing, bool]]:
    """The ways to recompute with which a layout trains, and whether a test has shown it."""
    choices = RECOMPUTED
    if "activation_checkpointing" not in asked.free:
        choices = (asked.train.activation_checkpointing,)
    for checkpointing in choices:
        train = asked.train.model_copy(update={"activation_checkpointing": checkpointing})
        cell = cell_of(asked.kind, layout, train, asked.lora is not None)
        if not refusal(cell, asked.train.untested):
            yield checkpointing, level(cell) == "proven"


def _works(asked: Asked, layout: Layout) -> Iterator[tuple[Work, bool]]:
    """The work of a layout with each micro-batch size and way to recompute, and whether a
    test has shown that it trains."""
    train = asked.train
    examples = train.global_batch_size // layout.data
    largest = min(examples, LARGEST_MICRO_BATCH)
    sizes = [size for size in range(1, largest + 1) if examples % size == 0]
    if "micro_batch_size" not in asked.free and isinstance(train.micro_batch_size, int):
        sizes = [train.micro_batch_size]
    for checkpointing, proven in _ways(asked, layout):
        for size in sizes:
            sized = dataclasses.replace(layout, micro_batch_size=size)
            work = work_of(asked, sized, checkpointing)
            if _feeds_pipeline(layout, work.accumulation):
                yield work, proven


def _feeds_pipeline(layout: Layout, micro_batches: int) -> bool:
    """Whether there are enough micro-batches for every stage, in whole rounds where the
    schedule asks for them: all but 1F1B do."""
    if layout.pp == 1:
        return True
    if micro_batches < layout.pp:
        return False
    return layout.schedule == "1f1b" or micro_batches % layout.pp == 0


def work_of(asked: Asked, layout: Layout, checkpointing: Checkpointing) -> Work:
    """What each rank does in one step of a layout; `on_gpu` has set the precision of
    `asked`."""
    train = asked.train
    lora = asked.lora
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
