"""How long one optimizer step takes.

A roofline of what a rank computes (matrix products at an efficiency that falls with small sizes,
attention, everything else by its bytes), collectives on the real links, what of them hides behind
computing, the bubble of a pipeline, the optimizer. Some twelve numbers of it are measured, not
known: `Constants`, one set a GPU and software (constants.yaml), fitted by `python -m
rekindle.plan.fit`. Attention after Dao 2023 (arXiv 2307.08691); pipelines after Narayanan et al.
2021 (arXiv 2104.04473); sequence parallelism after Korthikanti et al. 2022 (arXiv 2205.05198)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rekindle.plan.cluster import Cluster, Group, groups
from rekindle.plan.traffic import traffic
from rekindle.plan.work import Work

FORWARD = 1  # products; each of the gradients costs what the forward pass costs


@dataclasses.dataclass(frozen=True)
class Constants:
    """What cannot be read off a data sheet.

    Of the GPU: `matrix_efficiency` is the share of the peak that large products reach;
    `matrix_half` the size at which a dimension costs as much again (elements);
    `attention_efficiency` that of attention's forward pass. Of the software: `attention_half`
    (tokens), `attention_backward` (times the forward's seconds); `memory_efficiency`, the share of
    the memory's bandwidth that everything else reaches; `logit_bytes` that the loss moves a token
    and entry of the vocabulary; `inside_efficiency` and `between_efficiency`, what large
    collectives reach of the links' peaks; `hop_seconds` a rank of a ring; `contention`, the share
    of hidden communication that slows computing down, `replica_contention` that of replicas, who
    exchange gradients only; `launch_seconds` of the host for a block's
    kernels, `stage_seconds` for a micro-batch on a stage of a pipeline."""

    matrix_efficiency: float
    matrix_half: float
    attention_efficiency: float
    attention_half: float
    attention_backward: float
    memory_efficiency: float
    logit_bytes: float
    inside_efficiency: float
    between_efficiency: float
    hop_seconds: float
    contention: float
    replica_contention: float
    launch_seconds: float = 0.0
    stage_seconds: float = 0.0
    optimizer_bytes: float = 28.0


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
    return _Model(work, cluster, constants).step()


class _Model:
    def __init__(self, work: Work, cluster: Cluster, constants: Constants) -> None:
        self.work, self.cluster, self.c = work, cluster, constants
        self.links = groups(cluster, work.layout)
        self.backward = 1 if work.lora_rank else 2  # frozen weights need no gradients of their own
        gpu = cluster.gpu
        peaks = {name: value * 1e12 for name, value in gpu.tflops.items()}
        self.peak = peaks[work.precision]
        self.half_peak = peaks["bf16"] if work.precision == "fp8" else self.peak
        self.bandwidth = gpu.bandwidth_bytes_per_second

    def step(self) -> StepTime:
        work, layout = self.work, self.work.layout
        one = self._pass()
        turns = work.accumulation
        spread = one.computing + one.tensor + one.context
        gathered, reduced = self._sharded()
        each = gathered + reduced if layout.pp == 1 else 0.0
        launched = self.c.launch_seconds * work.blocks + self._hosted()
        occupied = max(one.computing, launched)  # exchanges hide behind the host, too
        backward = occupied * self.backward / (FORWARD + self.backward)
        kept = gathered + reduced if layout.pp > 1 else 0.0
        hidden = self._exposed(each, occupied, self.c.contention) * turns
        hidden += self._exposed(kept, backward, self.c.contention)
        # weights that come back from the optimizer's shards have no backward pass to hide behind
        alone = self.c.contention if work.sharding == "optimizer" else self.c.replica_contention
        hidden += self._exposed(self._once(), backward, alone)
        bubble = spread * (layout.pp - 1) * self._bubble_share()
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
            "optimizer": self._optimizer(),
        }
        terms["waiting for the host"] = (occupied - one.computing) * turns
        return StepTime({name: seconds for name, seconds in terms.items() if seconds > 0})

    def _hosted(self) -> float:
        """Of the host, for what a pipeline does around each micro-batch of a stage."""
        return self.c.stage_seconds * self.work.turns if self.work.layout.pp > 1 else 0.0

    # Computing

    def _product(self, tokens: float, inputs: float, outputs: float, peak: float) -> float:
        small = self.c.matrix_half / inputs + self.c.matrix_half / outputs
        flops = 2.0 * tokens * inputs * outputs
        return flops / (peak * self.c.matrix_efficiency) * (1.0 + small)

    def _pass(self) -> _Pass:
        work, shape, tp = self.work, self.work.shape, self.work.layout.tp
        tokens, blocks = work.tokens, work.blocks
        products = sum(
            self._product(
                tokens,
                m.inputs / (tp if m.divided == "row" else 1),
                m.outputs / (tp if m.divided == "column" else 1),
                self.peak,
            )
            for m in shape.matrices
        )
        width = shape.heads * shape.head_dim / tp
        squares = 4.0 * tokens * work.sequence * width * (0.5 if shape.causal else 1.0)
        attention = squares / (self.half_peak * self.c.attention_efficiency)
        attention *= 1.0 + self.c.attention_half / work.sequence
        forward, backward = self._stream()
        tensor, context = self._tensor(), self._context()
        again = {
            "none": 0.0,
            "selective": forward,
            "full": products + attention + forward,
        }[work.checkpointing]
        if work.checkpointing == "full":
            tensor, context = tensor * 1.5, context * 1.5
        return _Pass(
            products=products * (FORWARD + self.backward) * blocks,
            attention=attention * (1.0 + self.c.attention_backward) * blocks,
            stream=(forward + backward) * blocks, recomputed=again * blocks,
            head=self._head(), tensor=tensor * blocks, context=context * blocks,
        )  # fmt: skip

    def _stream(self) -> tuple[float, float]:
        work, tp = self.work, self.work.layout.tp
        moved = traffic(work.shape, work.compile)
        speed = self.bandwidth * self.c.memory_efficiency / (work.tokens * work.compute_bytes / 2)
        shared = tp if work.along_sequence else 1
        forward, backward = (
            (whole / shared + inner / tp) / speed
            for whole, inner in zip(moved.stream, moved.inner, strict=True)
        )
        return forward, backward

    def _head(self) -> float:
        shape, tokens = self.work.shape, self.work.tokens
        if not shape.causal:
            return 0.0
        entries = shape.vocab / self.work.layout.tp
        products = self._product(tokens, shape.d_model, entries, self.half_peak)
        moved = self.c.logit_bytes * tokens * entries / self.bandwidth
        return products * (FORWARD + self.backward) + moved

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
        reduce = self._ring(group, self._trained() * work.compute_bytes) + hops
        return calls * gather, reduce

    def _once(self) -> float:
        """Seconds to add up the gradients of replicas, once a step."""
        work, layout = self.work, self.work.layout
        held = self._trained()
        if work.sharding == "optimizer":
            whole = self.cluster.group(layout.shard * layout.dp, layout.tp * layout.cp)
            return 2 * self._ring(whole, held * work.compute_bytes)
        shards = layout.shard * layout.cp
        return 2 * self._ring(self.links["dp"], held / shards * 4)

    def _exposed(self, exchanging: float, computing: float, contention: float) -> float:
        """What is not hidden behind computing, and what the hidden part costs it."""
        together = min(exchanging, computing)
        return max(0.0, exchanging - computing) + contention * together

    def _bubble_share(self) -> float:
        if self.work.layout.schedule == "zero_bubble":
            return 1 / (3 * self.work.turns)
        return 1 / self.work.turns

    def _between_stages(self) -> float:
        """Seconds to hand a micro-batch on, there and back."""
        work, layout = self.work, self.work.layout
        if layout.pp == 1:
            return 0.0
        size = work.tokens * work.shape.d_model * work.compute_bytes
        size //= layout.tp if work.along_sequence else 1
        speed = self._speed(self.cluster.group(2, layout.world // layout.pp))
        return 2 * work.turns * (size / speed + self.c.hop_seconds)

    def _optimizer(self) -> float:
        layout = self.work.layout
        shards = layout.shard * layout.cp
        return self.c.optimizer_bytes * self._trained() / shards / self.bandwidth
