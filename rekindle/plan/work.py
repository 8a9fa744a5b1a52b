"""One optimizer step as numbers: the model, the layout,
how many tokens a rank sees at a time."""

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
# DeepSpeed keeps a weight for either of the two
_KEPT_FOR = ("stage3_max_live_parameters", "stage3_max_reuse_distance")


def lora_targets(shape: ModelShape, targets: Iterable[str]) -> tuple[str, ...]:
    """Our names of the matrices that `model.lora.targets` names:
    `q_proj` of Llama is `q`."""
    modules = DIVISIBLE.get(shape.model_type)
    if modules is None:
        return ()
    suffixes = tuple(f".{target}" for target in targets)
    # whole parts of a module's path, as peft compares them
    return tuple(
        name for name, module in modules.matrices.items() if f".{module}".endswith(suffixes)
    )


@dataclasses.dataclass(frozen=True)
class Zero:
    """What a `ds_config.json` says of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): a
    stage and its buffers, in elements, and what lies in the host's memory; the defaults
    are DeepSpeed's (0.19.8). `buckets` of `bucket` elements collect gradients;
    `overlaps`: they are reduced, and weights are gathered, beside computing; a rank of
    stage 3 keeps up to `gathered` elements of weights beyond its own, and updates
    `updated` at a time."""

    stage: int = 1
    optimizer_offloaded: bool = False
    parameters_offloaded: bool = False
    bucket: int = 500_000_000
    buckets: int = 1
    overlaps: bool = False
    gathered: int = 1_000_000_000
    updated: int = 1_000_000_000

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
        # one is filled while the other is reduced
        buckets = 2 if overlaps and stage in (1, 2) else 1
        return cls(
            stage=stage,
            optimizer_offloaded=_on_host(settings.get("offload_optimizer")),
            parameters_offloaded=_on_host(settings.get("offload_param")),
            bucket=bucket,
            buckets=buckets,
            overlaps=overlaps,
            gathered=max(int(settings.get(name, cls.gathered)) for name in _KEPT_FOR),
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
    """What each rank does in one optimizer step: `accumulation` micro-batches of
    `layout.micro_batch_size` sequences of `sequence` tokens. `sharding`: `layout.shard`
    divides all states (FSDP), or those of the optimizer only. `lora_rank` adapts the
    matrices that `lora_targets` names, or all, and freezes the others. `quantised`:
    frozen matrices have 4 bits. `teacher`: whom the model learns from. `tf32`: products
    in fp32 use it, where the GPU has it. `zero`: DeepSpeed divides the replicas' states.
    """

    shape: ModelShape
    layout: Layout
    accumulation: int
    sequence: int
    precision: Precision = "bf16"
    checkpointing: Checkpointing = "none"
    compile: bool = False
    sharding: Literal["weights", "optimizer"] = "weights"
    weights_bytes: int = 4
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    teacher: ModelShape | None = None
    tf32: bool = True
    optimizer: Optimizer = "adamw"
    quantised: bool = False
    zero: Zero | None = None

    @property
    def engine(self) -> str:
        return "deepspeed" if self.zero else "rekindle"

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.layout.micro_batch_size * self.sequence // self.layout.cp

    @property
    def turns(self) -> int:
        """How often a micro-batch comes by on one rank of the pipeline."""
        return self.layout.stages // self.layout.pp

    @property
    def blocks(self) -> int:
        """Most blocks that a rank holds."""
        return math.ceil(self.shape.layers / (self.layout.pp * self.turns)) * self.turns

    @property
    def factors(self) -> tuple[tuple[float, float], ...]:
        """Inputs and outputs, on one tp rank, of what a block multiplies tokens with."""
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
        """How what is neither a product nor attention is computed."""
        return "compiled" if self.compile else "eager"

    @property
    def attention(self) -> Attention:
        """The kernel that runs it:
        written out where ranks have to draw the same dropout."""
        written = self.shape.attention_dropout > 0 and self.layout.tp * self.layout.cp > 1
        return "written" if written else "flash2"

    @property
    def along_sequence(self) -> bool:
        """Whether tp ranks divide the residual stream, too: language models do."""
        return self.layout.tp > 1 and self.shape.causal

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the forward pass."""
        return {"fp64": 8, "fp32": 4}.get(self.precision, 2)

    def block_share(self) -> int:
        """Elements of one block on one tp rank; those of norms are on all."""
        tp = self.layout.tp
        total = self.shape.block_norms
        for matrix in self.shape.matrices:
            weights = matrix.inputs * matrix.outputs
            bias = matrix.outputs
            if matrix.divided:
                weights //= tp
            # ranks that divide rows add up their results, to which the whole bias is
            # added once
            if matrix.divided == "column":
                bias //= tp
            total += weights
            if matrix.bias:
                total += bias
        return total

    def ends_share(self) -> tuple[int, int]:
        """Elements on one tp rank of what lies before the first block, and behind the
        last; a tied head is the first's table, which the last stage of a pipeline holds
        once more."""
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
        """The matrices that have adapters: those that are named, or all."""
        if not self.lora_rank:
            return ()
        if not self.lora_targets:
            return self.shape.matrices
        return tuple(m for m in self.shape.matrices if m.name in self.lora_targets)

    def adapters_share(self) -> int:
        """Elements of a block's adapters on one tp rank:
        the side that is not divided is on all."""
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
