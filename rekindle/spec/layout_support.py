"""Which combinations of layout, schedule, recomputation, compilation, precision and
adapters train.

layout_support.yaml lists those that are proven: tests/train/test_layouts.py compares each
with one process. A combination is composed where each pair of its features is in a proven
one of the same kind: it trains after two steps of a small network have been compared with
one rank's (train/compare.py), or as `train.untested` says. Every other one is refused.
`docs/layouts.md` shows all three. A GPU adds no cell here until a test has run there."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from rekindle.errors import UnsupportedError
from rekindle.spec.layout import AXES, Layout, Schedule
from rekindle.spec.model import TrainSpec
from rekindle.spec.tasks import BUILT_IN_TASKS, LayoutKind
from rekindle.tables import rows

Kind = LayoutKind
KINDS: tuple[Kind, ...] = ("image", "text", "tokens")  # of a row that names none
KIND_OF: Mapping[str, Kind] = {name: task.layout for name, task in BUILT_IN_TASKS.items()}
"""By task; a user's own task is theirs to test."""

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Axes = tuple[str, ...]
Level = Literal["proven", "composed", "refused"]
Untested = Literal["check", "refuse", "allow"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination. `axes` are those of more than one rank, in the order of `AXES`."""

    kind: Kind
    axes: Axes = ()
    schedule: str = ""
    checkpointing: str = "none"
    compile: bool = False
    precision: str = "fp32"
    lora: bool = False

    def __str__(self) -> str:
        parts = [" x ".join(self.axes) or "one rank", self.schedule, self.precision]
        if self.checkpointing != "none":
            parts.append(f"{self.checkpointing} recomputation")
        if self.compile:
            parts.append("compiled")
        if self.lora:
            parts.append("LoRA")
        return f"{self.kind}: " + ", ".join(part for part in parts if part)


_USUAL: dict[str, tuple[Any, ...]] = {f.name: (f.default,) for f in dataclasses.fields(Cell)}
_USUAL |= {"kind": KINDS, "schedule": ("1f1b",)}


@functools.cache
def tested() -> Mapping[Cell, None]:
    """All cells, each once, simple ones first."""
    groups = rows(Path(__file__).with_suffix(".yaml"))
    return dict.fromkeys(itertools.chain.from_iterable(map(_cells, groups)))


def _cells(row: Mapping[str, Any]) -> Iterator[Cell]:
    """Those of the product that mean something; some come twice."""
    written = row["axes"]
    axes: list[Axes] = []
    if isinstance(written, str):
        most = int(written.removeprefix("up to "))
        for count in range(most + 1):
            axes += itertools.combinations(AXES, count)
    else:
        axes += [tuple(names.split()) for names in written]
    for values in itertools.product(*{**_USUAL, **row, "axes": axes}.values()):
        cell = Cell(*values)
        if "pp" not in cell.axes:
            cell = dataclasses.replace(cell, schedule="")
        if not impossible(cell):
            yield cell


def impossible(cell: Cell) -> str:
    """Why a cell has no meaning, or ""."""
    if "cp" in cell.axes and cell.kind != "tokens":
        return "context parallelism divides sequences of tokens to predict"
    if cell.lora and cell.kind == "image":
        return "there are no adapters for this network"
    if cell.schedule == "zero_bubble" and cell.checkpointing != "none":
        return "zero bubble computes the backward pass in two halves, recomputation in one"
    if cell.schedule == "zero_bubble" and cell.compile:
        return "torch refuses zero bubble with compiled blocks"
    return ""


def cell_of(kind: Kind, layout: Layout, train: TrainSpec, lora: bool) -> Cell:
    """The cell of a run; fp64 is fp32's."""
    axes = tuple(axis for axis in AXES if getattr(layout, axis) > 1)
    return Cell(
        kind=kind,
        axes=axes,
        schedule=layout.schedule if "pp" in axes else "",
        checkpointing=train.activation_checkpointing,
        compile=train.compile,
        precision="fp32" if train.precision == "fp64" else train.precision,
        lora=lora,
    )


@functools.cache
def level(cell: Cell) -> Level:
    """`proven`: a test compares it with one process. `composed`: no test has the whole of
    it, but tests have each pair of its features. `refused`: neither."""
    if impossible(cell):
        return "refused"
    if cell in tested():
        return "proven"
    return "refused" if _missing(cell) else "composed"


def require(cell: Cell, untested: Untested = "check") -> Level:
    """The level of a cell that trains; raises UnsupportedError, with the nearest proven
    ones, for a refused one, and for a composed one where `train.untested` says so."""
    reason = refusal(cell, untested)
    if not reason:
        return level(cell)

    def distance(other: Cell) -> int:
        fields = ("schedule", "checkpointing", "compile", "precision", "lora")
        differing = [name for name in fields if getattr(cell, name) != getattr(other, name)]
        return len(differing) + len(set(cell.axes) ^ set(other.axes))

    of_kind = [other for other in tested() if other.kind == cell.kind]
    nearest = [str(other).partition(": ")[2] for other in sorted(of_kind, key=distance)[:3]]
    fix = f"use {'; or '.join(nearest)}"
    if level(cell) != "refused":
        fix += "; or train.untested: check"
    raise UnsupportedError(f"{cell} is refused: {reason}", where="train", fix=fix)


def refusal(cell: Cell, untested: Untested = "check") -> str:
    """Why a cell does not train, or ""."""
    if level(cell) == "composed" and untested == "refuse":
        return "no test has trained all of it, and train.untested is `refuse`"
    if level(cell) != "refused":
        return ""
    if reason := impossible(cell):
        return reason
    first, second = _missing(cell)[0]
    if first == second:
        return f"no test has trained {first} here"
    return f"no test has trained {first} with {second}"


def _features(cell: Cell) -> tuple[str, ...]:
    """What may get in each other's way; the schedule is the pipeline's."""
    features = []
    for axis in cell.axes:
        features.append(f"pp ({cell.schedule})" if axis == "pp" else axis)
    features.append(cell.precision)
    if cell.checkpointing != "none":
        features.append(f"{cell.checkpointing} recomputation")
    if cell.compile:
        features.append("compiled blocks")
    if cell.lora:
        features.append("LoRA")
    return tuple(features)


def _missing(cell: Cell) -> list[tuple[str, str]]:
    """Pairs of features (a feature alone is one) that no proven cell of that kind has."""
    features = _features(cell)
    pairs = [*zip(features, features, strict=True), *itertools.combinations(features, 2)]
    return [pair for pair in pairs if pair not in _pairs(cell.kind)]


@functools.cache
def _pairs(kind: Kind) -> frozenset[tuple[str, str]]:
    pairs = set[tuple[str, str]]()
    for cell in tested():
        if cell.kind == kind:
            features = _features(cell)
            pairs.update(itertools.product(features, features))
    return frozenset(pairs)
