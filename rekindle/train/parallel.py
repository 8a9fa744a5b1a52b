"""From a network on the meta device to the parts that this rank trains.

Order: cut into stages (pp), divide matrices (tp), recompute activations, compile, shard (FSDP2) or
replicate (DDP), fill with starting values. Whatever a layout needs and the architecture does not
offer is refused by name. And which attention kernels a device has."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from rekindle.engines.deepspeed import Zero
from rekindle.errors import UnsupportedError
from rekindle.plan.inflight import stages_of
from rekindle.spec.layout import Shape
from rekindle.spec.model import LoraSpec, TrainSpec
from rekindle.tasks.base import Task
from rekindle.train import attention, dropout, modules, quantised, tensor, weights
from rekindle.train.attention import Kernel
from rekindle.train.mesh import Mesh
from rekindle.train.micro import Documents
from rekindle.train.modules import Origin, Skip, cut
from rekindle.train.part import Goal, Part

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
DTYPES = {**HALVES, "fp64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Stage:
    """Piece `index` of `count` on this rank. `module` runs it: `part` itself, or DDP around it."""

    index: int
    count: int
    part: Part
    module: nn.Module


@dataclasses.dataclass(frozen=True)
class Parts:
    """What this rank trains, by parameter name in the whole network.

    `partial`: parameters whose gradients tp ranks have to add up. `tied`: parameters that are
    another one, of which stages far apart hold a copy each. `origins`: where starting values lie.
    `scaling`: of LoRA's updates, None without. `attention`: what keeps documents apart in training
    steps. `stepper`: the engine that makes the updates, if it is not rekindle's own."""

    stages: tuple[Stage, ...]
    mesh: Mesh
    partial: frozenset[str]
    tied: Mapping[str, str]
    origins: Mapping[str, Origin]
    scaling: float | None = None
    attention: Kernel = "sdpa"
    stepper: Zero | None = None

    @property
    def network(self) -> nn.Module:
        """The network, or this rank's first piece of it: for its configuration."""
        return self.stages[0].part.network

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name in the whole network and parameter, the copies of tied ones included."""
        for stage in self.stages:
            yield from stage.part.network.named_parameters()

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are saved, by their name in the whole network."""
        for stage in self.stages:
            saved = stage.part.network.state_dict(keep_vars=True)
            yield from ((n, b) for n, b in stage.part.network.named_buffers() if n in saved)


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What forward passes run in: half precision where that is the training's."""
    half = HALVES.get(precision)
    return torch.autocast(device.type, dtype=half) if half else contextlib.nullcontext()


def prepare_network(
    network: nn.Module,
    source: weights.Source | None,
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
    """The parts of this rank, on its device, without values yet (see weights.fill); `network` is
    cut up and must not be used any more. `scores` is for `Part`."""
    layout = mesh.layout
    network.train()
    if train.precision == "fp8":
        quantised.convert(network, mesh.device)
    tokens = task.objective == "tokens"
    ours = train.engine == "rekindle"  # another engine divides parts that are filled
    tp = layout.tp if ours else 1
    sequence = tp > 1 and tensor.along_sequence(network, tokens)
    kernel: Kernel = "sdpa"
    used = kernel
    if modules.known(network) is not None:
        computed = DTYPES.get(train.precision) or DTYPES.get(train.weights, torch.float32)
        kernel = kernel_for(network, mesh.device, computed)
        used = while_training(network, kernel)
    stages = []
    for index in stages_of(layout, mesh.place("pp")):
        piece = cut(network, index, layout) if layout.pp > 1 else network
        first, last = index == 0, index == layout.stages - 1
        if tp > 1:
            tensor.divide(piece, network, mesh, tokens)
        for module in piece.modules():  # GPT-2 splits what its fused projection returns
            if layout.tp > 1 and hasattr(module, "split_size"):
                module.split_size //= layout.tp  # type: ignore[operator,assignment]
        if hasattr(piece, "config") and modules.known(piece) is not None:
            place = mesh.place("tp"), layout.tp, layout.cp, mesh.group("cp")
            peers = attention.Peers(*place, kernel, takes_groups(mesh.device))
            attention.install(piece, peers)
            dropout.install(piece)
        _recompute_and_compile(piece, train, constants=tokens)
        group = mesh.group("tp") if ours else None
        part = Part(task, piece, goal, first, last, group, sequence, scores)
        module = _distribute(part, train, mesh) if ours else part
        stages.append(Stage(index, layout.stages, part, module))
    for stage in stages:
        put(stage.part, mesh.device)
    partial = tensor.shared_by_share(network, tokens) if tp > 1 else frozenset()
    tied = modules.tied(network)
    origins = dict(origins) | {name: Origin(source) for name, source in tied.items()}
    return Parts(tuple(stages), mesh, partial, tied, origins, scaling, used)


def put(network: nn.Module, device: torch.device) -> None:
    """On the device, without values where there were none."""
    weights.transform(
        network, lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device)
    )


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


def _recompute_and_compile(piece: nn.Module, train: TrainSpec, constants: bool) -> None:
    """`constants`: whether numbers may be compiled as constants. Texts with a class have many
    lengths, and those pass as numbers through an attention that is not compiled."""
    blocks = [block for _, block in modules.blocks(piece) if not isinstance(block, Skip)]
    if not blocks and (train.compile or train.activation_checkpointing != "none"):
        what = f"{modules.model_type(piece)} has no blocks to compile or to compute again"
        fix = "unset train.compile and train.activation_checkpointing, or give the network "
        raise UnsupportedError(what, where="train", fix=f"{fix}`_no_split_modules`")
    if train.compile:
        # a module's numbers, such as FSDP's, as symbols take twice as long and give slower kernels
        import torch._dynamo.config as dynamo

        dynamo.specialize_int, dynamo.specialize_float = constants, True
        # DDP's hooks run between blocks; torch would cut large ones once more, at its buckets
        dynamo.optimize_ddp = False
        # the last block of a text classifier has hooks that others have not, and the same code:
        # unasked, it would run as the first block was compiled, without them
        dynamo.skip_nnmodule_hook_guards = False
    for block in blocks:
        if train.activation_checkpointing != "none":
            context = _selective if train.activation_checkpointing == "selective" else None
            block.forward = functools.partial(_again, block.forward, context)
        if train.compile:
            # packed sequences have one length; of others the second makes it a symbol
            block.forward = torch.compile(block.forward)


def _again(forward: Callable[..., Any], context: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    more = {"context_fn": context} if context else {}
    return checkpoint.checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)


def _selective() -> Any:
    """Keep what matrix products and attention give (Korthikanti et al. 2022, arXiv 2205.05198)."""
    aten, varlen, kinds = torch.ops.aten, torch.ops.torch_attn, checkpoint.CheckpointPolicy
    saved = {getattr(aten, name).default for name in _SAVED if hasattr(aten, name)}
    saved |= {getattr(varlen, _VARLEN).default} if hasattr(varlen, _VARLEN) else set()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> checkpoint.CheckpointPolicy:
        return kinds.MUST_SAVE if op in saved else kinds.PREFER_RECOMPUTE

    return checkpoint.create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _distribute(part: Part, train: TrainSpec, mesh: Mesh) -> nn.Module:
    """Shard `part` in place where the layout has more than replicas; DDP comes later (`settle`)."""
    layout = mesh.layout
    if layout.dp * layout.shard * layout.cp == 1 or layout.only_replicates:
        return part
    cast = HALVES.get(train.precision)
    policy = MixedPrecisionPolicy(
        param_dtype=cast, reduce_dtype=torch.float32 if cast else None, cast_forward_inputs=False
    )
    keep = layout.pp > 1 or layout.shard * layout.cp == 1
    shard: Any = functools.partial(fully_shard, mesh=mesh.over("dp", "weights"), mp_policy=policy)
    tables = modules.tables(part.network)
    for module in [*tables, *(b for _, b in modules.blocks(part.network))]:
        if not isinstance(module, Skip):
            shard(module, reshard_after_forward=not keep)
    # what is left, the last norm and the head, is used last and first again: as in torchtitan
    shard(part, reshard_after_forward=False)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
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
    ddp = DistributedDataParallel(stage.part, broadcast_buffers=False, gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, _sum)
    return dataclasses.replace(parts, stages=(dataclasses.replace(stage, module=ddp),))


def _sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
    """Gradients add up: each rank's loss is its share of the mean over the global batch."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


log = logging.getLogger(__name__)

KERNEL_TOLERANCE = 0.05  # of a kernel in half precision, relative to the largest value
# what transformers' configs call the dropout of attention
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def takes_groups(device: torch.device) -> bool:
    """Whether a fast kernel takes fewer key-value heads: flash attention, from CUDA's 8.0 on."""
    if device.type != "cuda" or not torch.cuda.is_available():  # a trace has no device to ask
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def kernel_for(network: nn.Module, device: torch.device, dtype: torch.dtype) -> Kernel:
    """What keeps documents apart on this device: the varlen kernel where it takes the network's
    heads in this type. Raises UnsupportedError where it disagrees with one call a document."""
    if device.type != "cuda" or dtype not in attention.HALVES:
        return "sdpa"
    config: Any = network.config
    shape = Shape.of(config.to_dict())
    size = int(getattr(config, "head_dim", None) or config.hidden_size // shape.heads)
    windows = (None, 8) if getattr(config, "sliding_window", None) else (None,)
    try:
        gap = kernel_difference(device, dtype, shape.heads // shape.kv_heads * 2, 2, size, windows)
    except (ImportError, RuntimeError, TypeError, ValueError, UnsupportedError) as error:
        reason = str(error).partition("\n")[0]
        log.warning("attention: one call a document, because of the varlen kernel: %s", reason)
        return "sdpa"
    if not gap < KERNEL_TOLERANCE:
        what = f"the varlen attention of torch {torch.__version__} differs by {gap:.2g} from one "
        what += f"call a document on {torch.cuda.get_device_name(device)}"
        fix = "use another build of torch 2.10 to 2.13; `make test-gpu` shows what differs"
        raise UnsupportedError(what, where="train", fix=fix)
    return "varlen"


def while_training(network: nn.Module, kernel: Kernel) -> Kernel:
    """What keeps documents apart in training steps, which it logs: varlen has no dropout."""
    rate = next((name for name in DROPOUTS if getattr(network.config, name, None)), None)
    if kernel == "varlen" and rate is not None:
        log.warning(
            "attention: one call a document (of texts with a class: a group) in training steps, "
            "because the varlen kernel has no dropout; set `%s: 0` in the model's config for one "
            "kernel over all documents",
            rate,
        )
        return "sdpa"
    if kernel == "varlen":
        log.info("attention: one varlen kernel for all documents of a micro-batch")
    return kernel


def kernel_difference(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    size: int,
    windows: tuple[int | None, ...],
) -> float:
    """How far the varlen kernel is from one call a document, forwards and backwards, relative to
    the largest value. Raises what the kernel raises where it cannot be used."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(2, n, 64, size, generator=draw) for n in (heads, groups, groups)]
    documents = Documents.of(np.array([[1] * 40 + [2] * 24, [1] * 9 + [2] * 55]))
    documents = documents.with_each(lambda t: t.to(device))
    kernels: tuple[Kernel, ...] = ("varlen", "sdpa")
    worst = 0.0
    for window in windows:
        found = []
        for kernel in kernels:
            call = attention.Call(True, None, 0.0, window, attention.Peers(kernel=kernel))
            with torch.enable_grad():
                q, k, v = (x.to(device, dtype).requires_grad_() for x in made)
                out = attention.apart(q, k, v, documents, call)
                slopes = torch.autograd.grad(out.float().square().sum(), (q, k, v))
            found.append([out.detach(), *slopes])
        for ours, theirs in zip(*found, strict=True):
            gap = float((ours - theirs).abs().max() / theirs.abs().max())
            worst = gap if not gap <= worst else worst  # a gap that is not a number counts
    return worst
