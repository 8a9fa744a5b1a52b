"""What an engine is: `Engine`, what can be known of it without its package."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from rekindle.spec.model import Spec, TrainSpec

AUTO = "auto"
"""A setting with this value is left to rekindle, as in transformers' ds_config.json."""
CONFIG = ("train", "engine_config")
"""The path of an engine's own settings in the spec."""
Finding = tuple[tuple[str, ...], str, str]
"""A path in the spec, what is wrong there, and the fix."""
EngineConfig: TypeAlias = dict[str, Any]
"""A whole config in an engine's own language, as JSON has it."""


@dataclasses.dataclass(frozen=True)
class Fragment:
    """What a rank holds of a tensor that is flattened and cut without regard to its shape."""

    local: torch.Tensor
    """[n] neighbouring elements of the flattened tensor."""
    start: int
    """The index in the flattened tensor of the first of them."""
    count: int
    """How many elements the flattened tensor has."""


class Engine(Protocol):
    """What is known of an engine before a rank starts. It is a *stepper*, which makes the
    updates inside rekindle's loop (deepspeed.py), or a *program*, which has a loop of its
    own."""

    package: str
    """The module that has to be importable, from the extra of the engine's name."""

    aside: tuple[str, ...] = ()
    """Sections of `train.engine_config` that do not enter the run key: they say where
    numbers lie, not what they are, so a training resumes with other values of them."""

    program: str = ""
    """The module that torchrun starts on a rank: `python -m MODULE JOB.json`; "" for a stepper."""

    def refuse(self, spec: Spec) -> Iterator[Finding]:
        """A finding for what the config asks for and the engine does not do, and for a
        setting of the engine that contradicts a field of rekindle's."""

    def programs(self, train: TrainSpec) -> tuple[str, ...]:
        """The programs that a rank needs on PATH."""
        return ()

    def config(self, train: TrainSpec, world: int) -> EngineConfig:
        """`train.engine_config` with what rekindle decides filled in, in the engine's language."""


def by_decay(weights: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Groups of AdamW: matrices decay, one-dimensional parameters (biases, norms) do not."""
    matrices = [weight for weight in weights if weight.ndim > 1]
    vectors = [weight for weight in weights if weight.ndim <= 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def untaken(engine: str, train: TrainSpec, fields: Mapping[str, object]) -> Iterator[Finding]:
    """A finding for each of `fields` (path below `train`, and the value that the engine
    can do) with another value, and for a precision that only rekindle's engine has."""
    if train.precision in ("fp16", "fp8", "fp64"):
        message = f"the engine {engine} does not train in {train.precision}"
        yield ("train", "precision"), message, "bf16 or fp32"
    for field, possible_value in fields.items():
        if operator.attrgetter(field)(train) != possible_value:
            message = f"the engine {engine} does not take train.{field}"
            yield ("train", *field.split(".")), message, "remove it, or use rekindle's engine"


def contradictions(
    settings: Mapping[str, object],
    owned: Mapping[tuple[str, ...], tuple[str, object]],
    train: TrainSpec,
) -> Iterator[Finding]:
    """A finding for each setting of an engine's config that contradicts rekindle's fields.

    `owned` has, by the path of a setting, the field of `train` that decides it ("" where
    the loop does) and the value that follows from it."""
    for path, (field, value) in owned.items():
        setting = at(settings, *path)
        if setting not in (None, AUTO, value):
            reason = "rekindle decides it"
            if field:
                reason = f"train.{field} is {getattr(train, field)}"
            message = f"`{path[-1]}` is {setting} here, and {reason}"
            yield (*CONFIG, *path), message, 'write "auto", or remove it'


def at(settings: object, *path: str) -> Any:
    """The value at a path in nested settings; None where there is none."""
    value = settings
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
