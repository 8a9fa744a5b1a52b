"""Cutting a network into pipeline stages.

Each is a copy of the whole in which the blocks of others are stand-ins, so that the architecture's
own forward runs and every parameter keeps its name."""

from __future__ import annotations

import copy

import numpy as np
from torch import nn

from rekindle.errors import UnsupportedError
from rekindle.spec.layout import Layout
from rekindle.train import modules
from rekindle.train.modules import Skip


def stages_of(layout: Layout, pp_rank: int) -> list[int]:
    """Which pieces a pipeline rank runs: one, or two, in a loop (interleaved) or in a V."""
    if layout.stages == layout.pp:
        return [pp_rank]
    if layout.schedule == "interleaved":
        return [pp_rank, pp_rank + layout.pp]
    return [pp_rank, 2 * layout.pp - 1 - pp_rank]


def piece(network: nn.Module, index: int, layout: Layout) -> nn.Module:
    """A copy of the network in which only stage `index` of its blocks is left; earlier stages get a
    block more where the number is odd, because the last has the head."""
    names = [name for name, _ in modules.blocks(network)]
    if len(names) < layout.stages:
        raise UnsupportedError(
            f"{modules.model_type(network)} has {len(names)} blocks and cannot be cut into "
            f"{layout.stages} stages",
            where="train.layout.pp",
            fix="use fewer stages, or a layout without pp",
        )
    parts = [part.tolist() for part in np.array_split(np.array(names), layout.stages)]
    made = copy.deepcopy(network)
    if isinstance(made, nn.Sequential):
        _cut_sequence(made, parts, index)
    else:
        _cut_transformer(made, set(names) - set(parts[index]), index, layout.stages)
    return made


def _cut_sequence(network: nn.Sequential, parts: list[list[str]], index: int) -> None:
    """Layers without weights stay with the block before them."""
    starts = {part[0]: stage for stage, part in enumerate(parts)}
    stage = 0
    for name, _ in list(network.named_children()):
        stage = starts.get(name, stage)
        if stage != index:
            modules.replace(network, name, Skip())


def _cut_transformer(network: nn.Module, others: set[str], index: int, count: int) -> None:
    known = modules.required(network, "pipeline")
    for name in others:
        modules.replace(network, name, Skip())
    body = modules.backbone(network)
    last = index == count - 1
    for name, stand_in in modules.stand_ins(known, index == 0, last):
        found = getattr(body, name, None)
        if isinstance(found, nn.Module):
            modules.replace(body, name, stand_in)
        elif isinstance(found, float | int):
            setattr(body, name, 0.0)
    heads = [name for name, child in network.named_children() if child is not body]
    for name in [] if last else heads:
        modules.replace(network, name, Skip())
