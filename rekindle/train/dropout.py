"""Masks of dropout.

On a CPU torch draws 64 random bits for each element, longer than attention computes for a
short text (12 of 130 ms of a step); 16 bits keep a share that is right to 1 in 65,536. A
GPU and torch.compile keep torch's own masks."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

_VALUES = 1 << 16


def kept(
    shape: Sequence[int],
    dropout: float,
    device: torch.device,
    dtype: torch.dtype,
    part: slice = slice(None),
) -> torch.Tensor:
    """0 or 1 / (1 - dropout) for each element, from the default generator of the device;
    of `part` of the first dimension alone, so that ranks which share a draw hold their
    own only."""
    draw = _drawn_on_cpu if device.type == "cpu" else _drawn
    return draw(shape, dropout, device)[part].to(dtype).mul_(1 / (1 - dropout))


def _drawn(shape: Sequence[int], dropout: float, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - dropout)


def _drawn_on_cpu(shape: Sequence[int], dropout: float, _: torch.device) -> torch.Tensor:
    count = math.prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    below = min(round((1 - dropout) * _VALUES), _VALUES - 1) - _VALUES // 2
    return words.view(torch.int16)[:count].view(*shape) < below


def install(network: nn.Module) -> None:
    """Have the network's `nn.Dropout`s draw their masks here while they run on a CPU."""
    for module in network.modules():
        if type(module) is nn.Dropout and 0 < module.p < 1:
            module.forward = functools.partial(_dropped, module)  # type: ignore[method-assign]


def _dropped(module: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
    if not module.training or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, module.p, module.training, module.inplace)
    return x * kept(x.shape, module.p, x.device, x.dtype)
