"""One optimizer step as numbers: the model, the layout, how many tokens a rank sees at a
time, and what of the weights it holds. memory.py, steptime.py and updates.py start from
it."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from rekindle.families import DIVISIBLE
from rekindle.plan.shape import Matrix, ModelShape
from rekindle.spec.layout import Layout
from rekindle.spec.model import AUTO, Optimizer

Checkpointing = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp64"]
Kernels = Literal["eager", "fused", "compiled"]
Attention = Literal["flash2", "written"]
# how many elements of gathered weights ZeRO's stage 3 keeps: it keeps a weight as long as
# either of the two allows it
_LIMITS_OF_GATHERED = ("stage3_max_live_parameters", "stage3_max_reuse_distance")


def lora_targets(shape: ModelShape, targets: Iterable[str]) -> tuple[str, ...]:
    """The matrices of a block that `model.lora.targets` names, by our names: `q` for Llama's
    `q_proj`. Empty where the family is not known."""
    modules = DIVISIBLE.get(shape.model_type)
    if modules is None:
        return ()
    suffixes = tuple(f".{target}" for target in targets)
    # a target matches whole components of a module's path, as in peft
    return tuple(
        name for name, module in modules.matrices.items() if f".{module}".endswith(suffixes)
    )


@dataclasses.dataclass(frozen=True)
class Zero:
    """What a `ds_config.json` says of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).
    Buffers are in elements; the defaults are DeepSpeed's (0.19.8)."""

    stage: int = 1
    optimizer_offloaded: bool = False
    """Whether the optimizer's state lies in the host's memory."""
    parameters_offloaded: bool = False
    """Whether the weights lie there."""
    bucket: int = 500_000_000
    """The size of a buffer in which gradients are collected until they are reduced."""
    buckets: int = 1
    """How many of these buffers there are."""
    overlaps: bool = False
    """Whether gradients are reduced, and weights gathered, while the GPU computes."""
    gathered: int = 1_000_000_000
    """Most weights of other ranks that a rank keeps, in stage 3."""
    updated: int = 1_000_000_000
    """How many weights are updated at a time, in stage 3."""

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Self:
        """ZeRO as `train.engine_config` has it; what it leaves open, or to "auto",
        is the default."""
        section = (config or {}).get("zero_optimization") or {}
        settings = {k: v for k, v in section.items() if v not in (None, AUTO)}
        stage = int(settings.get("stage", cls.stage))
        overlaps = bool(settings.get("overlap_comm", stage == 3))
        bucket = 0
        if stage > 0 and settings.get("contiguous_gradients", True):
            bucket = int(settings.get("reduce_bucket_size", cls.bucket))
        # where reducing overlaps with computing, one is filled while the other is reduced
        buckets = 2 if overlaps and stage in (1, 2) else 1
        return cls(
            stage=stage,
            optimizer_offloaded=_on_host(settings.get("offload_optimizer")),
            parameters_offloaded=_on_host(settings.get("offload_param")),
            bucket=bucket,
            buckets=buckets,
            overlaps=overlaps,
            gathered=max(int(settings.get(name, cls.gathered)) for name in _LIMITS_OF_GATHERED),
            updated=int(settings.get("sub_group_size", cls.updated)),
        )

    def __str__(self) -> str:
        offloaded = []
        if self.optimizer_offloaded:
            offloaded.append("optimizer")
        if self.parameters_offloaded:
            offloaded.append("weights")
        if not offloaded:
            return f"ZeRO {self.stage}"
        return f"ZeRO {self.stage}, {' and '.join(offloaded)} in the host's memory"


def _on_host(section: object) -> bool:
    return isinstance(section, Mapping) and section.get("device") == "cpu"


@dataclasses.dataclass(frozen=True)
class Work:
    """What each rank does in one optimizer step."""

    shape: ModelShape
    layout: Layout
    accumulation: int
    """Micro-batches, of `layout.micro_batch_size` sequences each."""
    sequence: int
    """Tokens of a sequence."""
    precision: Precision = "bf16"
    checkpointing: Checkpointing = "none"
    compile: bool = False
    sharding: Literal["weights", "optimizer"] = "weights"
    """Whether `layout.shard` divides all state (FSDP), or that of the optimizer only."""
    weights_bytes: int = 4
    """Bytes of a stored weight."""
    lora_rank: int = 0
    """The rank of adapters, beside which all else is frozen; 0: no adapters."""
    lora_targets: tuple[str, ...] = ()
    """The matrices that have adapters; empty: all of a block."""
    teacher: ModelShape | None = None
    """The model that this one is distilled from."""
    tf32: bool = True
    """Whether products in fp32 use TF32, where the GPU has it."""
    optimizer: Optimizer = "adamw"
    quantised: bool = False
    """Whether frozen matrices have 4 bits."""
    zero: Zero | None = None
    """How DeepSpeed divides the state of replicas; None: rekindle's engine trains."""

    @property
    def engine(self) -> str:
        return "deepspeed" if self.zero else "rekindle"

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.layout.micro_batch_size * self.sequence // self.layout.cp

    @property
    def turns(self) -> int:
        """How many stages a pipeline rank has, and so how often it works on a micro-batch."""
        return self.layout.stages // self.layout.pp

    @property
    def blocks(self) -> int:
        """Blocks on the pipeline rank that holds most of them."""
        return math.ceil(self.shape.layers / (self.layout.pp * self.turns)) * self.turns

    @property
    def factors(self) -> tuple[tuple[float, float], ...]:
        """Inputs and outputs, on one tp rank, of each matrix that a block multiplies tokens
        with. A matrix divided by rows has fewer inputs, by columns fewer outputs."""
        tp = self.layout.tp
        sizes = []
        for matrix in self.shape.matrices:
            inputs = float(matrix.inputs)
            outputs = float(matrix.outputs)
            if matrix.divided == "row":
                inputs /= tp
            elif matrix.divided == "column":
                outputs /= tp
            sizes.append((inputs, outputs))
        return tuple(sizes)

    @property
    def kernels(self) -> Kernels:
        """How everything but products of matrices and attention is computed."""
        return "compiled" if self.compile else "eager"

    @property
    def attention(self) -> Attention:
        """The kernel of attention. Where several ranks have to draw the same dropout,
        attention is written out: flash attention's own dropout cannot be keyed."""
        written = self.shape.attention_dropout > 0 and self.layout.tp * self.layout.cp > 1
        return "written" if written else "flash2"

    @property
    def along_sequence(self) -> bool:
        """Whether tp ranks divide the residual stream along the sequence, too, as those of
        language models do."""
        return self.layout.tp > 1 and self.shape.causal

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the forward pass."""
        return {"fp64": 8, "fp32": 4}.get(self.precision, 2)

    def block_share(self) -> int:
        """Weights of one block on one tp rank; norms are whole on each."""
        tp = self.layout.tp
        total = self.shape.block_norms
        for matrix in self.shape.matrices:
            weights = matrix.inputs * matrix.outputs
            bias = matrix.outputs
            if matrix.divided:
                weights //= tp
            # divided by rows, the ranks' results are summed and the bias is added to the
            # sum: each rank has all of it
            if matrix.divided == "column":
                bias //= tp
            total += weights
            if matrix.bias:
                total += bias
        return total

    def ends_share(self) -> tuple[int, int]:
        """Weights on one tp rank before the first block, and behind the last one.

        A tied head is the table before the first block, so it counts there only; the last
        stage of a pipeline holds it once more."""
        shape = self.shape
        # tp ranks divide the table and the head of a language model only
        tp = self.layout.tp if shape.causal else 1
        head = 0
        if shape.head is not None:
            head = shape.head.parameters // tp
        elif shape.causal and self.layout.pp > 1:
            head = shape.table // tp
        return shape.table // tp + shape.before, shape.after + head

    @property
    def adapted(self) -> tuple[Matrix, ...]:
        """The matrices of a block that have adapters."""
        if not self.lora_rank:
            return ()
        if not self.lora_targets:
            return self.shape.matrices
        return tuple(m for m in self.shape.matrices if m.name in self.lora_targets)

    def adapters_share(self) -> int:
        """Weights of a block's adapters on one tp rank. Of the two factors of an adapter, the
        one along the undivided side is whole on each rank."""
        tp = self.layout.tp
        total = 0
        for matrix in self.adapted:
            inputs = matrix.inputs
            outputs = matrix.outputs
            if matrix.divided == "row":
                inputs //= tp
            elif matrix.divided == "column":
                outputs //= tp
            total += inputs + outputs
        return total * self.lora_rank
