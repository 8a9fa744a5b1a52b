"""How long one optimizer step takes.

A roofline of what a rank computes (matrix products at an efficiency that falls with small sizes,
attention, everything else by its bytes), collectives on the real links, what of them hides behind
computing, the bubble of a pipeline, the optimizer. Some twelve numbers of it are measured, not
known: `Constants`, one set a GPU and software (constants.yaml), fitted by `python -m
tests.plan.fit`. Attention after Dao 2023 (arXiv 2307.08691); pipelines after Narayanan et al.
2021 (arXiv 2104.04473); sequence parallelism after Korthikanti et al. 2022 (arXiv 2205.05198)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rekindle.plan import quantised, updates
from rekindle.plan.attention import BACKWARD_PRODUCTS, WRITTEN, Kernel, written_seconds
from rekindle.plan.cluster import Cluster, Group, groups
from rekindle.plan.shape import ModelShape
from rekindle.plan.work import Kernels, Work, Zero

FORWARD = 1  # products; each of the gradients costs what the forward pass costs


@dataclasses.dataclass(frozen=True)
class Constants:
    """What cannot be read off a data sheet.

    Of the GPU: `matrix_efficiency` is the share of the peak that products reach, `kernels` of
    attention that were measured elsewhere, and of the first flash attention, which was not,
    `attention_efficiency` forward, `attention_half` (tokens) and `attention_backward` (times the
    forward's seconds). Of the software: `operand_passes`, how often what goes into a product and
    comes out is moved beside computing; `memory_efficiency`, the share of the memory's bandwidth
    that everything else reaches; `logit_bytes` that the loss moves a token and entry of the
    vocabulary; `inside_efficiency` and `between_efficiency`, what large collectives reach of the
    links' peaks; `hop_seconds` a rank of a ring; `overlapped`, the share of communication beside
    computing that costs time all the same; `launch_seconds` of the host for a block's kernels, of
    which `gather_launches` come on top where weights are sharded, `stage_seconds` for a micro-batch
    on a stage of a pipeline, `data_seconds` for a token of the next step, beside this one,
    `step_seconds` for what surrounds a step. `asynchronous`: kernels run while others are launched.
    Of a machine, `host_bandwidth` that an update in its memory reaches, and `host_link` of one GPU
    to it, in bytes a second."""

    matrix_efficiency: float
    attention_efficiency: float
    attention_half: float
    attention_backward: float
    operand_passes: float
    memory_efficiency: float
    logit_bytes: float
    inside_efficiency: float
    between_efficiency: float
    hop_seconds: float
    overlapped: float
    launch_seconds: float = 0.0
    gather_launches: float = 0.0
    data_seconds: float = 0.0
    step_seconds: float = 0.0
    asynchronous: bool = True
    stage_seconds: float = 0.0
    optimizer_bytes: float = 28.0
    host_bandwidth: float = 100e9
    host_link: float = 20e9
    kernels: Mapping[str, Kernel] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by what they are spent on; the terms add up to it."""

    terms: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.terms.values())

    @property
    def dominant(self) -> str:
        """What takes longest."""
        return max(self.terms, key=lambda name: self.terms[name])


@dataclasses.dataclass(frozen=True)
class _Pass:
    """Seconds of one micro-batch on one rank, forward and backward."""

    products: float
    attention: float
    stream: float
    recomputed: float
    head: float
    tensor: float
    context: float

    @property
    def computing(self) -> float:
        return self.products + self.attention + self.stream + self.recomputed + self.head


def step_time(work: Work, cluster: Cluster, constants: Constants) -> StepTime:
    """Of the slowest rank; every term is in seconds a step. KeyError where the catalog does not
    know the GPU's peak in that precision."""
    if work.zero is not None:
        return _ZeroModel(work, work.zero, cluster, constants).step()
    return _Model(work, cluster, constants).step()


class _Model:
    def __init__(self, work: Work, cluster: Cluster, constants: Constants) -> None:
        self.work, self.cluster, self.c = work, cluster, constants
        self.links = groups(cluster, work.layout)
        self.backward = 1 if work.lora_rank else 2  # frozen weights need no gradients of their own
        gpu = cluster.gpu
        tflops = gpu.product_tflops(work.precision, work.tf32)
        if tflops is None:
            raise KeyError(work.precision)
        self.peak = tflops * 1e12
        self.half_peak = gpu.tflops["bf16"] * 1e12 if work.precision == "fp8" else self.peak
        self.bandwidth = gpu.bandwidth_bytes_per_second
        self.scored = float(work.shape.causal)  # the share of tokens that the output head sees
        self.reduced_bytes = 4  # of a gradient on the wire

    def step(self) -> StepTime:
        work, layout = self.work, self.work.layout
        one = self._pass()
        turns = work.accumulation
        spread = one.computing + one.tensor + one.context
        gathered, reduced = self._sharded()
        each = gathered + reduced if layout.pp == 1 else 0.0
        backward = one.computing * self.backward / (FORWARD + self.backward)
        kept = gathered + reduced if layout.pp > 1 else 0.0
        contention = self._contention()
        beside = one.computing if self.c.asynchronous else 0.0
        idle = max(0.0, self._launched() - beside)  # exchanges fill it first
        last = max(0.0, idle - each) * self.backward / (FORWARD + self.backward)
        hidden = self._exposed(max(0.0, each - idle), one.computing, contention) * turns
        hidden += self._exposed(max(0.0, kept - last), backward, contention)
        hidden += self._exposed(max(0.0, self._once() - last), backward, contention)
        share = 1 / (work.turns * (3 if layout.schedule == "zero_bubble" else 1))
        bubble = spread * (layout.pp - 1) * share
        terms = {
            "matrix products": (one.products + one.head) * turns,
            "attention": one.attention * turns,
            "memory traffic": one.stream * turns,
            "recomputation": one.recomputed * turns,
            "tensor parallel": one.tensor * turns,
            "context parallel": one.context * turns,
            "weights and gradients": hidden,
            "pipeline bubble": bubble,
            "between stages": self._between_stages() * turns,
            "teacher": self._teacher() * turns,
            **self._optimizer(),
        }
        terms["waiting for the host"] = idle * turns + self.c.step_seconds
        prepared = layout.micro_batch_size * work.sequence * turns * self.c.data_seconds
        terms["waiting for data"] = max(0.0, prepared - sum(terms.values()))
        return StepTime({name: seconds for name, seconds in terms.items() if seconds > 0})

    def _contention(self) -> float:
        """The share of an exchange beside computing that costs time all the same."""
        return self.c.overlapped

    def _optimizer(self) -> dict[str, float]:
        """Of the optimizer, whose products are in bf16 where the GPU has it."""
        peak = self.cluster.gpu.tflops.get("bf16", self.peak / 1e12) * 1e12
        return {
            "optimizer": updates.seconds(
                self.work,
                self._trained(),
                self.work.blocks,
                peak * self.c.matrix_efficiency,
                self.bandwidth,
                self.c.optimizer_bytes,
            )
        }

    def _launched(self) -> float:
        """Seconds of the host for a micro-batch: its kernels, of which those that compute again
        what the forward pass did are about a third, what gathers a block's weights and reduces
        their gradients, and what a pipeline does around them."""
        again = 0.0 if self.work.checkpointing == "none" else 1 / 3
        sharded = self.work.sharding == "weights" and self.links["weights"].size > 1
        gathers = self.c.gather_launches if sharded else 0.0
        kernels = self.c.launch_seconds * self.work.blocks * (1 + again + gathers)
        stages = self.c.stage_seconds * self.work.turns if self.work.layout.pp > 1 else 0.0
        return kernels + stages

    # Computing

    def _product(self, tokens: float, inputs: float, outputs: float, peak: float) -> float:
        """Seconds of the operations and of what is moved for them: the weights once, what goes in
        and what comes out `operand_passes` times. 4,096 tokens, inputs and outputs on an H100 at
        0.72 of its peak, moved twice: 0.193 ms and 0.050."""
        narrow = self.work.compute_bytes if peak <= self.half_peak else 1
        wide = self.work.compute_bytes
        operands = tokens * (inputs * narrow + outputs * wide) * self.c.operand_passes
        moved = (operands + inputs * outputs * narrow) / self.bandwidth
        return 2.0 * tokens * inputs * outputs / (peak * self.c.matrix_efficiency) + moved

    def _pass(self) -> _Pass:
        work, blocks = self.work, self.work.blocks
        products = sum(self._product(work.tokens, *sizes, self.peak) for sizes in work.factors)
        core, core_back = self._core()
        forward, backward = self._stream()
        tensor, context = self._tensor(), self._context()
        if work.checkpointing == "full":
            tensor, context = tensor * 1.5, context * 1.5
        return _Pass(
            products=products * (FORWARD + self.backward) * blocks,
            attention=(core + core_back) * blocks,
            stream=(forward + backward + self._casts()) * blocks,
            recomputed=self._again(products, core, forward) * blocks,
            head=self._head(),
            tensor=tensor * blocks,
            context=context * blocks,
        )

    def _teacher(self) -> float:
        """Its forward pass: a third of what its training would compute."""
        work = self.work
        if work.teacher is None:
            return 0.0
        alone = dataclasses.replace(
            work, shape=work.teacher, teacher=None, checkpointing="none", lora_rank=0
        )
        return _Model(alone, self.cluster, self.c)._pass().computing / 3

    def _again(self, products: float, core: float, stream: float) -> float:
        """Of a block, what its backward pass computes once more, which ends before the last product
        (torch's set_checkpoint_early_stop)."""
        if self.work.checkpointing != "full":
            return 0.0 if self.work.checkpointing == "none" else stream
        last, every = self.work.shape.matrices[-1], self.work.shape.matrices
        spared = last.inputs * last.outputs / sum(m.inputs * m.outputs for m in every)
        return (1.0 - spared) * products + core + stream

    def _core(self) -> tuple[float, float]:
        """Attention between its projections, of a block, forward and backward."""
        work, shape, c = self.work, self.work.shape, self.c
        causal, width = shape.causal, shape.heads * shape.head_dim / work.layout.tp
        scores = width / shape.head_dim * work.tokens * work.sequence
        if moved := self._moved_by_attention():
            return written_seconds(
                scores,
                shape.head_dim,
                self.half_peak * c.matrix_efficiency,
                self.bandwidth * c.memory_efficiency,
                moved,
            )
        flops = 4.0 * scores * shape.head_dim * (0.5 if causal else 1.0)
        kernel = self._kernel(work.attention)
        return kernel.seconds(flops, work.sequence, self.half_peak, shape.head_dim, causal)

    def _moved_by_attention(self) -> tuple[float, float] | None:
        """Bytes a score, forward and backward, where no kernel runs it as a whole."""
        return WRITTEN[self.work.compile] if self.work.attention == "written" else None

    def _kernel(self, name: str) -> Kernel:
        if name in self.c.kernels:
            return self.c.kernels[name]
        forward, half = self.c.attention_efficiency, self.c.attention_half
        backward = forward * BACKWARD_PRODUCTS / self.c.attention_backward
        return Kernel(forward, half, backward, half)

    def _stream(self) -> tuple[float, float]:
        work, tp = self.work, self.work.layout.tp
        moved = traffic(work.shape, work.kernels, work.shape.dropout > 0)
        speed = self.bandwidth * self.c.memory_efficiency / (work.tokens * work.compute_bytes / 2)
        shared = tp if work.along_sequence else 1
        forward, backward = (
            (whole / shared + inner / tp) / speed
            for whole, inner in zip(moved.stream, moved.inner, strict=True)
        )
        return forward, backward

    def _head(self) -> float:
        shape, tokens = self.work.shape, self.work.tokens * self.scored
        if not tokens:
            return 0.0
        entries = shape.vocab / self.work.layout.tp
        products = self._product(tokens, shape.d_model, entries, self.half_peak)
        moved = self.c.logit_bytes * tokens * entries / self.bandwidth
        return products * (FORWARD + self.backward) + moved

    def _casts(self) -> float:
        """Of a block: what goes into a product in 8 bits, and the gradient of what comes out, is
        read once and written twice, as it is and transposed; 4 bits are brought back."""
        if self.work.quantised:
            return quantised.seconds(self.work, self.bandwidth * self.c.memory_efficiency)
        if self.work.precision != "fp8":
            return 0.0
        wide = sum(inputs + outputs for inputs, outputs in self.work.factors)
        return 4.0 * self.work.tokens * wide / (self.bandwidth * self.c.memory_efficiency)

    # Exchanging

    def _ring(self, group: Group, size_bytes: float) -> float:
        """All-gather of `size_bytes` in all, or reduce-scatter."""
        if group.size == 1:
            return 0.0
        share = (group.size - 1) / group.size
        return size_bytes * share / self._speed(group) + group.size * self.c.hop_seconds

    def _speed(self, group: Group) -> float:
        reached = self.c.inside_efficiency if group.nodes == 1 else self.c.between_efficiency
        return group.bytes_per_second * reached

    def _tensor(self) -> float:
        """Of one block: into the columns and out of the rows of attention and of the feed-forward
        network, forward and backward; what was gathered is gathered once more for its gradients."""
        if self.work.layout.tp == 1:
            return 0.0
        size = self.work.tokens * self.work.shape.d_model * self.work.compute_bytes
        calls = 10 if self.work.along_sequence else 8
        return calls * self._ring(self.links["tp"], size)

    def _context(self) -> float:
        """Of one block: keys and values of all, and the sum of their gradients."""
        work, shape = self.work, self.work.shape
        if work.layout.cp == 1:
            return 0.0
        width = 2 * shape.kv_heads * shape.head_dim / work.layout.tp
        size = work.tokens * work.layout.cp * width * work.compute_bytes
        return 2 * self._ring(self.links["cp"], size)

    def _held(self) -> float:
        """Elements of the weights on a rank before they are sharded."""
        first, last = self.work.ends_share()
        both = first + last if self.work.layout.pp == 1 else max(first, last)
        return self.work.blocks * self.work.block_share() + both

    def _trained(self) -> float:
        """Those of them that have gradients."""
        if self.work.lora_rank:
            return self.work.blocks * self.work.adapters_share()
        return self._held()

    def _sharded(self) -> tuple[float, float]:
        """Seconds to gather the weights and to reduce their gradients, a micro-batch (once a step
        in a pipeline, which keeps them)."""
        work, group = self.work, self.links["weights"]
        if group.size == 1 or work.sharding == "optimizer":
            return 0.0, 0.0
        calls = 1 if work.layout.pp > 1 else 2
        pieces = work.blocks + 1
        hops = (pieces - 1) * group.size * self.c.hop_seconds
        gather = self._ring(group, self._held() * work.compute_bytes) + hops
        reduce = self._ring(group, self._trained() * self.reduced_bytes) + hops
        return calls * gather, reduce

    def _once(self) -> float:
        """Seconds to add up the gradients of replicas, once a step."""
        work, layout = self.work, self.work.layout
        held = self._trained()
        if work.sharding == "optimizer":
            whole = self.cluster.group(layout.shard * layout.dp, layout.tp * layout.cp)
            return 2 * self._ring(whole, held * work.compute_bytes)
        shards = layout.shard * layout.cp
        return 2 * self._ring(self.links["dp"], held / shards * self.reduced_bytes)

    def _exposed(self, exchanging: float, computing: float, contention: float) -> float:
        """What is not hidden behind computing, and what the hidden part costs it."""
        together = min(exchanging, computing)
        return max(0.0, exchanging - computing) + contention * together

    def _between_stages(self) -> float:
        """Seconds to hand a micro-batch on, there and back."""
        work, layout = self.work, self.work.layout
        if layout.pp == 1:
            return 0.0
        size = work.tokens * work.shape.d_model * work.compute_bytes
        size //= layout.tp if work.along_sequence else 1
        speed = self._speed(self.cluster.group(2, layout.world // layout.pp))
        return 2 * work.turns * (size / speed + self.c.hop_seconds)


class _ZeroModel(_Model):
    """DeepSpeed's ZeRO: stage 3 gathers weights as FSDP does, 1 and 2 share the updates alone. How
    fast the host is, is a guess."""

    def __init__(self, work: Work, zero: Zero, cluster: Cluster, constants: Constants) -> None:
        layout = work.layout
        if zero.stage:
            layout = dataclasses.replace(layout, dp=1, shard=layout.dp)
        kind: Literal["weights", "optimizer"] = "weights" if zero.stage == 3 else "optimizer"
        super().__init__(
            dataclasses.replace(work, layout=layout, sharding=kind), cluster, constants
        )
        self.zero = zero

    def _contention(self) -> float:
        return self.c.overlapped if self.zero.overlaps else 1.0

    def _optimizer(self) -> dict[str, float]:
        """On the host all ranks of a machine share its memory; gradients go there, and weights
        come back; those of stage 3 come for each pass, too."""
        zero, mine = self.zero, self._trained() / self.work.layout.shard
        found = {"optimizer": self.c.optimizer_bytes * mine / self.bandwidth}
        crossing = 0.0
        if zero.optimizer_offloaded:
            there = mine * self.cluster.gpus_per_node
            found["optimizer"] = self.c.optimizer_bytes * there / self.c.host_bandwidth
            crossing += mine * (self.work.accumulation + 1)
        if zero.parameters_offloaded:
            crossing += 2 * self._held() / self.work.layout.shard * self.work.accumulation
        found["to and from the host"] = crossing * self.work.compute_bytes / self.c.host_link
        return found


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes a token that a block moves through the GPU's memory besides products and attention.
    `stream` is that of the residual stream (norms and sums), `inner` that between the divided
    matrices (activation, rotary positions); each forward, backward.

    Counted operation by operation, as many numbers as each reads and writes, of 2 bytes (4 where it
    computes in fp32): an eager block runs one kernel an operation, a fused one a kernel for each
    norm, gate and rotary position, a compiled one a kernel for each chain of them."""

    stream: tuple[float, float]
    inner: tuple[float, float]


def traffic(shape: ModelShape, kernels: Kernels, dropout: bool = False) -> Traffic:
    """Of a model in 16 bits. A GPT-2 block, eager, 768 wide: 20 d_model + 16 d_model forward."""
    width, wide = shape.d_model, shape.ffn
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim if shape.norm == "rms" else 0
    norms = 2 * width
    if kernels == "compiled":  # a norm reads the sum that it is fused with, and writes both
        stream = (norms * 8.0, norms * 12.0)
    else:
        # layer norm is one kernel; RMS norm as transformers writes it is six, four of them in fp32
        slow = kernels == "eager" and shape.norm == "rms"
        norm = (34.0, 60.0) if slow else (4.0, 8.0)
        stream = (norms * (norm[0] + 6.0), norms * (norm[1] + 6.0))
    if kernels == "eager":
        gate = (10.0, 18.0) if shape.gated else (4.0, 6.0)
        turn = (20.0, 26.0)
    else:
        gate = (6.0, 10.0) if shape.gated else (4.0, 6.0)
        turn = (4.0, 4.0)
    if dropout:  # fused with the sum it adds a mask of a byte, forward; backward it is a kernel
        once = 5.0 if kernels == "eager" else 1.0
        stream = (stream[0] + norms * once, stream[1] + norms * 5.0)
    biases = sum(2.0 * m.outputs for m in shape.matrices if m.bias)  # their gradients read all
    inner = (gate[0] * wide + turn[0] * rotated, gate[1] * wide + turn[1] * rotated + biases)
    return Traffic(stream, inner)
