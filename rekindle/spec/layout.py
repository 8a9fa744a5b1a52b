"""Degrees of parallelism as arithmetic: what divides what, and the nearest layouts that fit.

No torch: a config is checked on a laptop. Ranks are numbered with `tp` fastest, then `cp`, `shard`,
`dp`, and `pp` slowest, so that the chattiest axis stays inside a node. dp x shard ranks divide the
batch; tp and cp ranks see the same examples; pp ranks hold different blocks."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from rekindle.errors import Problem, RequestError
from rekindle.families import DIVISIBLE, config_of
from rekindle.spec.model import LayoutSpec, LoraSpec, TrainSpec

Schedule = Literal["1f1b", "interleaved", "zero_bubble"]
AXES = ("dp", "shard", "tp", "pp", "cp")
# axes that divide what an optimizer needs whole; cp ranks share shards of the weights
DIVIDED: Mapping[str, tuple[str, ...]] = {
    "adamw": (),
    "muon": ("shard", "tp", "cp"),
    "adamw8bit": ("tp",),
}
_NEEDS = {
    "muon": "whole matrices",
    "adamw8bit": "whole rows of matrices, in which numbers share a scale",
}
LARGEST_AUTO_MICRO_BATCH = 32


@dataclasses.dataclass(frozen=True)
class Layout:
    """Degrees whose product is the number of ranks, and the micro-batch that goes with them."""

    dp: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    schedule: Schedule = "1f1b"
    micro_batch_size: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.shard * self.tp * self.pp * self.cp

    @property
    def data(self) -> int:
        """Number of ranks that divide the batch."""
        return self.dp * self.shard

    @property
    def stages(self) -> int:
        """Pieces the blocks are cut into; two a rank for the interleaved schedules."""
        return self.pp * (1 if self.schedule == "1f1b" else 2) if self.pp > 1 else 1

    @property
    def only_replicates(self) -> bool:
        """Whether every rank holds the whole model (DDP, or one process)."""
        return self.dp == self.world

    def __str__(self) -> str:
        degrees = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1}
        named = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        return (named or "one rank") + (f", {self.schedule}" if self.pp > 1 else "")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a model has to be divisible. `layers` counts blocks; 0 means unknown."""

    model_type: str
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From a Hugging Face config; `{"model_type": "gpt2"}` has 12 layers and 12 heads."""
        known = config_of(config)
        heads = int(known.get("num_attention_heads", 0))
        kind, layers = config.get("model_type", ""), known.get("num_hidden_layers", 0)
        return cls(str(kind), int(layers), heads, int(known.get("num_key_value_heads", heads)))


def resolve(train: TrainSpec, world: int, shape: Shape | None = None) -> Layout:
    """The layout of `world` ranks that the spec asks for; RequestError names the nearest legal
    ones. `resolve(TrainSpec(layout={"tp": 2}), world=4)` has dp 2, tp 2."""
    spec = LayoutSpec() if train.layout == "auto" else train.layout
    others = spec.shard * spec.tp * spec.pp * spec.cp
    dp = spec.dp or max(1, world // others)
    wanted = Layout(dp, spec.shard, spec.tp, spec.pp, spec.cp, spec.schedule)
    problem = next(problems_of(wanted, world, shape, train), None)
    if problem is not None:
        texts = []
        for layout in _nearest(wanted, world, shape, train):
            named = [f"{a}: {getattr(layout, a)}" for a in AXES if getattr(layout, a) > 1]
            texts.append(f"{{{', '.join(named)}}}" if named else "auto")
        near = f"on {world} ranks, use {' or '.join(texts)}" if texts else ""
        fix = "; ".join(filter(None, (problem.fix, near)))
        raise RequestError([dataclasses.replace(problem, fix=fix)])
    return dataclasses.replace(wanted, micro_batch_size=_micro_batch(train, wanted))


def problems_of(
    layout: Layout, world: int, shape: Shape | None, train: TrainSpec
) -> Iterator[Problem]:
    """Why `world` ranks cannot train in that layout."""
    if layout.world != world:
        what = f"the layout {layout} needs {layout.world} ranks and there are {world}"
        yield Problem(what, "train.layout")
    yield from whole(layout, train.optimizer)
    tp, kv_heads = layout.tp, shape.kv_heads if shape else 0
    if shape and tp > 1 and shape.heads and (shape.heads % tp or kv_heads % tp):
        also = "" if kv_heads == shape.heads else f" and {kv_heads} key-value heads"
        what = f"tp {tp} does not divide {shape.heads} heads{also}"
        yield Problem(what, "train.layout.tp")
    if shape and tp * layout.pp > 1 and shape.model_type not in DIVISIBLE:
        what = f"{shape.model_type} cannot be divided, as {', '.join(DIVISIBLE)} can"
        yield Problem(what, "train.layout")
    if shape and layout.pp > 1 and shape.layers and shape.layers < layout.stages:
        stages = f"{layout.stages} stages ({layout.schedule})"
        yield Problem(f"{shape.layers} blocks cannot fill {stages}", "train.layout.pp")
    if layout.pp > 1:
        yield from _pipeline(layout, train)


def whole(layout: Layout | LayoutSpec, optimizer: str) -> Iterator[Problem]:
    """Axes that divide what the optimizer needs in one piece."""
    axes = DIVIDED[optimizer]
    for axis in axes:
        if (degree := getattr(layout, axis)) > 1:
            what = f"{optimizer} needs {_NEEDS[optimizer]}, and {axis} {degree} divides them"
            kept = " and ".join(a for a in AXES if a not in axes)
            fix = f"use {kept} only, or train.optimizer: adamw"
            yield Problem(what, f"train.layout.{axis}", fix)


def undivided(layout: Layout | LayoutSpec, lora: LoraSpec | None) -> Iterator[Problem]:
    """Axes that divide a base in 4 bits."""
    for axis in AXES[1:] if lora is not None and lora.base == "4bit" else ():
        if (degree := getattr(layout, axis)) > 1:
            what = f"a base in 4 bits is whole on each rank, and {axis} {degree} divides it"
            yield Problem(what, f"train.layout.{axis}", "use dp only, or model.lora.base: full")


def _pipeline(layout: Layout, train: TrainSpec) -> Iterator[Problem]:
    """A data rank's micro-batches fill the ranks of its pipeline, for some in full rounds."""
    size, unit = _micro_batch(train, layout), layout.pp
    each = -(-(train.global_batch_size // size) // layout.data)
    if each < unit or (layout.schedule != "1f1b" and each % unit):
        count = f"{each} micro-batches of {size} a data rank"
        need = f"at least {unit}" if layout.schedule == "1f1b" else f"a multiple of {unit}"
        what = f"{count} cannot feed {layout.pp} stages ({layout.schedule} needs {need})"
        fix = f"set train.global_batch_size to a multiple of {unit * layout.data}"
        yield Problem(what, "train.micro_batch_size", f"{fix}, or a smaller micro_batch_size")


def _micro_batch(train: TrainSpec, layout: Layout) -> int:
    """`auto`: the largest divisor of the global batch up to 32 that gives every rank work."""
    if train.micro_batch_size != "auto":
        return train.micro_batch_size
    size = train.global_batch_size
    parts = layout.pp * layout.data if layout.pp > 1 else 1
    largest = min(max(1, size // parts), LARGEST_AUTO_MICRO_BATCH)
    fitting = [d for d in range(largest, 0, -1) if size % d == 0]
    return next((d for d in fitting if (size // d) % parts == 0), fitting[0])


def uneven(train: TrainSpec, layout: Layout) -> str:
    """What to say where a global batch has too few divisors for micro-batches that fill a device:
    61 examples on one rank are 61 micro-batches; or ""."""
    total = train.global_batch_size
    fitting = min(LARGEST_AUTO_MICRO_BATCH, -(-total // (layout.data * layout.pp)))
    largest = max(d for d in range(1, fitting + 1) if total % d == 0)
    if 4 * largest > fitting:
        return ""
    better = 1 << (fitting.bit_length() - 1)
    return (
        f"train.global_batch_size {total} divides into micro-batches of at most {largest}, which "
        f"is slow; {-(-total // better) * better} divides into micro-batches of {better}"
    )


def _nearest(wanted: Layout, world: int, shape: Shape | None, train: TrainSpec) -> list[Layout]:
    """Up to three legal layouts of `world` ranks, those that change the least first."""

    def distance(layout: Layout) -> tuple[int, float, tuple[int, ...]]:
        pairs = [(getattr(layout, a), getattr(wanted, a)) for a in AXES]
        moved = sum(new != old for new, old in pairs[1:])
        factor = sum(max(new / old, old / new) for new, old in pairs)
        return moved, factor, tuple(-getattr(layout, a) for a in AXES)

    divisors = [d for d in range(1, world + 1) if world % d == 0]
    used = [a for a in AXES[1:] if getattr(wanted, a) > 1]
    found = []
    for degrees in itertools.product(*(divisors for _ in used)):
        rest, odd = divmod(world, math.prod(degrees))
        layout = Layout(dp=rest, schedule=wanted.schedule, **dict(zip(used, degrees, strict=True)))
        if not odd and next(problems_of(layout, world, shape, train), None) is None:
            found.append(layout)
    return sorted(found, key=distance)[:3]
