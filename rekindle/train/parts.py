"""What a rank trains: stages of a network, by parameter name in the whole of it, and the
types of numbers in which their forward passes compute. parallel.py makes them."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rekindle.engines.deepspeed_stepper import DeepSpeedStepper
from rekindle.train.attention import Kernel
from rekindle.train.mesh import Mesh
from rekindle.train.modules import Origin
from rekindle.train.part import Part

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What products are computed in, by `train.precision`; those of fp8 are outside of its layers."""
DTYPES = {**HALVES, "fp64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A piece of the network on this rank."""

    index: int
    """Which one, of `count`."""
    count: int
    part: Part
    module: nn.Module
    """What runs it: `part` itself, or DDP around it."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """What this rank trains, by parameter name in the whole network."""

    stages: tuple[Stage, ...]
    mesh: Mesh
    partial: frozenset[str]
    """Parameters whose gradients tp ranks have to add up."""
    tied: Mapping[str, str]
    """Parameters that are another one, of which stages far apart hold a copy each."""
    origins: Mapping[str, Origin]
    """Where starting values lie."""
    scaling: float | None = None
    """Of LoRA's updates; None without adapters."""
    attention: Kernel = "sdpa"
    """What keeps documents apart in training steps."""
    stepper: DeepSpeedStepper | None = None
    """The engine that makes the updates, if it is not rekindle's own."""

    @property
    def network(self) -> nn.Module:
        """The network, or this rank's first piece of it: for its configuration."""
        return self.stages[0].part.network

    @property
    def networks(self) -> list[nn.Module]:
        """This rank's pieces of the network, without the loss around them."""
        return [stage.part.network for stage in self.stages]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name in the whole network and parameter, the copies of tied ones included."""
        for stage in self.stages:
            yield from stage.part.network.named_parameters()

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are saved, by their name in the whole network."""
        for stage in self.stages:
            saved = stage.part.network.state_dict(keep_vars=True)
            for name, buffer in stage.part.network.named_buffers():
                if name in saved:
                    yield name, buffer


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What forward passes run in: half precision where that is the training's."""
    half = HALVES.get(precision)
    if half is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=half)
