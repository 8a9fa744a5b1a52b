"""From a network on the meta device to the parts that this rank trains.

Order: cut into stages (pp), divide matrices (tp), recompute activations, compile, shard (FSDP2) or
replicate (DDP), fill with starting values. Whatever a layout needs and the architecture does not
offer is refused by name; nothing runs unsharded by accident."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rekindle.errors import UnsupportedError
from rekindle.spec.layout import Layout
from rekindle.spec.model import TrainSpec
from rekindle.tasks.base import Task
from rekindle.train import attention, families, weights
from rekindle.train.adapters import Adapters
from rekindle.train.families import Family, Origin, Skip
from rekindle.train.mesh import Mesh
from rekindle.train.objective import Goal, Part

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One piece of the pipeline on this rank: `index` of `count`. `part` is the bare module,
    `module` what runs: itself (sharded in place) or DDP around it."""

    index: int
    count: int
    part: Part
    module: nn.Module


@dataclasses.dataclass(frozen=True)
class Parts:
    """What this rank trains, by parameter name in the whole network.

    `partial`: parameters whose gradients tp ranks have to add up. `tied`: parameters that are
    another one, which stages far apart hold a copy each of. `origins`: where a parameter's starting
    value lies. `adapters`: what LoRA added."""

    stages: tuple[Stage, ...]
    mesh: Mesh
    partial: frozenset[str]
    tied: Mapping[str, str]
    origins: Mapping[str, Origin]
    adapters: Adapters | None = None

    @property
    def network(self) -> nn.Module:
        """The network, or this rank's first piece of it: for its configuration."""
        return self.stages[0].part.network

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name in the whole network and parameter, the copies of tied ones included."""
        for stage in self.stages:
            yield from stage.part.network.named_parameters()


def stages_of(layout: Layout, pp_rank: int) -> list[int]:
    """Which pieces a pipeline rank runs: one, or two, in a loop (interleaved) or in a V."""
    if layout.stages == layout.pp:
        return [pp_rank]
    if layout.schedule == "interleaved":
        return [pp_rank, pp_rank + layout.pp]
    return [pp_rank, 2 * layout.pp - 1 - pp_rank]


def build(
    task: Task, network: nn.Module, origins: Mapping[str, Origin], train: TrainSpec, goal: Goal,
    mesh: Mesh, adapters: Adapters | None = None,
) -> Parts:  # fmt: skip
    """The parts of this rank, on its device, without values yet (see weights.fill); `network` is
    cut up and must not be used any more."""
    layout = mesh.layout
    network.train()
    sequence = layout.tp > 1 and task.objective == "tokens" and bool(_family(network).sequence)
    stages = []
    for index in stages_of(layout, mesh.place("pp")):
        piece = _piece(network, index, layout) if layout.pp > 1 else network
        first, last = index == 0, index == layout.stages - 1
        if layout.tp > 1:
            _divide(piece, task, mesh, sequence)
        if hasattr(piece, "config") and families.family_of(piece) is not None:
            peers = attention.Peers(mesh.place("tp"), mesh.place("cp"), mesh.group("cp"))
            attention.install(piece, peers)
        _recompute_and_compile(piece, train)
        part = Part(task, piece, goal, first, last, mesh.group("tp"), sequence_parallel=sequence)
        stages.append(Stage(index, layout.stages, part, _distribute(part, train, mesh)))
    for stage in stages:
        weights.transform(stage.part, functools.partial(_on_device, device=mesh.device))
    partial = _partial(network, sequence) if layout.tp > 1 else frozenset()
    tied = families.tied(network)
    origins = dict(origins) | {name: Origin(source) for name, source in tied.items()}
    return Parts(tuple(stages), mesh, partial, tied, origins, adapters)


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


# Pipeline


def _piece(network: nn.Module, index: int, layout: Layout) -> nn.Module:
    """A copy of the network in which only stage `index` of its blocks is left."""
    all_blocks = [name for name, _ in families.blocks(network)]
    if len(all_blocks) < layout.stages:
        raise UnsupportedError(
            f"{families.model_type(network)} has {len(all_blocks)} blocks and cannot be cut into "
            f"{layout.stages} stages",
            where="train.layout.pp",
            fix="use fewer stages, or a layout without pp",
        )
    mine = set(np.array_split(np.array(all_blocks), layout.stages)[index].tolist())
    first, last = index == 0, index == layout.stages - 1
    piece = copy.deepcopy(network)
    if isinstance(piece, nn.Sequential):
        owner = -1
        owners = {}
        starts = {part[0]: i for i, part in enumerate(
            np.array_split(np.array(all_blocks), layout.stages)
        )}  # fmt: skip
        for name, _ in piece.named_children():
            owner = starts.get(name, owner)
            owners[name] = max(owner, 0)
        for name, stage in owners.items():
            if stage != index:
                families.replace(piece, name, Skip())
        return piece
    family = families.require_family(network, "pipeline")
    for name in all_blocks:
        if name not in mine:
            families.replace(piece, name, Skip())
    body = families.backbone(piece)
    for name, stand_in in families.stand_ins(family, first, last):
        if getattr(body, name, None) is not None:
            families.replace(body, name, stand_in)
    if not last:
        for name, child in list(piece.named_children()):
            if child is not body:
                families.replace(piece, name, Skip())
    return piece


# Tensor parallelism


def _family(network: nn.Module) -> Family:
    return families.require_family(network, "tensor-parallel")


def _divide(piece: nn.Module, task: Task, mesh: Mesh, sequence: bool) -> None:
    """Divide the matrices of each block, and for language models the vocabulary, over tp ranks."""
    family = _family(piece)
    stream = Shard(1) if sequence else Replicate()
    tokens = task.objective == "tokens"
    plan: dict[str, ParallelStyle] = {}
    for name, block in families.blocks(piece):
        if isinstance(block, Skip):
            continue
        prefix = f"{name}." if family.blocks else ""
        for column in family.column:
            plan |= _styled(block if family.blocks else piece, prefix, column, ColwiseParallel())
        for row in family.row:
            style = RowwiseParallel(output_layouts=stream)
            plan |= _styled(block if family.blocks else piece, prefix, row, style)
        if sequence:
            plan |= _gathering(prefix, any("lora_" in n for n, _ in block.named_modules()))
    body = families.backbone(piece)
    table = getattr(body, family.table, None) if family.table and tokens else None
    tied = families.tied(piece)
    if isinstance(table, nn.Embedding):
        path = next(n for n, m in piece.named_modules() if m is table)
        plan[path] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    head = piece.get_output_embeddings() if tokens else None  # type: ignore[operator]
    if isinstance(head, nn.Linear):
        plan[next(n for n, m in piece.named_modules() if m is head)] = ColwiseParallel()
    parallelize_module(piece, mesh.tensor, plan)
    if tied and isinstance(table, nn.Embedding) and isinstance(head, nn.Linear):
        head.weight = table.weight
    for module in piece.modules():  # GPT-2 splits what its fused projection returns
        if hasattr(module, "split_size"):
            module.split_size = int(module.split_size) // mesh.layout.tp
    if sequence and not isinstance(getattr(body, family.last[0]), Skip):
        getattr(body, family.last[0]).register_forward_hook(
            functools.partial(_gather_sequence, mesh=mesh)
        )


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
    whole = {"use_local_output": adapters}
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


def _partial(network: nn.Module, sequence: bool) -> frozenset[str]:
    """Parameters that every tp rank holds whole but uses on its own heads or tokens only."""
    family = _family(network)
    names = family.per_head + (family.sequence if sequence else ())
    body = next(n for n, m in network.named_modules() if m is families.backbone(network))
    found = {f"{block}.{name}" for block, _ in families.blocks(network) for name in names}
    if sequence:
        found |= {f"{body}.{name}" for name in family.last}
    return frozenset(
        name for name, _ in network.named_parameters() if name.rpartition(".")[0] in found
    )


# Activations and compilation

_SAVED = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention",
          "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu",
          "_scaled_dot_product_cudnn_attention", "convolution")  # fmt: skip


def _recompute_and_compile(piece: nn.Module, train: TrainSpec) -> None:
    blocks = [block for _, block in families.blocks(piece) if not isinstance(block, Skip)]
    if not blocks and (train.compile or train.activation_checkpointing != "none"):
        raise UnsupportedError(
            f"{families.model_type(piece)} has no blocks to compile or to compute again",
            where="train",
            fix="unset train.compile and train.activation_checkpointing, or give the network "
            "`_no_split_modules`",
        )
    for block in blocks:
        if train.activation_checkpointing != "none":
            context = _selective if train.activation_checkpointing == "selective" else None
            block.forward = functools.partial(_again, block.forward, context)
        if train.compile:
            block.forward = torch.compile(block.forward, dynamic=True)


def _again(forward: Callable[..., Any], context: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    more = {"context_fn": context} if context else {}
    return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)


def _selective() -> Any:
    """Keep the results of matrix products and attention, compute the rest again (Korthikanti et al.
    2022, arXiv 2205.05198)."""
    saved = {getattr(torch.ops.aten, n).default for n in _SAVED if hasattr(torch.ops.aten, n)}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# Replicas and shards


def _distribute(part: Part, train: TrainSpec, mesh: Mesh) -> nn.Module:
    """Shard `part` in place where the layout has more than replicas; DDP comes later, with
    values (see `replicate`)."""
    layout = mesh.layout
    if layout.dp * layout.shard * layout.cp == 1 or layout.only_replicates:
        return part
    cast = DTYPES.get(train.precision) if train.precision in ("bf16", "fp16") else None
    policy = MixedPrecisionPolicy(
        param_dtype=cast, reduce_dtype=torch.float32 if cast else None, cast_forward_inputs=False
    )
    keep = layout.pp > 1 or layout.shard * layout.cp == 1
    shard: Any = functools.partial(
        fully_shard, mesh=mesh.weights, mp_policy=policy, reshard_after_forward=not keep
    )
    for _, block in families.blocks(part.network):
        if not isinstance(block, Skip):
            shard(block)
    shard(part)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return part


def settle(parts: Parts) -> Parts:
    """Ready to train, once the parameters have values: DDP around the one part where every rank
    holds the whole model; FSDP with its final, padded storage, which the optimizer has to share."""
    layout = parts.mesh.layout
    for stage in parts.stages:
        if isinstance(stage.module, FSDPModule):
            fully_shard.state(stage.module)._lazy_init()  # type: ignore[attr-defined]
    if not layout.only_replicates or layout.world == 1:
        return parts
    (stage,) = parts.stages
    wrapped = DistributedDataParallel(
        stage.part, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    wrapped.register_comm_hook(None, _sum)
    return dataclasses.replace(parts, stages=(dataclasses.replace(stage, module=wrapped),))


# without annotations: DDP compares them with the class itself, and ours are strings
def _sum(state, bucket):  # type: ignore[no-untyped-def]
    """Gradients add up: each rank's loss is its share of the mean over the global batch."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
