"""What one rank holds in memory at the worst moment of a step, in closed form.

Derived tensor by tensor from what rekindle's engine runs: transformers' eager blocks, autocast over
fp32 weights on replicas, FSDP2 with bf16 weights, torch's pipeline schedules. Every number here is
bytes an element or a count of tensors, none is fitted; tests hold the result against traces of the
engine itself (rekindle/train/trace.py). What the allocator keeps on top of tensors, and CUDA and
NCCL for themselves, are named terms from memory.yaml.

Shapes: T tokens of a micro-batch on a rank, H d_model, Q and K the widths of queries and of keys on
one tp rank, F the feed-forward's, V its rows of the vocabulary."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rekindle.plan.inflight import in_flight
from rekindle.plan.work import Work

LOGITS_AT_ONCE = 1 << 23  # elements, as rekindle/train/objective.py has it
FILE = Path(__file__).with_suffix(".yaml")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of tensors on one rank at its worst moment, which is in `phase`; `terms` add up to it.
    `pp_rank` is the worst place on a pipeline."""

    terms: Mapping[str, int]
    phase: str
    pp_rank: int = 0

    @property
    def peak_bytes(self) -> int:
        """All terms."""
        return sum(self.terms.values())

    @property
    def dominant(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda name: self.terms[name])


@dataclasses.dataclass(frozen=True)
class Needed:
    """What a device must have for a peak of tensors: them, what the allocator reserves beyond, and
    what CUDA and NCCL take."""

    tensors: int
    reserve: int
    context: int

    @property
    def bytes(self) -> int:
        """All of it: 10 GiB of tensors need 13."""
        return self.tensors + self.reserve + self.context


def needed(peak_bytes: int) -> Needed:
    """For a peak of tensors, closed form or traced."""
    table = _table()
    return Needed(peak_bytes, round(peak_bytes * table["reserve"]["share"]), table["context_bytes"])


@functools.cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return table


def memory(work: Work, pp_rank: int | None = None) -> Memory:
    """Of the worst rank, or of a place on the pipeline."""
    pp = work.layout.pp
    places = {0, 1, pp - 2, pp - 1} if pp > 1 else {0}
    asked = [pp_rank] if pp_rank is not None else sorted(p for p in places if 0 <= p < pp)
    found = [_Rank(work, place).worst() for place in asked]
    return max(found, key=lambda memory: memory.peak_bytes)


class _Rank:
    """The numbers of one rank. Bytes an element: `stored` of weights and moments, `gathered` of the
    weights that FSDP puts together, `compute` of products, `stream` of the residual stream, `exact`
    of sums that are too long for half precision."""

    def __init__(self, work: Work, pp_rank: int) -> None:
        self.work, self.shape, self.layout, self.pp_rank = work, work.shape, work.layout, pp_rank
        layout, shape, tp = work.layout, work.shape, work.layout.tp
        self.half = work.precision in ("bf16", "fp16", "fp8")
        self.sharded = not layout.only_replicates and layout.dp * layout.shard * layout.cp > 1
        self.stored = 8 if work.precision == "fp64" else work.weights_bytes
        self.compute = 2 if self.half else self.stored
        self.gathered = 2 if self.half else self.stored
        self.exact = max(4, self.stored if not self.half else 4)
        self.rms = shape.norm == "rms"
        narrow = self.sharded or self.stored == 2
        self.stream = self.compute if narrow and (self.rms or shape.causal) else self.stored
        if self.half and not shape.causal:
            self.stream = 4  # CUDA's autocast computes layer_norm in fp32, and the stream is one
        self.casts = self.half and (self.stream > 2 or not self.rms)
        self.along = tp > 1 and shape.causal and self.rms
        self.tokens = work.tokens
        self.part = self.tokens // tp if self.along else self.tokens
        self.query = shape.heads * shape.head_dim // tp
        self.keys = shape.kv_heads * shape.head_dim // tp
        self.inner, self.hidden = shape.ffn // tp, shape.d_model
        self.group = layout.shard * layout.cp
        self._cut()

    def _cut(self) -> None:
        """What this rank has: blocks of each of its stages, elements of a block and of the ends."""
        work, layout, shape = self.work, self.layout, self.shape
        stages, place = layout.stages, self.pp_rank
        mine = [place]
        if stages > layout.pp:
            looped = layout.schedule == "interleaved"
            mine = [place, place + layout.pp if looped else stages - 1 - place]
        each, more = divmod(shape.layers, stages)
        self.blocks = [each + (stage < more) for stage in mine]
        self.stages = mine
        self.first, self.last = 0 in mine, stages - 1 in mine
        first, last = work.ends_share()
        self.block = work.block_share()
        self.ends = (first if self.first else 0) + (last if self.last else 0)
        if layout.pp > 1 and self.first and self.last and shape.head is None and shape.causal:
            pass  # a tied table lies on both of its stages, also where one rank has them
        self.adapters = work.adapters_share()
        self.trained_block = self.adapters or self.block
        head = shape.head.parameters if shape.head and not shape.causal else 0
        self.trained_ends = (head if self.last else 0) if self.adapters else self.ends
        self.count = sum(self.blocks)
        self.counts = in_flight(layout, place, work.accumulation)

    # What is there between two steps

    def _weights(self) -> int:
        block = self.block + self.adapters
        return self.stored * (self.count * block + self.ends) // self.group

    def _trained(self) -> int:
        """Elements of the trained weights on this rank, whole."""
        return self.count * self.trained_block + self.trained_ends

    def _static(self) -> dict[str, int]:
        trained = self.stored * self._trained() // self.group
        return {"parameters": self._weights(), "optimizer": 2 * trained}

    # What a block keeps for its backward pass

    def _norm_and_attention(self) -> int:
        """Until the attention's output matrix has been given its input."""
        tokens, part, hidden = self.tokens, self.part, self.hidden
        wide = max(4, self.stream)
        if self.rms:  # the input in fp32, the normalised, the scale
            kept = (wide + self._scaled()) * part * hidden + 4 * part
        else:  # the input in fp32, mean and scale
            kept = wide * part * hidden + 8 * part
        kept += self._inputs(3)
        kept += self.compute * tokens * (2 * self.query + 2 * self.keys * self.layout.cp)
        if self.work.shape.model_type == "qwen3":  # two more norms, of each head
            both = self.query + self.keys
            kept += ((4 + 2) if self.half else 2 * self.compute) * tokens * both
        return kept + self._scores()

    def _scaled(self) -> int:
        """The normalised, which only a norm's own weights need."""
        return 0 if self.adapters else self.stream

    def _inputs(self, matrices: int) -> int:
        """Of matrices that share an input: autocast casts it for each of them."""
        size = self.tokens * self.hidden
        if self.casts:
            return matrices * 2 * size
        return (self.compute if self.rms else max(4, self.stream)) * size

    def _pairs(self) -> int:
        """Pairs of tokens, of all heads here."""
        return self.tokens * self.work.sequence * self.shape.heads // self.layout.tp

    def _scores(self) -> int:
        if self.shape.attention_dropout:  # softmax in fp32, what is kept of it, and the product
            return (self.exact + 2 * self.compute) * self._pairs()
        kept = 4 * self.tokens * self.shape.heads // self.layout.tp  # log of the sums
        if self.layout.cp > 1:  # a mask as numbers
            kept += self.compute * self.tokens * self.work.sequence
        return kept

    def _mlp(self) -> int:
        """The rest of the block."""
        tokens, part, hidden = self.tokens, self.part, self.hidden
        wide = max(4, self.stream)
        if self.rms:
            kept = (wide + self._scaled()) * part * hidden + 4 * part
        else:
            kept = wide * part * hidden + 8 * part
        kept += self._inputs(2 if self.shape.gated else 1)
        if self.shape.dropout:  # a byte an element; DistilBERT's attention has none behind it
            kept += tokens * hidden * (1 if self.shape.model_type == "distilbert" else 2)
        return kept + self._activation() * tokens * self.inner

    def _activation(self) -> int:
        """Bytes a token and column of the feed-forward that the backward pass needs."""
        if self.shape.gated:  # gate, up, silu of the gate, their product
            return 4 * self.compute
        if self.shape.model_type == "gpt2":  # x, x^3's x, tanh, 1 + tanh, the product: written out
            return 12 + 2 * self.compute if self.half else 5 * self.compute
        return 2 * self.compute  # gelu's input and output

    def _kept(self) -> int:
        """Of one block, between its forward and its backward pass."""
        if self.work.checkpointing == "none":
            return self._whole()
        entry = self.stream * self.part * self.hidden
        if self.work.checkpointing == "full":
            return entry
        return entry + self._products()

    def _products(self) -> int:
        """Results of matrices and of attention."""
        tp = self.layout.tp
        outputs = sum(
            m.outputs // (tp if m.divided == "column" else 1) for m in self.shape.matrices
        )
        attention = 4 * self.shape.heads // tp if not self.shape.attention_dropout else 0
        return self.tokens * (self.compute * (outputs + self.query) + attention)

    def _whole(self) -> int:
        kept = self._norm_and_attention() + self._mlp()
        if self.adapters:  # the narrow results between the two matrices of each adapter
            kept += self.compute * self.tokens * self.work.lora_rank * len(self.work.adapted)
        return kept

    # What is there for a moment only

    def _mlp_backward(self) -> int:
        """While a feed-forward's gradients are made: more than what the block has kept."""
        tokens, inner = self.tokens, self.inner
        stream = self.stream * self.part * self.hidden
        if self.shape.gated:  # gradients of product, silu and up; the product is gone
            return 2 * self.compute * tokens * inner + stream
        if self.shape.model_type == "gpt2":
            return (12 if self.half else 2 * self.compute) * tokens * inner + stream
        return self.compute * tokens * inner + stream

    def _attention_forward(self) -> int:
        """Attention written out: bias, scores and the cast weights; or nothing."""
        if not self.shape.attention_dropout:
            return 0
        return (3 if self.half else 2) * self.compute * self._pairs()

    def _loss(self) -> int:
        """While the loss makes its gradients, besides what is kept."""
        if not self.last or not self.shape.causal:
            return 0
        size, rows = self.tokens * self.hidden, self._rows()
        table = self._head() * self.hidden
        narrow = self.compute if self.compute < self.exact else 0
        cast = self.compute if self.stored != self.compute and not self.sharded else 0
        found = 2 * self.stream * size  # the last norm's output, and the chosen tokens of it
        found += 2 * size if self.stream > self.compute else 0
        found += self.exact * (size + table) + cast * table
        turns = -(-self.tokens // rows)
        logits = rows * self._head()
        making = logits * (self.exact + narrow) * (2 if turns > 1 else 1)
        adding = logits * (self.exact + narrow) + self.compute * table
        left = self.tokens - (turns - 1) * rows
        ending = left * self._head() * (self.exact + narrow) + narrow * (size + table)
        return found + max(making, adding, ending)

    def _head(self) -> int:
        return self.shape.vocab // self.layout.tp

    def _rows(self) -> int:
        return min(self.tokens, max(1, LOGITS_AT_ONCE // max(1, self._head())))

    def _loss_kept(self) -> int:
        """Gradients of hidden states and head, from the loss to its backward pass."""
        if not self.last or not self.shape.causal:
            return 0
        return self.compute * (self.tokens + self._head()) * self.hidden

    def _ends_kept(self) -> int:
        """Before the first block and behind the last one, of a micro-batch."""
        size, wide = self.part * self.hidden, max(4, self.stream)
        kept = 0
        if self.rms:  # cosines and sines
            kept += 2 * self.stream * self.tokens * self.shape.head_dim
        if self.first:
            kept += size if self.shape.dropout else 0
            kept += 0 if self.shape.causal else wide * size
        if self.last and self.shape.causal:
            kept += (wide + self._scaled() if self.rms else wide) * size + 16 * self.tokens
        return kept

    def _inputs_held(self) -> int:
        """Token numbers, labels, positions of all micro-batches."""
        return 3 * 8 * self.tokens * self.work.accumulation

    # Weights and gradients on the way

    def _passing(self, block: int) -> tuple[int, int]:
        """Copies of weights that are there in the forward pass, and in the backward pass."""
        if self.sharded:
            whole = self.gathered * (self.count * block + self.ends)
            if self.layout.pp > 1 or self.group == 1:
                return whole, whole
            root = self.gathered * self.ends
            # forward: the buffer of the last block's gathering; backward: a block and the next one
            return root + self.gathered * block, root + 2 * self.gathered * block
        if not self.half or self.stored == 2:
            return 0, 0
        matrices = self.block - self.shape.block_norms
        if self.layout.tp == 1:  # autocast remembers its copies for the whole step
            return 2 * matrices * self.count, 2 * matrices * self.count
        if self.work.checkpointing != "none":
            return 2 * matrices, 2 * matrices
        # those of a tp rank's share it does not, so each micro-batch has its own
        copies = 2 * matrices * sum(map(operator.mul, self.counts, self.blocks))
        return copies, copies

    def _gradients(self, before: bool) -> int:
        """Before the last micro-batch's backward pass, or at its end."""
        trained, turns = self._trained(), self.work.accumulation
        if self.layout.pp > 1 and self.sharded:  # whole, until the last backward pass
            return self.exact * trained
        if self.layout.only_replicates and self.layout.world > 1:
            own = self.stored * trained if turns > 1 else 0  # and the buckets
            return self.stored * trained + own
        if before and turns == 1:
            return 0
        return self.stored * trained // self.group

    def _reduced(self) -> int:
        """While a block's gradients are reduced: whole, in fp32."""
        return self.exact * self.trained_block if self.sharded else 0

    # Moments

    def worst(self) -> Memory:
        """The largest of the moments."""
        name, terms = max(self._moments(), key=lambda moment: sum(moment[1].values()))
        return Memory({k: v for k, v in terms.items() if v}, name, self.pp_rank)

    def _moments(self) -> Iterator[tuple[str, dict[str, int]]]:
        static = self._static()
        kept, ends, inputs = self._kept(), self._ends_kept(), self._inputs_held()
        counts = self.counts
        saved = sum(n * blocks * kept for n, blocks in zip(counts, self.blocks, strict=True))
        saved += max(counts) * ends + inputs
        if self.adapters and self.first and self.work.checkpointing == "none":  # no gradient flows into the first norm
            saved -= max(4, self.stream) * self.part * self.hidden
        received, sent = self._buffers(counts)
        saved += sent
        forward, backward = self._passing(self.block + self.adapters)
        held = {**static, "pipeline buffers": received}
        before, after = self._gradients(True), self._gradients(False)
        yield "forward", {
            **held, "gradients": before, "gathered weights": forward, "activations": saved,
            "temporaries": self._loss(),
        }  # fmt: skip
        again = 0 if self.work.checkpointing == "none" else self._whole()
        if self.work.checkpointing == "selective":
            again -= self._products()
        attention = 0
        if self.shape.attention_dropout:
            attention = self._attention_forward() - (self._mlp() if not again else 0)
            if again:
                attention = self._norm_and_attention() + self._attention_forward()
                yield "backward", {
                    **held, "gradients": before, "gathered weights": backward,
                    "activations": saved + self._loss_kept(), "temporaries": attention,
                }  # fmt: skip
            else:
                yield "forward", {
                    **held, "gradients": before, "gathered weights": forward,
                    "activations": saved + attention,
                }  # fmt: skip
        for done in {0, 1, self.count - 2, self.count - 1}:
            if 0 <= done < self.count:
                activations = saved - done * kept
                yield (
                    "backward",
                    {**held, **self._at_block(done, again, before), "activations": activations},
                )
        yield "backward", {**held, **self._ending(after)}
        yield "optimizer", {**held, "gradients": after}

    def _at_block(self, done: int, again: int, before: int) -> dict[str, int]:
        """The backward pass of a block, when it has gone through `done` of them."""
        _, backward = self._passing(self.block + self.adapters)
        temporaries, gradients = again + self._mlp_backward(), before + self._head_gradient()
        if self.layout.pp == 1:
            if not before:
                gradients += done * self.stored * self.trained_block // self.group
            if self.sharded and done:  # those of the block before are being reduced
                temporaries += self._reduced()
            if self.sharded and self.group > 1 and done + 1 == self.count:  # there is no next one
                backward -= self.gathered * (self.block + self.adapters)
        return {
            "gradients": gradients, "gathered weights": backward, "temporaries": temporaries,
        }  # fmt: skip

    def _head_gradient(self) -> int:
        """Of the head, made before those of the blocks."""
        if not self.last or not self.shape.causal or self.adapters:
            return 0
        if self.sharded and self.layout.pp == 1:
            return self.compute * self._head() * self.hidden
        if self.layout.pp > 1 or (self.layout.only_replicates and self.layout.world > 1):
            return 0
        return self.stored * self._head() * self.hidden if self.work.accumulation == 1 else 0

    def _ending(self, after: int) -> dict[str, int]:
        """The end of the last backward pass: what lies before the first block."""
        ends = self.trained_ends
        if not self.sharded:
            table = self.shape.table // (self.layout.tp if self.shape.causal else 1)
            table = table if self.first and not self.adapters else 0
            return {"gradients": after, "temporaries": self.stored * table}
        # reduced in fp32; the loss' gradient of the head is still there, the weights are not
        head = self.compute * self._head() * self.hidden if self.last and self.shape.causal else 0
        return {"gradients": after, "temporaries": self.exact * ends + head}

    def _buffers(self, counts: list[int]) -> tuple[int, int]:
        """What a pipeline receives into, one buffer a micro-batch and direction, which it keeps; and
        the outputs that it holds until their backward pass."""
        if self.layout.pp == 1:
            return 0, 0
        size = self.stream * self.part * self.hidden
        received = sent = 0
        final = self.layout.stages - 1
        for stage, count in zip(self.stages, counts, strict=True):
            received += (stage > 0) + (stage < final)
            sent += count * (stage < final)
            if stage > 0 and (self.stream >= 4 or self.work.checkpointing != "none"):
                sent -= count  # its first block's input is a buffer
        return received * size * self.work.accumulation, sent * size
