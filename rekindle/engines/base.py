"""What an engine is: `Engine`, what can be known of it without its package."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from rekindle.spec.model import Spec, TrainSpec

AUTO = "auto"
CONFIG = ("train", "engine_config")
# key path below the spec, what is wrong, the fix
Finding = tuple[tuple[str, ...], str, str]


@dataclasses.dataclass(frozen=True)
class Fragment:
    """What a rank holds of a tensor that is divided without regard to its shape."""

    local: torch.Tensor
    """[n] elements of the flattened whole."""
    start: int
    """The first of them."""
    count: int
    """Elements of the whole."""


class Engine(Protocol):
    """What is known of an engine before a rank starts. It is a *stepper*, which makes the
    updates inside rekindle's loop (deepspeed.py), or a *program*, which has a loop of its
    own."""

    package: str
    """The module that has to be importable, from the extra of the engine's name."""

    aside: tuple[str, ...] = ()
    """Sections of `train.engine_config` that say where numbers lie, not what they are:
    with another value the same training goes on."""

    program: str = ""
    """The module that torchrun starts on a rank: `python -m MODULE JOB.json`; "" for a stepper."""

    def refuse(self, spec: Spec) -> Iterator[Finding]:
        """What the config asks for and the engine does not do, or says twice."""

    def programs(self, train: TrainSpec) -> tuple[str, ...]:
        """What has to be on PATH."""
        return ()

    def config(self, train: TrainSpec, world: int) -> dict[str, Any]:
        """`train.engine_config` with what rekindle decides filled in, in the engine's language."""


def by_decay(weights: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Groups of AdamW: matrices decay, one-dimensional parameters (biases, norms) do not."""
    matrices = [weight for weight in weights if weight.ndim > 1]
    vectors = [weight for weight in weights if weight.ndim <= 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def untaken(engine: str, train: TrainSpec, fields: Mapping[str, Any]) -> Iterator[Finding]:
    """Fields that an engine does not take, where they have another value than here, and
    precisions that none but rekindle's trains in."""
    if train.precision in ("fp16", "fp8", "fp64"):
        message = f"the engine {engine} does not train in {train.precision}"
        yield ("train", "precision"), message, "bf16 or fp32"
    for field, default in fields.items():
        if operator.attrgetter(field)(train) != default:
            message = f"the engine {engine} does not take train.{field}"
            yield ("train", *field.split(".")), message, "remove it, or use rekindle's engine"


def contradictions(
    settings: Mapping[str, Any], owned: Mapping[tuple[str, ...], tuple[str, Any]], train: TrainSpec
) -> Iterator[Finding]:
    """Settings of an engine's config that say otherwise than rekindle's fields.

    `owned`: by their place our field, "" where the loop decides it, and the value that
    follows."""
    for path, (field, value) in owned.items():
        setting = at(settings, *path)
        if setting not in (None, AUTO, value):
            reason = "rekindle decides it"
            if field:
                reason = f"train.{field} is {getattr(train, field)}"
            message = f"`{path[-1]}` is {setting} here, and {reason}"
            yield (*CONFIG, *path), message, 'write "auto", or remove it'


def at(values: Any, *path: str) -> Any:
    """What lies at a place in nested settings, or None."""
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
