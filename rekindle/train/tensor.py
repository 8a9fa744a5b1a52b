"""Tensor parallelism: which matrices of a block are divided how (Shoeybi et al. 2019, arXiv
1909.08053), and where the architecture allows it the residual stream between them along the
sequence (Korthikanti et al. 2022, arXiv 2205.05198). For language models the vocabulary is divided,
too."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from rekindle.errors import UnsupportedError
from rekindle.train import families
from rekindle.train.families import Family, Skip
from rekindle.train.mesh import Mesh

Styles = dict[str, ParallelStyle]


def along_sequence(network: nn.Module, tokens: bool) -> bool:
    """Whether tp ranks divide the residual stream along the sequence, too."""
    return tokens and bool(_family(network).sequence)


def _divide_layers(network: nn.Sequential, whole: nn.Module, mesh: Mesh) -> None:
    """A network of layers, such as the CNN: linear layers but the last are divided by outputs,
    which are gathered, so that what lies between (dropout) sees the whole."""
    layers = [name for name, layer in whole.named_modules() if isinstance(layer, nn.Linear)][:-1]
    if not layers:
        raise UnsupportedError(
            f"there is no matrix to divide in {families.model_type(network)}",
            where="train.layout.tp",
            fix="use dp, or shard",
        )
    here = [name for name in layers if isinstance(network.get_submodule(name), nn.Linear)]
    parallelize_module(
        network, mesh.tensor, {name: ColwiseParallel(output_layouts=Replicate()) for name in here}
    )


def divide(network: nn.Module, whole: nn.Module, mesh: Mesh, tokens: bool) -> None:
    """Divide the matrices of each block, and the vocabulary of a language model, in place;
    `network` is `whole`, or a stage of it."""
    if isinstance(network, nn.Sequential):
        _divide_layers(network, whole, mesh)
        return
    family, sequence = _family(network), along_sequence(network, tokens)
    stream = Shard(1) if sequence else Replicate()
    plan: Styles = {}
    for name, block in families.blocks(network):
        if not isinstance(block, Skip):
            plan |= _block(family, name, block, stream, sequence)
    table, head = (_vocabulary(network, family)) if tokens else (None, None)
    if table is not None:
        plan[_path(network, table)] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=stream
        )
    if head is not None:
        plan[_path(network, head)] = ColwiseParallel()
    parallelize_module(network, mesh.tensor, plan)
    if table is not None and head is not None and families.tied(network):
        head.weight = table.weight
    for module in network.modules():  # GPT-2 splits what its fused projection returns
        if hasattr(module, "split_size"):
            divided: Any = module
            divided.split_size //= mesh.layout.tp
    norm = getattr(families.backbone(network), family.last[0], None) if sequence else None
    if norm is not None and not isinstance(norm, Skip):
        norm.register_forward_hook(functools.partial(_gather_sequence, mesh=mesh))


def shared_by_share(network: nn.Module, tokens: bool) -> frozenset[str]:
    """Parameters that every tp rank holds whole but uses on its own heads or tokens only, so that
    each has a share of the gradient."""
    if isinstance(network, nn.Sequential):
        return frozenset()
    family, sequence = _family(network), along_sequence(network, tokens)
    names = family.per_head
    if sequence:  # what follows a row-divided matrix sees this rank's tokens only
        names += (*family.sequence, *(f"{row}.lora_B.default" for row in family.row))
    found = {f"{block}.{name}" for block, _ in families.blocks(network) for name in names}
    if sequence:
        body = _path(network, families.backbone(network))
        found |= {f"{body}.{name}" for name in family.last}
    return frozenset(n for n, _ in network.named_parameters() if n.rpartition(".")[0] in found)


def _family(network: nn.Module) -> Family:
    return families.require_family(network, "tensor-parallel")


def _path(network: nn.Module, module: nn.Module) -> str:
    return str(next(name for name, found in network.named_modules() if found is module))


def _vocabulary(network: nn.Module, family: Family) -> tuple[nn.Embedding | None, nn.Linear | None]:
    """Token embedding and output layer, as far as this stage has them."""
    table = getattr(families.backbone(network), family.table, None)
    model: Any = network
    head = model.get_output_embeddings()
    return (
        table if isinstance(table, nn.Embedding) else None,
        head if isinstance(head, nn.Linear) else None,
    )


def _block(family: Family, name: str, block: nn.Module, stream: Any, sequence: bool) -> Styles:
    plan: Styles = {}
    for column in family.column:
        plan |= _styled(block, f"{name}.", column, ColwiseParallel())
    for row in family.row:
        plan |= _styled(block, f"{name}.", row, RowwiseParallel(output_layouts=stream))
    if sequence:
        plan |= _gathering(f"{name}.", any("lora_" in n for n, _ in block.named_modules()))
    return plan


def _styled(
    block: nn.Module, prefix: str, name: str, style: ParallelStyle
) -> dict[str, ParallelStyle]:
    """The style of a matrix; with adapters, that of its base and of the adapter on its divided
    side."""
    module = block.get_submodule(name)
    if not hasattr(module, "base_layer"):
        return {prefix + name: style}
    side = "lora_B" if isinstance(style, ColwiseParallel) else "lora_A"
    return {f"{prefix}{name}.base_layer": style, f"{prefix}{name}.{side}.default": copy.copy(style)}


def _gathering(prefix: str, adapters: bool) -> dict[str, ParallelStyle]:
    """Gather the sequence where attention and MLP begin; as DTensors, so that one reduce-scatter
    instead of an all-reduce a matrix brings the gradients back."""
    whole: dict[str, Any] = {"use_local_output": adapters}
    return {
        f"{prefix}self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()}, **whole,
        ),
        f"{prefix}mlp": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), **whole
        ),
    }  # fmt: skip


def _gather_sequence(module: nn.Module, args: Any, local: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """[B, T / tp, H] to [B, T, H]; what comes back is each rank's share of the gradient."""
    whole = DTensor.from_local(local, mesh.tensor, [Shard(1)]).redistribute(
        placements=[Replicate()]
    )
    return whole.to_local(grad_placements=[Partial()])
