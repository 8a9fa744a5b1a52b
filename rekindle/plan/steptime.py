"""How long one optimizer step takes.

A roofline of what a rank computes (matrix products at an efficiency that falls with small
sizes, attention, everything else by its bytes), collectives on the real links, what of
them hides behind computing, the bubble of a pipeline, the optimizer. Some twelve numbers
of it are measured, not known: `Constants`, one set a GPU and software (constants.yaml),
fitted by `python -m tests.plan.fit`. Attention after Dao 2023 (arXiv 2307.08691);
pipelines after Narayanan et al. 2021 (arXiv 2104.04473); sequence parallelism after
Korthikanti et al. 2022 (arXiv 2205.05198)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rekindle.plan import quantised, updates
from rekindle.plan.attention import BACKWARD_PRODUCTS, WRITTEN, Kernel, written_seconds
from rekindle.plan.cluster import Cluster, RankGroup, groups
from rekindle.plan.shape import ModelShape
from rekindle.plan.work import Kernels, Work, Zero

FORWARD = 1  # products; each of the gradients costs what the forward pass costs


@dataclasses.dataclass(frozen=True)
class Constants:
    """What cannot be read off a data sheet: of a GPU, of the software that runs on it,
    and of the machine around it. Shares are of a peak; constants.yaml says where each
    number comes from."""

    # Of the GPU. The share of its peak that products reach.
    matrix_efficiency: float
    # Attention of the first flash attention, which was not measured alone: the share of
    # the peak forward, the length in tokens at which half of it is lost, and how many
    # times the forward's seconds the backward pass takes. `kernels` has those that were
    # measured.
    attention_efficiency: float
    attention_half: float
    attention_backward: float
    # Of the software. How often what goes into a product and comes out is moved beside
    # computing.
    operand_passes: float
    # The share of the memory's bandwidth that everything but products reaches.
    memory_efficiency: float
    # What the loss moves for a token and an entry of the vocabulary.
    logit_bytes: float
    # What large collectives reach of the links' peaks, in a node and between nodes.
    inside_efficiency: float
    between_efficiency: float
    # Of each rank of a ring.
    hop_seconds: float
    # The share of communication beside computing that costs time all the same.
    overlapped: float
    # Of the host, for a block's kernels; `gather_launches` of that come on top where
    # weights are sharded.
    launch_seconds: float = 0.0
    gather_launches: float = 0.0
    # For a token of the next step's data, which are prepared beside this step.
    data_seconds: float = 0.0
    # For what surrounds a step.
    step_seconds: float = 0.0
    # Whether kernels run while others are launched; they do not on a CPU.
    asynchronous: bool = True
    # For a micro-batch on a stage of a pipeline.
    stage_seconds: float = 0.0
    # What AdamW's update moves for an element.
    optimizer_bytes: float = 28.0
    # Of the machine, in bytes a second: what an update in the host's memory reaches, and
    # the link of one GPU to it.
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
    """The slowest rank's time; every term is in seconds a step. KeyError where the
    catalog does not know the GPU's peak in that precision."""
    if work.zero is not None:
        return _ZeroModel(work, work.zero, cluster, constants).step()
    return _Model(work, cluster, constants).step()


class _Model:
    def __init__(self, work: Work, cluster: Cluster, constants: Constants) -> None:
        self.work = work
        self.cluster = cluster
        self.constants = constants
        self.links = groups(cluster, work.layout)
        # products backward for each forward; frozen weights need no gradients of their
        # own
        self.backward = 1 if work.lora_rank else 2
        gpu = cluster.gpu
        tflops = gpu.product_tflops(work.precision, work.tf32)
        if tflops is None:
            raise KeyError(work.precision)
        self.peak = tflops * 1e12
        # in fp8 only the products of blocks have 8 bits: attention and the head have 16
        self.half_peak = gpu.tflops["bf16"] * 1e12 if work.precision == "fp8" else self.peak
        self.bandwidth = gpu.bandwidth_bytes_per_second
        self.scored = float(work.shape.causal)  # the share of tokens that the output head sees
        self.reduced_bytes = 4  # of a gradient on the wire

    def step(self) -> StepTime:
        """The time of a step by its terms,
        of which those that take no time are left out."""
        work = self.work
        layout = self.work.layout
        one_pass = self._pass()
        micro_batches = work.accumulation
        idle = self._idle(one_pass)
        terms = {
            "matrix products": (one_pass.products + one_pass.head) * micro_batches,
            "attention": one_pass.attention * micro_batches,
            "memory traffic": one_pass.stream * micro_batches,
            "recomputation": one_pass.recomputed * micro_batches,
            "tensor parallel": one_pass.tensor * micro_batches,
            "context parallel": one_pass.context * micro_batches,
            "weights and gradients": self._weights_and_gradients(one_pass, idle),
            "pipeline bubble": self._bubble(one_pass),
            "between stages": self._between_stages() * micro_batches,
            "teacher": self._teacher() * micro_batches,
            **self._optimizer(),
        }
        terms["waiting for the host"] = idle * micro_batches + self.constants.step_seconds
        # the next step's data are prepared beside this step: only what takes longer is
        # waited for
        tokens = layout.micro_batch_size * work.sequence * micro_batches
        prepared = tokens * self.constants.data_seconds
        terms["waiting for data"] = max(0.0, prepared - sum(terms.values()))
        return StepTime({name: seconds for name, seconds in terms.items() if seconds > 0})

    def _idle(self, one_pass: _Pass) -> float:
        """Seconds of a micro-batch in which a GPU waits for the host to launch its
        kernels."""
        beside = one_pass.computing if self.constants.asynchronous else 0.0
        return max(0.0, self._launched() - beside)

    def _bubble(self, one_pass: _Pass) -> float:
        """Seconds a step in which a stage has nothing to do: smaller with more stages a
        rank, and a third where zero bubble puts gradients of weights there."""
        work = self.work
        layout = self.work.layout
        shares = 3 if layout.schedule == "zero_bubble" else 1
        seconds = one_pass.computing + one_pass.tensor + one_pass.context
        return seconds * (layout.pp - 1) * (1 / (work.turns * shares))

    def _weights_and_gradients(self, one_pass: _Pass, idle: float) -> float:
        """What gathering weights and adding up gradients costs a step beside computing,
        after the time in which the GPU is `idle`, which exchanges fill first."""
        gathered, reduced = self._sharded()
        exchanging = gathered + reduced
        # a pipeline gathers and reduces once a step, the others in each micro-batch
        each_pass = exchanging
        each_step = 0.0
        if self.work.layout.pp > 1:
            each_pass = 0.0
            each_step = exchanging
        # what happens once a step has the last backward pass to hide behind
        backward_share = FORWARD + self.backward
        backward = one_pass.computing * self.backward / backward_share
        idle_left = max(0.0, idle - each_pass) * self.backward / backward_share
        contention = self._contention()
        in_passes = self._exposed(max(0.0, each_pass - idle), one_pass.computing, contention)
        seconds = in_passes * self.work.accumulation
        seconds += self._exposed(max(0.0, each_step - idle_left), backward, contention)
        seconds += self._exposed(max(0.0, self._once() - idle_left), backward, contention)
        return seconds

    def _contention(self) -> float:
        """The share of an exchange beside computing that costs time all the same."""
        return self.constants.overlapped

    def _optimizer(self) -> dict[str, float]:
        """Seconds of the optimizer, whose products are in bf16 where the GPU has it."""
        peak = self.cluster.gpu.tflops.get("bf16", self.peak / 1e12) * 1e12
        return {
            "optimizer": updates.seconds(
                self.work,
                self._trained(),
                self.work.blocks,
                peak * self.constants.matrix_efficiency,
                self.bandwidth,
                self.constants.optimizer_bytes,
            )
        }

    def _launched(self) -> float:
        """Seconds of the host for a micro-batch: its kernels, of which those that compute
        again what the forward pass did are about a third, what gathers a block's weights
        and reduces their gradients, and what a pipeline does around them."""
        again = 0.0 if self.work.checkpointing == "none" else 1 / 3
        gathers = 0.0
        if self.work.sharding == "weights" and self.links["weights"].size > 1:
            gathers = self.constants.gather_launches
        kernels = self.constants.launch_seconds * self.work.blocks * (1 + again + gathers)
        if self.work.layout.pp == 1:
            return kernels
        return kernels + self.constants.stage_seconds * self.work.turns

    # Computing

    def _product(self, tokens: float, inputs: float, outputs: float, peak: float) -> float:
        """Seconds of the operations and of what is moved for them: the weights once, what
        goes in and what comes out `operand_passes` times. 4,096 tokens, inputs and
        outputs on an H100 at 0.72 of its peak, moved twice: 0.193 ms and 0.050."""
        output_bytes = self.work.compute_bytes
        # a higher peak than that of 16 bits means 8: results have 16 all the same
        input_bytes = output_bytes if peak <= self.half_peak else 1
        operands = tokens * (inputs * input_bytes + outputs * output_bytes)
        operands *= self.constants.operand_passes
        moved = (operands + inputs * outputs * input_bytes) / self.bandwidth
        reached = peak * self.constants.matrix_efficiency
        return 2.0 * tokens * inputs * outputs / reached + moved

    def _pass(self) -> _Pass:
        """The seconds of a micro-batch, of all blocks of a rank."""
        work = self.work
        blocks = self.work.blocks
        products = sum(self._product(work.tokens, *sizes, self.peak) for sizes in work.factors)
        core_forward, core_backward = self._core()
        stream_forward, stream_backward = self._stream()
        tensor = self._tensor()
        context = self._context()
        if work.checkpointing == "full":
            # half of what is exchanged is the forward pass's, which runs again
            tensor *= 1.5
            context *= 1.5
        return _Pass(
            products=products * (FORWARD + self.backward) * blocks,
            attention=(core_forward + core_backward) * blocks,
            stream=(stream_forward + stream_backward + self._casts()) * blocks,
            recomputed=self._again(products, core_forward, stream_forward) * blocks,
            head=self._head(),
            tensor=tensor * blocks,
            context=context * blocks,
        )

    def _teacher(self) -> float:
        """Seconds of its forward pass: a third of what its training would compute."""
        work = self.work
        if work.teacher is None:
            return 0.0
        alone = dataclasses.replace(
            work, shape=work.teacher, teacher=None, checkpointing="none", lora_rank=0
        )
        return _Model(alone, self.cluster, self.constants)._pass().computing / 3

    def _again(self, products: float, core: float, stream: float) -> float:
        """What a block's backward pass computes once more, which ends before the last
        product (torch's set_checkpoint_early_stop)."""
        if self.work.checkpointing == "none":
            return 0.0
        if self.work.checkpointing == "selective":
            return stream
        matrices = self.work.shape.matrices
        last = matrices[-1]
        spared = last.inputs * last.outputs / sum(m.inputs * m.outputs for m in matrices)
        return (1.0 - spared) * products + core + stream

    def _core(self) -> tuple[float, float]:
        """Attention between its projections, of a block, forward and backward."""
        work = self.work
        shape = self.work.shape
        constants = self.constants
        width = shape.heads * shape.head_dim / work.layout.tp
        scores = width / shape.head_dim * work.tokens * work.sequence
        moved = self._moved_by_attention()
        if moved is not None:
            return written_seconds(
                scores,
                shape.head_dim,
                self.half_peak * constants.matrix_efficiency,
                self.bandwidth * constants.memory_efficiency,
                moved,
            )
        masked = 0.5 if shape.causal else 1.0
        # two products of two operations each; a mask takes off half of the scores
        flops = 4.0 * scores * shape.head_dim * masked
        kernel = self._kernel(work.attention)
        return kernel.seconds(flops, work.sequence, self.half_peak, shape.head_dim, shape.causal)

    def _moved_by_attention(self) -> tuple[float, float] | None:
        """Bytes a score, forward and backward, where no kernel runs it as a whole."""
        return WRITTEN[self.work.compile] if self.work.attention == "written" else None

    def _kernel(self, name: str) -> Kernel:
        if name in self.constants.kernels:
            return self.constants.kernels[name]
        forward = self.constants.attention_efficiency
        half = self.constants.attention_half
        backward = forward * BACKWARD_PRODUCTS / self.constants.attention_backward
        return Kernel(forward, half, backward, half)

    def _stream(self) -> tuple[float, float]:
        """What a block moves besides products and attention, forward and backward."""
        work = self.work
        tp = self.work.layout.tp
        moved = traffic(work.shape, work.kernels, work.shape.dropout > 0)
        # traffic counts numbers of 2 bytes
        reached = self.bandwidth * self.constants.memory_efficiency
        tokens_per_second = reached / (work.tokens * work.compute_bytes / 2)
        stream_ranks = tp if work.along_sequence else 1
        forward, backward = (
            (stream / stream_ranks + inner / tp) / tokens_per_second
            for stream, inner in zip(moved.stream, moved.inner, strict=True)
        )
        return forward, backward

    def _head(self) -> float:
        """Seconds of the output head and the loss, of the tokens that are scored."""
        shape = self.work.shape
        tokens = self.work.tokens * self.scored
        if not tokens:
            return 0.0
        entries = shape.vocab / self.work.layout.tp
        products = self._product(tokens, shape.d_model, entries, self.half_peak)
        moved = self.constants.logit_bytes * tokens * entries / self.bandwidth
        return products * (FORWARD + self.backward) + moved

    def _casts(self) -> float:
        """Seconds of a block's casts: what goes into a product in 8 bits, and the
        gradient of what comes out, is read once and written twice, as it is and
        transposed; 4 bits are brought back."""
        reached = self.bandwidth * self.constants.memory_efficiency
        if self.work.quantised:
            return quantised.seconds(self.work, reached)
        if self.work.precision != "fp8":
            return 0.0
        width = sum(inputs + outputs for inputs, outputs in self.work.factors)
        # two bytes read, and twice one written
        return 4.0 * self.work.tokens * width / reached

    # Exchanging

    def _ring(self, group: RankGroup, size_bytes: float) -> float:
        """All-gather of `size_bytes` in all, or reduce-scatter."""
        if group.size == 1:
            return 0.0
        # each rank has its own part already
        share = (group.size - 1) / group.size
        hops = group.size * self.constants.hop_seconds
        return size_bytes * share / self._speed(group) + hops

    def _speed(self, group: RankGroup) -> float:
        """What large collectives reach, in bytes a second."""
        if group.nodes == 1:
            return group.bytes_per_second * self.constants.inside_efficiency
        return group.bytes_per_second * self.constants.between_efficiency

    def _tensor(self) -> float:
        """Seconds of a block's exchanges among tp ranks: into the columns and out of the
        rows of attention and of the feed-forward network, forward and backward; what was
        gathered is gathered once more for its gradients."""
        if self.work.layout.tp == 1:
            return 0.0
        size = self.work.tokens * self.work.shape.d_model * self.work.compute_bytes
        # Of two halves of a block: an all-reduce each way is two calls, 8 in all. Along
        # the sequence these are a gather and a reduce each way, and the two gathers are
        # repeated.
        calls = 10 if self.work.along_sequence else 8
        return calls * self._ring(self.links["tp"], size)

    def _context(self) -> float:
        """Seconds of a block's exchanges among cp ranks: keys and values of all,
        and the sum of their gradients."""
        work = self.work
        shape = self.work.shape
        if work.layout.cp == 1:
            return 0.0
        width = 2 * shape.kv_heads * shape.head_dim / work.layout.tp
        size = work.tokens * work.layout.cp * width * work.compute_bytes
        return 2 * self._ring(self.links["cp"], size)

    def _held(self) -> float:
        """Elements of the weights on a rank before they are sharded."""
        first, last = self.work.ends_share()
        ends = first + last
        if self.work.layout.pp > 1:
            ends = max(first, last)  # the slowest stage counts
        return self.work.blocks * self.work.block_share() + ends

    def _trained(self) -> float:
        """Elements of the weights on a rank that have gradients."""
        if self.work.lora_rank:
            return self.work.blocks * self.work.adapters_share()
        return self._held()

    def _sharded(self) -> tuple[float, float]:
        """Seconds to gather the weights and to reduce their gradients, a micro-batch
        (once a step in a pipeline, which keeps them)."""
        work = self.work
        group = self.links["weights"]
        if group.size == 1 or work.sharding == "optimizer":
            return 0.0, 0.0
        # FSDP gathers for the forward pass and again for the backward pass
        calls = 1 if work.layout.pp > 1 else 2
        pieces = work.blocks + 1
        hops = (pieces - 1) * group.size * self.constants.hop_seconds
        gather = self._ring(group, self._held() * work.compute_bytes) + hops
        reduce = self._ring(group, self._trained() * self.reduced_bytes) + hops
        return calls * gather, reduce

    def _once(self) -> float:
        """Seconds to add up the gradients of replicas, once a step."""
        work = self.work
        layout = self.work.layout
        trained = self._trained()
        if work.sharding == "optimizer":
            whole = self.cluster.group(layout.shard * layout.dp, layout.tp * layout.cp)
            return 2 * self._ring(whole, trained * work.compute_bytes)
        shards = layout.shard * layout.cp
        return 2 * self._ring(self.links["dp"], trained / shards * self.reduced_bytes)

    def _exposed(self, exchanging: float, computing: float, contention: float) -> float:
        """What is not hidden behind computing, and what the hidden part costs it."""
        together = min(exchanging, computing)
        return max(0.0, exchanging - computing) + contention * together

    def _between_stages(self) -> float:
        """Seconds to hand a micro-batch on, there and back."""
        work = self.work
        layout = self.work.layout
        if layout.pp == 1:
            return 0.0
        size = work.tokens * work.shape.d_model * work.compute_bytes
        if work.along_sequence:
            size //= layout.tp
        speed = self._speed(self.cluster.group(2, layout.world // layout.pp))
        return 2 * work.turns * (size / speed + self.constants.hop_seconds)


class _ZeroModel(_Model):
    """DeepSpeed's ZeRO: stage 3 gathers weights as FSDP does, 1 and 2 share the updates
    alone. How fast the host is, is a guess."""

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
        return self.constants.overlapped if self.zero.overlaps else 1.0

    def _optimizer(self) -> dict[str, float]:
        """Seconds of the update and of what crosses to the host and back. On the host all
        ranks of a machine share its memory; gradients go there, and weights come back;
        those of stage 3 come for each pass, too."""
        zero = self.zero
        own_elements = self._trained() / self.work.layout.shard
        updating = self.constants.optimizer_bytes * own_elements / self.bandwidth
        crossing = 0.0  # elements that cross the link between a GPU and its host
        if zero.optimizer_offloaded:
            machine_elements = own_elements * self.cluster.gpus_per_node
            updating = self.constants.optimizer_bytes * machine_elements
            updating /= self.constants.host_bandwidth
            crossing += own_elements * (self.work.accumulation + 1)
        if zero.parameters_offloaded:
            crossing += 2 * self._held() / self.work.layout.shard * self.work.accumulation
        return {
            "optimizer": updating,
            "to and from the host": crossing * self.work.compute_bytes / self.constants.host_link,
        }


@dataclasses.dataclass(frozen=True)
class BlockTraffic:
    """Bytes a token that a block moves through the GPU's memory besides products and
    attention. `stream` is that of the residual stream (norms and sums), `inner` that
    between the divided matrices (activation, rotary positions); each forward, backward.

    Counted operation by operation, as many numbers as each reads and writes, of 2 bytes
    (4 where it computes in fp32): an eager block runs one kernel an operation, a fused
    one a kernel for each norm, gate and rotary position, a compiled one a kernel for each
    chain of them."""

    stream: tuple[float, float]
    inner: tuple[float, float]


def traffic(shape: ModelShape, kernels: Kernels, dropout: bool = False) -> BlockTraffic:
    """What a block of a model in 16 bits moves. A GPT-2 block, eager, 768 wide: 20
    d_model + 16 d_model forward."""
    # two norms in a block
    norms = 2 * shape.d_model
    rotated = 0
    if shape.norm == "rms":  # the families with rotary positions are those with RMS norms
        rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    stream_forward, stream_backward = _norm_traffic(shape, kernels, norms)
    if dropout:  # fused with the sum it adds a mask of a byte, forward; backward it is a kernel
        mask = 5.0 if kernels == "eager" else 1.0
        stream_forward += norms * mask
        stream_backward += norms * 5.0
    # an activation reads and writes a number; backward it reads its input and the
    # gradient
    gate_forward = 4.0
    gate_backward = 6.0
    turn_forward = 4.0
    turn_backward = 4.0
    if kernels == "eager":
        turn_forward = 20.0
        turn_backward = 26.0
        if shape.gated:
            # silu, and its product with `up`: 4 and 6; backward 6 for each factor and
            # silu
            gate_forward = 10.0
            gate_backward = 18.0
    elif shape.gated:
        # one kernel reads both, writes their product; backward reads three, writes two
        gate_forward = 6.0
        gate_backward = 10.0
    inner_forward = gate_forward * shape.ffn + turn_forward * rotated
    inner_backward = gate_backward * shape.ffn + turn_backward * rotated
    # gradients of biases read the whole gradient of what comes out
    inner_backward += sum(2.0 * m.outputs for m in shape.matrices if m.bias)
    return BlockTraffic((stream_forward, stream_backward), (inner_forward, inner_backward))


def _norm_traffic(shape: ModelShape, kernels: Kernels, norms: int) -> tuple[float, float]:
    """What `norms` elements in a block's norms and sums move, forward and backward."""
    if kernels == "compiled":  # a norm reads the sum that it is fused with, and writes both
        return norms * 8.0, norms * 12.0
    # layer norm is one kernel; RMS norm as transformers writes it is six, four of them in
    # fp32
    norm_forward = 4.0
    norm_backward = 8.0
    if kernels == "eager" and shape.norm == "rms":
        norm_forward = 34.0
        norm_backward = 60.0
    # and a sum of two, which reads twice and writes once
    return norms * (norm_forward + 6.0), norms * (norm_backward + 6.0)
