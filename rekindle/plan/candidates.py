"""Which layouts a config allows on the machines at hand, and in each the micro-batches and ways to
recompute: all that may be weighed, with the reason of what may not.

What is legal, spec/layout.py and spec/layout_support.py say."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from rekindle.plan.cluster import Cluster
from rekindle.plan.request import Asked
from rekindle.plan.work import Checkpointing, Software, Work, lora_targets
from rekindle.spec.layout import Layout, Schedule, Shape, problems_of, undivided
from rekindle.spec.layout_support import cell_of, level, refusal
from rekindle.spec.model import LayoutSpec

LARGEST_MICRO_BATCH = 64
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero_bubble")
RECOMPUTED: tuple[Checkpointing, ...] = ("none", "selective", "full")


class Candidate(NamedTuple):
    """A layout, and what each rank would do in it: each way, and whether a test has shown that it
    trains. Without ways there is a `reason`."""

    layout: Layout
    ways: tuple[tuple[Work, bool], ...] = ()
    reason: str = ""


def candidates(asked: Asked, cluster: Cluster) -> Iterator[Candidate]:
    """Of every layout, on GPUs that `asked` is for (`request.on_gpu`)."""
    for layout in _layouts(asked, cluster):
        reason = _illegal(asked, cluster, layout)
        if reason:
            yield Candidate(layout, reason=reason)
            continue
        found = tuple(_works(asked, layout))
        yield Candidate(layout, found, "" if found else "no micro-batch size feeds it")


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
        inside = max(1, cluster.gpus_per_node // (tp * cp))
        shards = {1, rest, math.gcd(rest, inside)}
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
    choices = RECOMPUTED if free else (asked.train.activation_checkpointing,)
    for choice in choices:
        train = asked.train.model_copy(update={"activation_checkpointing": choice})
        cell = cell_of(asked.kind, layout, train, asked.lora is not None)
        if not refusal(cell, asked.train.untested):
            yield choice, level(cell) == "proven"


def _works(asked: Asked, layout: Layout) -> Iterator[tuple[Work, bool]]:
    """What each rank would do, and whether a test has shown it."""
    train, total = asked.train, asked.train.global_batch_size
    each = total // layout.data
    most = min(each, LARGEST_MICRO_BATCH)
    sizes = [n for n in range(1, most + 1) if each % n == 0]
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
        shape=asked.shape, layout=layout, accumulation=math.ceil(micro_batches / layout.data),
        sequence=asked.sequence, precision=train.precision, checkpointing=checkpointing,
        compile=train.compile, weights_bytes=2 if train.weights == "bf16" else 4,
        lora_rank=lora.rank if lora else 0,
        lora_targets=lora_targets(asked.shape, lora.targets) if lora else (),
        teacher=asked.teacher, software=Software(tf32=not train.deterministic), zero=asked.zero,
        optimizer=train.optimizer, quantised=lora is not None and lora.base == "4bit",
    )  # fmt: skip
