"""Which layout: every candidate is weighed by time and memory on the machines at hand; what is as
fast as the best within the model's own error goes to the simplest.

Decides what fits, and in which order options stand. Every layout that is not taken has one
reason."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rekindle.plan.candidates import RECOMPUTED, SCHEDULES, candidates
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import Profile, profile_of
from rekindle.plan.memory import Memory, least_bytes, memory, needed
from rekindle.plan.request import Asked, on_gpu
from rekindle.plan.steptime import StepTime, step_time
from rekindle.plan.work import Work

# What two layouts on the same machines do not share of the model's error: a third, a guess; within
# it they count as alike.
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
    """Weigh everything on that cluster."""
    asked = on_gpu(asked, cluster.gpu)
    gpu, precision = cluster.gpu, asked.train.precision
    if precision not in gpu.tflops:
        knows = f"knows no {precision} peak of {gpu.name}, but {', '.join(gpu.tflops)}"
        return Found((), (Rejected("all", f"the catalog {knows}"),), 0)
    profile = profile_of(cluster.gpu.name, asked.train.compile, asked.train.engine)
    best: dict[str, Option] = {}
    rejected: dict[str, Rejected] = {}
    weighed = 0
    for candidate in candidates(asked, cluster):
        name = str(candidate.layout)
        if candidate.reason:
            rejected[name] = Rejected(name, candidate.reason)
            continue
        ways, constants = candidate.ways, profile.constants
        timed = [_Timed(step_time(work, cluster, constants), work, known) for work, known in ways]
        weighed += len(timed)
        if fitting := _fastest_that_fits(timed, cluster.gpu.memory_bytes):
            one, held = fitting
            examples = asked.train.global_batch_size
            best[name] = Option(one.work, cluster, held, one.step, profile, examples, one.proven)
        else:
            rejected[name] = _too_large(name, timed, cluster)
    tie = profile.spread * SHARED
    ranked = _ranked(list(best.values()), tie)
    late = [Rejected(str(o.work.layout), _slower(o, ranked[0], tie)) for o in ranked[1:]]
    return Found(tuple(ranked), (*late, *rejected.values()), weighed)


class _Timed(NamedTuple):
    """A work and the time of its step, in the order of preference."""

    step: StepTime
    work: Work
    proven: bool


def _fastest_that_fits(timed: Sequence[_Timed], room: int) -> tuple[_Timed, Memory] | None:
    """With its memory; that of slower ones need not be known, and takes longer to find than the
    time of a step."""
    for one in sorted(timed, key=_order):
        if needed(least_bytes(one.work)).bytes <= room:
            held = memory(one.work)
            if needed(held.peak_bytes).bytes <= room:
                return one, held
    return None


def _order(one: _Timed | Option) -> tuple[float, tuple[int, ...]]:
    """Faster ones first; then proven ones, then the simplest: replicas, shards, both; then tp, pp,
    cp; then recomputation."""
    layout = one.work.layout
    data = (layout.shard > 1) + (layout.shard > 1 and layout.dp > 1)
    axes = 4 * (layout.tp > 1) + 8 * (layout.pp > 1) + 16 * (layout.cp > 1)
    schedule, again = SCHEDULES.index(layout.schedule), RECOMPUTED.index(one.work.checkpointing)
    return one.step.seconds, (int(not one.proven), data + axes, schedule, again)


def _ranked(options: Sequence[Option], tie: float) -> list[Option]:
    """The simplest of those that are as fast as the fastest, then the others by their time."""
    if not options:
        return []
    fastest = min(option.step.seconds for option in options)
    as_fast = [option for option in options if option.step.seconds <= fastest * (1 + tie)]
    first = min(as_fast, key=lambda option: _order(option)[::-1])
    return [first, *sorted((o for o in options if o is not first), key=_order)]


def _too_large(name: str, timed: Sequence[_Timed], cluster: Cluster) -> Rejected:
    least = min(one.work.layout.micro_batch_size for one in timed)
    smallest = (memory(o.work) for o in timed if o.work.layout.micro_batch_size == least)
    held = min(smallest, key=lambda memory: memory.peak_bytes)
    size, here = needed(held.peak_bytes).bytes, cluster.gpu.memory_bytes / 2**30
    reason = f"needs {size / 2**30:.0f} of {here:.0f} GiB, most of it {held.dominant}"
    return Rejected(name, reason, size)


def _slower(option: Option, best: Option, tie: float) -> str:
    by = option.step.seconds / best.step.seconds - 1
    if by <= tie:
        return f"as fast within the error ({by:+.0%}), and less simple"
    ours, its = best.step.terms, option.step.terms
    return f"slower by {by:.0%}: {max(its, key=lambda name: its[name] - ours.get(name, 0.0))}"
