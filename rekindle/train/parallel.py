"""From a network on the meta device to the parts that this rank trains.

Order: cut into stages (pp), divide matrices (tp), recompute activations, compile, shard
(FSDP2) or replicate (DDP), fill with starting values. Whatever a layout needs and the
architecture does not offer is refused by name."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from rekindle.errors import UnsupportedError
from rekindle.objectives import loss_of, scoring_of
from rekindle.objectives.loss import Goal
from rekindle.plan.inflight import stages_of
from rekindle.spec.model import LoraSpec, TrainSpec
from rekindle.tasks.base import Task
from rekindle.train import attention, dropout, kernels, modules, quantised, tensor, weights
from rekindle.train.attention import Kernel
from rekindle.train.mesh import Mesh
from rekindle.train.modules import Origin, Skip, cut
from rekindle.train.part import Part
from rekindle.train.parts import DTYPES, HALVES, Parts, Stage

# what selective checkpointing keeps: the products and attentions of each device
_SAVED = (
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention",
    "convolution",
    "_scaled_mm",
)
_VARLEN = "_varlen_attn"  # of torch_attn, once torch.nn.attention.varlen is imported


def prepare_network(
    network: nn.Module,
    source: weights.WeightSource | None,
    origins: dict[str, Origin],
    train: TrainSpec,
    lora: LoraSpec | None = None,
) -> float | None:
    """Put adapters on a network and convert its weights; returns the factor of LoRA's updates."""
    scaling = None
    if lora is not None:
        with weights.deferred(source.recorder if source else None):
            scaling = modules.inject(network, lora, origins)
        if source:
            source.include(network)
        if lora.base == "4bit":
            quantised.replace(network)
    dtype = DTYPES.get("fp64" if train.precision == "fp64" else train.weights)
    if dtype is not None:
        weights.convert(network, dtype)
    return scaling


def build(
    task: Task,
    network: nn.Module,
    origins: Mapping[str, Origin],
    train: TrainSpec,
    goal: Goal,
    mesh: Mesh,
    scaling: float | None = None,
    scores: bool = False,
) -> Parts:
    """The parts of this rank, on its device, without values yet (see weights.fill).

    `network` is cut up and must not be used any more. `scores`: whether it scores examples
    in place of learning."""
    layout = mesh.layout
    network.train()
    if train.precision == "fp8":
        quantised.convert(network, mesh.device)
    is_ours = train.engine == "rekindle"  # another engine divides parts that are filled
    is_divided = is_ours and layout.tp > 1
    has_tokens = task.kind.writes
    is_along_sequence = is_divided and tensor.along_sequence(network, has_tokens)
    kernel: Kernel = "sdpa"
    training_kernel = kernel
    if modules.known(network) is not None:
        computed_in = DTYPES.get(train.precision) or DTYPES.get(train.weights, torch.float32)
        kernel = kernels.kernel_for(network, mesh.device, computed_in)
        training_kernel = kernels.kernel_while_training(network, kernel)
    stages = []
    for index in stages_of(layout, mesh.place("pp")):
        piece = cut(network, index, layout) if layout.pp > 1 else network
        if is_divided:
            tensor.divide(piece, network, mesh, has_tokens)
        _split_fused_projections(piece, layout.tp)
        if hasattr(piece, "config") and modules.known(piece) is not None:
            _install_attention(piece, mesh, kernel)
        _recompute_and_compile(piece, train, constants=has_tokens)
        part = Part(
            loss_of(task.objective),
            task,
            piece,
            goal,
            first=index == 0,
            last=index == layout.stages - 1,
            tp_group=mesh.group("tp") if is_ours else None,
            sequence_parallel=is_along_sequence,
            scoring=scoring_of(task.objective) if scores else None,
        )
        module = _distribute(part, train, mesh) if is_ours else part
        stages.append(Stage(index, layout.stages, part, module))
    for stage in stages:
        put(stage.part, mesh.device)
    partial = tensor.shared_by_share(network, has_tokens) if is_divided else frozenset()
    tied = modules.tied(network)
    origins = dict(origins) | {name: Origin(source) for name, source in tied.items()}
    return Parts(tuple(stages), mesh, partial, tied, origins, scaling, training_kernel)


def _split_fused_projections(piece: nn.Module, tp: int) -> None:
    """GPT-2 splits what its fused projection returns by a size that it keeps."""
    if tp == 1:
        return
    for module in piece.modules():
        if hasattr(module, "split_size"):
            module.split_size //= tp  # type: ignore[operator,assignment]


def _install_attention(piece: nn.Module, mesh: Mesh, kernel: Kernel) -> None:
    layout = mesh.layout
    peers = attention.AttentionPeers(
        tp_rank=mesh.place("tp"),
        tp_size=layout.tp,
        cp_size=layout.cp,
        cp_group=mesh.group("cp"),
        kernel=kernel,
        groups=kernels.takes_groups(mesh.device),
    )
    attention.install(piece, peers)
    dropout.install(piece)


def put(network: nn.Module, device: torch.device) -> None:
    """On the device, without values where there were none."""
    weights.transform(
        network, lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device)
    )


def _recompute_and_compile(piece: nn.Module, train: TrainSpec, constants: bool) -> None:
    """Have the blocks of a piece compute their activations again, and compile them, as
    asked.

    `constants`: whether numbers may be compiled as constants. Texts with a class have
    many lengths, and those pass as numbers through an attention that is not compiled."""
    blocks = [block for _, block in modules.blocks(piece) if not isinstance(block, Skip)]
    if not blocks and (train.compile or train.activation_checkpointing != "none"):
        message = f"{modules.model_type(piece)} has no blocks to compile or to compute again"
        fix = "unset train.compile and train.activation_checkpointing, or give the network "
        raise UnsupportedError(message, where="train", fix=f"{fix}`_no_split_modules`")
    if train.compile:
        _set_up_compiler(constants)
    for block in blocks:
        if train.activation_checkpointing != "none":
            context = _selective if train.activation_checkpointing == "selective" else None
            block.forward = functools.partial(_again, block.forward, context)
        if train.compile:
            # packed sequences have one length; of others the second makes it a symbol
            block.forward = torch.compile(block.forward)


def _set_up_compiler(constants: bool) -> None:
    import torch._dynamo.config as dynamo

    # a module's numbers, such as FSDP's, as symbols take twice as long and give slower kernels
    dynamo.specialize_int = constants
    dynamo.specialize_float = True
    # DDP's hooks run between blocks; torch would cut large ones once more, at its buckets
    dynamo.optimize_ddp = False
    # the last block of a text classifier has hooks that others have not, and the same
    # code: unasked, it would run as the first block was compiled, without them
    dynamo.skip_nnmodule_hook_guards = False


def _again(forward: Callable[..., Any], context: Any, *args: Any, **kwargs: Any) -> Any:
    """`forward`, whose activations the backward pass computes again; `context` keeps some."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if context is not None:
        kwargs = {"context_fn": context, **kwargs}
    return checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _selective() -> Any:
    """Keep what matrix products and attention give (Korthikanti et al. 2022, arXiv 2205.05198)."""
    aten = torch.ops.aten
    saved = {getattr(aten, name).default for name in _SAVED if hasattr(aten, name)}
    if hasattr(torch.ops.torch_attn, _VARLEN):
        saved.add(getattr(torch.ops.torch_attn, _VARLEN).default)
    policies = checkpoint.CheckpointPolicy

    def policy(
        ctx: object, op: object, *args: object, **kwargs: object
    ) -> checkpoint.CheckpointPolicy:
        return policies.MUST_SAVE if op in saved else policies.PREFER_RECOMPUTE

    return checkpoint.create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _distribute(part: Part, train: TrainSpec, mesh: Mesh) -> nn.Module:
    """Shard `part` in place where the layout has more than replicas; DDP comes later (`settle`)."""
    layout = mesh.layout
    if layout.dp * layout.shard * layout.cp == 1 or layout.only_replicates:
        return part
    half = HALVES.get(train.precision)
    policy = MixedPrecisionPolicy(
        param_dtype=half,
        # sums of half precision would lose what is small
        reduce_dtype=torch.float32 if half is not None else None,
        cast_forward_inputs=False,
    )
    # a pipeline runs a stage for many micro-batches; replicas alone have nothing to shard again
    stays_gathered = layout.pp > 1 or layout.shard * layout.cp == 1
    shard: Any = functools.partial(fully_shard, mesh=mesh.over("dp", "weights"), mp_policy=policy)
    blocks = [block for _, block in modules.blocks(part.network)]
    for module in [*modules.tables(part.network), *blocks]:
        if not isinstance(module, Skip):
            shard(module, reshard_after_forward=not stays_gathered)
    # what is left, the last norm and the head, is used last and first again: as in torchtitan
    shard(part, reshard_after_forward=False)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # losses are shares of one mean: gradients add up, and are divided by nothing
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return part


def settle(parts: Parts) -> Parts:
    """Ready to train, once the parameters have values.

    DDP goes around the one part where every rank holds the whole model; FSDP gets its
    final, padded storage, which the optimizer has to share."""
    layout = parts.mesh.layout
    for stage in parts.stages:
        if isinstance(stage.module, FSDPModule):
            fully_shard.state(stage.module)._lazy_init()  # type: ignore[attr-defined]
    if not layout.only_replicates or layout.world == 1:
        return parts
    (stage,) = parts.stages
    ddp = DistributedDataParallel(stage.part, broadcast_buffers=False, gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, _sum)
    return dataclasses.replace(parts, stages=(dataclasses.replace(stage, module=ddp),))


def _sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
    """Gradients add up: each rank's loss is its share of the mean over the global batch."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
