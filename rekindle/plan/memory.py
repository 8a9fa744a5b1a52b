"""What one rank holds in memory at the worst moment of a step, in closed form.

A few moments of a step may be the worst (in attention, at the loss, at a block of the backward
pass, at its end, in the optimizer); each is a sum of sizes of tensors (tensors.py), and tests hold
the largest against traces of the engine itself (rekindle/train/trace.py). What the allocator keeps
on top of tensors, and CUDA and NCCL for themselves, are named terms from memory.yaml."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rekindle.plan.tensors import Rank
from rekindle.plan.work import Work

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
    found = [_Moments(work, place).worst() for place in asked]
    return max(found, key=lambda memory: memory.peak_bytes)


class _Moments(Rank):
    """Of a rank, the worst."""

    @property
    def copies(self) -> str:
        """What the copies of weights are called."""
        return "gathered weights" if self.sharded else "copies of weights"

    def worst(self) -> Memory:
        """The largest of the moments."""
        held = {**self.static(), "pipeline buffers": self._received()}
        before, after = self.gradients(True), self.gradients(False)
        moments = [
            *(("forward", {"gradients": before, **terms}) for terms in self._forward()),
            *(("backward", terms) for terms in self._backward(before)),
            *(("backward", terms) for terms in self._ending(after)),
            ("optimizer", {"gradients": after}),
        ]
        name, terms = max(moments, key=lambda moment: sum(moment[1].values()))
        return Memory({k: v for k, v in {**held, **terms}.items() if v}, name, self.pp_rank)

    def _saved(self) -> int:
        """For the backward passes of all micro-batches under way."""
        held = sum(n * blocks for n, blocks in zip(self.counts, self.blocks, strict=True))
        saved = held * self.kept() + max(self.counts) * self.ends_kept() + self._sent()
        if self.adapters and self.first and self.work.checkpointing == "none":
            saved -= self.entering()  # no gradient flows into the first norm
        return saved + self.inputs_held()

    def _forward(self) -> Iterator[dict[str, int]]:
        """At the loss, and in the attention of the last block before it."""
        copies, _ = self.passing(self.block + self.adapters)
        terms = {self.copies: copies, "activations": self._saved()}
        left = 0
        if self.sharded and self.layout.pp == 1 and self.work.accumulation > 1:
            # FSDP lets go of what it reduced last in the next backward pass only
            left = self.exact * self.trained_ends
        yield {**terms, "temporaries": self.loss() + left}
        if self.work.checkpointing == "none":  # its feed-forward has not been yet
            scores = self.attention_forward()
            yield {
                **terms, "activations": terms["activations"] - self.mlp(), "temporaries": scores
            }  # fmt: skip

    def _backward(self, before: int) -> Iterator[dict[str, int]]:
        """At the first blocks that it goes through, and at the last ones; `before` are gradients
        that are there already."""
        saved, kept, again = self._saved(), self.kept(), 0
        if self.work.checkpointing != "none":
            again = self.whole() - (self.products() if self.work.checkpointing != "full" else 0)
            _, copies = self.passing(self.block + self.adapters)
            yield {
                "gradients": before, self.copies: copies,
                "activations": saved + self.loss_kept(),
                "temporaries": self.norm_and_attention() + self.attention_forward(),
            }  # fmt: skip
        for done in {0, 1, self.count - 2, self.count - 1}:
            if 0 <= done < self.count:
                yield {**self._at_block(done, again, before), "activations": saved - done * kept}

    def _at_block(self, done: int, again: int, before: int) -> dict[str, int]:
        """The backward pass of a block, when it has gone through `done` of them."""
        _, backward = self.passing(self.block + self.adapters)
        temporaries, gradients = again + self.mlp_backward(), before + self._head_gradient()
        if self.layout.pp == 1:
            if not before:
                gradients += done * self.each_gradient * self.trained_block // self.group
            if self.sharded and done:  # those of the block before are being reduced
                temporaries += self.reduced()
            if self.sharded and self.group > 1 and done + 1 == self.count:  # there is no next one
                backward -= self.gathered * (self.block + self.adapters)
        if self.layout.schedule == "zero_bubble" and self.layout.pp > 1:
            # gradients of weights come later, and what they are made of waits for them: gradients
            # of all products of a stage, and what was computed again, of as many micro-batches
            # as there are ranks: that number is seen in traces, not derived
            outputs = self.outputs(self.shape.matrices)
            stage = max(self.blocks)
            temporaries += stage * self.compute * self.tokens * outputs
            temporaries += (stage * min(self.layout.pp, self.work.accumulation) - 1) * again
        return {
            "gradients": gradients, self.copies: backward, "temporaries": temporaries,
        }  # fmt: skip

    def _head_gradient(self) -> int:
        """Of the head, made before those of the blocks."""
        if not self.last or not self.shape.causal or self.adapters:
            return 0
        if self.sharded and self.layout.pp == 1:
            return self.compute * self.head() * self.hidden
        if self.layout.pp > 1 or (self.layout.only_replicates and self.layout.world > 1):
            return 0
        return self.stored * self.head() * self.hidden if self.work.accumulation == 1 else 0

    def _ending(self, after: int) -> Iterator[dict[str, int]]:
        """The end of the last backward pass: what lies before the first block."""
        ends = self.trained_ends
        head = self.compute * self.head() * self.hidden if self.last and self.shape.causal else 0
        if self.sharded and self.layout.pp > 1:
            # gradients that were kept whole are reduced, those of the ends last
            shards = self.stored * self.trained() // self.group
            _, copies = self.passing(self.block + self.adapters)
            whole = self.exact * ends
            yield {"gradients": shards + whole, self.copies: copies, "temporaries": whole}
            yield {"gradients": after, self.copies: copies, "temporaries": self.reduced()}
            return
        if self.sharded:
            # reduced in fp32: first from all gradients, then into the shard, when only the loss'
            # gradient of the head is left; weights are not gathered any more
            first = after - self.each_gradient * ends // self.group
            yield {"gradients": first, "temporaries": (self.exact + self.gathered) * ends}
            yield {"gradients": after, "temporaries": self.exact * ends + head}
            return
        table = self.shape.table // (self.layout.tp if self.shape.causal else 1)
        table = table if self.first and not self.adapters else 0
        tied = self.shape.causal and self.shape.head is None and self.last
        there = self.work.accumulation > 1 or self.layout.world > 1
        copies = self.passing(self.block + self.adapters)[0] if self.layout.tp == 1 else 0
        yield {  # of a tied table the head's gradient waits for its own
            "gradients": after, self.copies: copies,
            "temporaries": self.stored * table * (2 if tied else int(there)),
        }  # fmt: skip

    def _received(self) -> int:
        """What a pipeline receives into: one buffer a micro-batch and direction, which it keeps."""
        if self.layout.pp == 1:
            return 0
        ways = sum((stage > 0) + (stage < self.final) for stage in self.stages)
        return ways * self.stream * self.part * self.hidden * self.work.accumulation

    def _sent(self) -> int:
        """Outputs, which a pipeline holds until their backward pass; schedules of two stages a rank
        hold all that they have sent until the end of the step."""
        if self.layout.pp == 1:
            return 0
        sent, two, micro = 0, len(self.stages) > 1, self.work.accumulation
        for stage, count in zip(self.stages, self.counts, strict=True):
            if stage < self.final:
                sent += micro if two and stage + 1 not in self.stages else count
            if stage > 0 and two and stage - 1 not in self.stages:
                sent += micro - count
            if stage > 0 and (self.stream >= 4 or self.work.checkpointing != "none"):
                sent -= count  # its first block's input is a buffer
        return sent * self.stream * self.part * self.hidden
