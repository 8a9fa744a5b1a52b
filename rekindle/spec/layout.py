"""Degrees of parallelism as arithmetic: what divides what, and the nearest layouts that
fit.

No torch: a config is checked on a laptop. Ranks are numbered with `tp` fastest, then
`cp`, `shard`, `dp`, and `pp` slowest, so that the chattiest axis stays inside a node. dp
x shard ranks divide the batch; tp and cp ranks see the same examples; pp ranks hold
different blocks."""

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
        if self.pp == 1:
            return 1
        return self.pp if self.schedule == "1f1b" else 2 * self.pp

    @property
    def only_replicates(self) -> bool:
        """Whether every rank holds the whole model (DDP, or one process)."""
        return self.dp == self.world

    def divided_by(self) -> dict[str, int]:
        """The degrees above 1, by axis."""
        degrees = {axis: int(getattr(self, axis)) for axis in AXES}
        return {axis: degree for axis, degree in degrees.items() if degree > 1}

    def __str__(self) -> str:
        degrees = [f"{axis} {degree}" for axis, degree in self.divided_by().items()]
        text = " x ".join(degrees) or "one rank"
        return f"{text}, {self.schedule}" if self.pp > 1 else text


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
        numbers = config_of(config)
        heads = int(numbers.get("num_attention_heads", 0))
        return cls(
            model_type=str(config.get("model_type", "")),
            layers=int(numbers.get("num_hidden_layers", 0)),
            heads=heads,
            kv_heads=int(numbers.get("num_key_value_heads", heads)),
        )


def resolve(train: TrainSpec, world: int, shape: Shape | None = None) -> Layout:
    """The layout of `world` ranks that the spec asks for; RequestError names the nearest
    legal ones. `resolve(TrainSpec(layout={"tp": 2}), world=4)` has dp 2, tp 2."""
    spec = LayoutSpec() if train.layout == "auto" else train.layout
    ranks_of_replica = spec.shard * spec.tp * spec.pp * spec.cp
    dp = spec.dp or max(1, world // ranks_of_replica)
    layout = Layout(dp, spec.shard, spec.tp, spec.pp, spec.cp, spec.schedule)
    problem = next(problems_of(layout, world, shape, train), None)
    if problem is not None:
        nearest = [_as_yaml(near) for near in _nearest(layout, world, shape, train)]
        fixes = [problem.fix] if problem.fix else []
        if nearest:
            fixes.append(f"on {world} ranks, use {' or '.join(nearest)}")
        raise RequestError([dataclasses.replace(problem, fix="; ".join(fixes))])
    return dataclasses.replace(layout, micro_batch_size=_micro_batch(train, layout))


def _as_yaml(layout: Layout) -> str:
    """The layout as a config has it."""
    degrees = [f"{axis}: {degree}" for axis, degree in layout.divided_by().items()]
    if not degrees:
        return "auto"
    return "{" + ", ".join(degrees) + "}"


def problems_of(
    layout: Layout, world: int, shape: Shape | None, train: TrainSpec
) -> Iterator[Problem]:
    """Why `world` ranks cannot train in that layout."""
    if layout.world != world:
        message = f"the layout {layout} needs {layout.world} ranks and there are {world}"
        yield Problem(message, "train.layout")
    yield from whole(layout, train.optimizer)
    if shape is not None:
        yield from _indivisible(layout, shape)
    if layout.pp > 1:
        yield from _starved_pipeline(layout, train)


def _indivisible(layout: Layout, shape: Shape) -> Iterator[Problem]:
    """What of the model the layout does not divide."""
    tp = layout.tp
    if tp > 1 and shape.heads and (shape.heads % tp or shape.kv_heads % tp):
        message = f"tp {tp} does not divide {shape.heads} heads"
        if shape.kv_heads != shape.heads:
            message += f" and {shape.kv_heads} key-value heads"
        yield Problem(message, "train.layout.tp")
    if tp * layout.pp > 1 and shape.model_type not in DIVISIBLE:
        message = f"{shape.model_type} cannot be divided, as {', '.join(DIVISIBLE)} can"
        yield Problem(message, "train.layout")
    if layout.pp > 1 and shape.layers and shape.layers < layout.stages:
        message = f"{shape.layers} blocks cannot fill {layout.stages} stages ({layout.schedule})"
        yield Problem(message, "train.layout.pp")


def whole(layout: Layout | LayoutSpec, optimizer: str) -> Iterator[Problem]:
    """Axes that divide what the optimizer needs in one piece."""
    axes = DIVIDED[optimizer]
    for axis in axes:
        degree = getattr(layout, axis)
        if degree > 1:
            message = f"{optimizer} needs {_NEEDS[optimizer]}, and {axis} {degree} divides them"
            other_axes = " and ".join(other for other in AXES if other not in axes)
            fix = f"use {other_axes} only, or train.optimizer: adamw"
            yield Problem(message, f"train.layout.{axis}", fix)


def undivided(layout: Layout | LayoutSpec, lora: LoraSpec | None) -> Iterator[Problem]:
    """Axes that divide a base in 4 bits."""
    if lora is None or lora.base != "4bit":
        return
    for axis in AXES[1:]:
        degree = getattr(layout, axis)
        if degree > 1:
            message = f"a base in 4 bits is whole on each rank, and {axis} {degree} divides it"
            fix = "use dp only, or model.lora.base: full"
            yield Problem(message, f"train.layout.{axis}", fix)


def _starved_pipeline(layout: Layout, train: TrainSpec) -> Iterator[Problem]:
    """Micro-batches of a data rank that do not fill the ranks of its pipeline:
    interleaved schedules go round by round."""
    size = _micro_batch(train, layout)
    count = -(-(train.global_batch_size // size) // layout.data)
    if layout.schedule == "1f1b":
        is_enough = count >= layout.pp
        need = f"at least {layout.pp}"
    else:
        is_enough = count >= layout.pp and count % layout.pp == 0
        need = f"a multiple of {layout.pp}"
    if not is_enough:
        message = f"{count} micro-batches of {size} a data rank cannot feed {layout.pp} stages "
        message += f"({layout.schedule} needs {need})"
        fix = f"set train.global_batch_size to a multiple of {layout.pp * layout.data}"
        yield Problem(message, "train.micro_batch_size", f"{fix}, or a smaller micro_batch_size")


def _micro_batch(train: TrainSpec, layout: Layout) -> int:
    """`auto`: the largest divisor of the global batch up to 32 that gives every rank work."""
    if train.micro_batch_size != "auto":
        return train.micro_batch_size
    size = train.global_batch_size
    parts = layout.pp * layout.data if layout.pp > 1 else 1
    largest = min(max(1, size // parts), LARGEST_AUTO_MICRO_BATCH)
    divisors = [divisor for divisor in range(largest, 0, -1) if size % divisor == 0]
    even = [divisor for divisor in divisors if (size // divisor) % parts == 0]
    return even[0] if even else divisors[0]


def uneven(train: TrainSpec, layout: Layout) -> str:
    """What to say where a global batch has too few divisors for micro-batches that fill a
    device: 61 examples on one rank are 61 micro-batches; or ""."""
    total = train.global_batch_size
    fitting = min(LARGEST_AUTO_MICRO_BATCH, -(-total // (layout.data * layout.pp)))
    largest = max(size for size in range(1, fitting + 1) if total % size == 0)
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
        changes = [(getattr(layout, axis), getattr(wanted, axis)) for axis in AXES]
        moved = [new for new, old in changes[1:] if new != old]  # dp takes what is left over
        factor = sum(max(new / old, old / new) for new, old in changes)
        return len(moved), factor, tuple(-new for new, _ in changes)

    divisors = [divisor for divisor in range(1, world + 1) if world % divisor == 0]
    used_axes = [axis for axis in AXES[1:] if getattr(wanted, axis) > 1]
    legal = []
    for degrees in itertools.product(divisors, repeat=len(used_axes)):
        dp, remainder = divmod(world, math.prod(degrees))
        if remainder:
            continue
        by_axis = dict(zip(used_axes, degrees, strict=True))
        layout = Layout(dp=dp, schedule=wanted.schedule, **by_axis)
        if next(problems_of(layout, world, shape, train), None) is None:
            legal.append(layout)
    return sorted(legal, key=distance)[:3]
