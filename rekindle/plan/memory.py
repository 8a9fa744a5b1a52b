"""What one rank holds at the worst moment of a step, also under DeepSpeed's ZeRO, and what a device
needs for that: memory.yaml has what allocator, CUDA and NCCL take."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rekindle.plan.inflight import Moment, moments
from rekindle.plan.tensors import Rank
from rekindle.plan.work import Work
from rekindle.spec.layout import Layout
from rekindle.tables import rows

FILE = Path(__file__).with_suffix(".yaml")
_MASTER = 12  # weights in full precision and two moments


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its worst moment, in `phase`, by `terms`; `pp_rank`: the worst place."""

    terms: Mapping[str, int]
    phase: str
    pp_rank: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.terms.values())

    @property
    def dominant(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


class Peak(Rank):
    """The moments of a step, one of which is the worst."""

    def worst(self) -> Memory:
        # a pipeline keeps a buffer for each micro-batch that it receives, in either direction
        near = [stage + way for stage in self.stages for way in (-1, 1)]
        ways = sum(0 <= stage <= self.final and stage not in self.stages for stage in near)
        received = ways * self.stream * self.size * self.work.accumulation
        held = {**self.static(), "pipeline buffers": received}
        found = [("optimizer", self.optimizing())]
        for at in moments(self.layout, self.pp_rank, self.work.accumulation):
            passes = self._backward(at) if at.is_backward else self._forward(at)
            found += [("backward" if at.is_backward else "forward", terms) for terms in passes]
        whole = [(name, {**held, **terms}) for name, terms in found]
        name, terms = max(whole, key=lambda moment: sum(moment[1].values()))
        return Memory({k: v for k, v in terms.items() if v}, name, self.pp_rank)

    def optimizing(self) -> dict[str, int]:
        return {"gradients": self.gradients((True,) * len(self.stages), ending=True)}

    def _terms(self, gradients: int, copies: int, saved: int, more: int) -> dict[str, int]:
        there = {"gradients": gradients, self.copied: copies}
        return {**there, "activations": saved, "temporaries": more}

    def _in_blocks(self, counts: Sequence[int]) -> int:
        return sum(n * blocks for n, blocks in zip(counts, self.blocks, strict=True))

    def _forward(self, at: Moment) -> Iterator[dict[str, int]]:
        """At the loss; and before there are activations, where FSDP gathers the ends, and where a
        teacher runs."""
        before, copies = self.gradients(at.there), self.copies(self._in_blocks(at.held), False)
        yield self._terms(before, copies, self.activations(at), self.loss(at.stage) + self.left)
        if self.grouped:
            most = self.root + (self.embedding or self.block)
            yield self._terms(before, 2 * self.compute * most, 0, 0)
        yield self._terms(before, self.taught[1], 0, self.teaching())

    def _backward(self, at: Moment) -> Iterator[dict[str, int]]:
        """In the first two blocks that it goes through, and the last two; then in the ends."""
        count, there, halved = self.blocks[at.stage], at.there[at.stage], self._in_blocks(at.halved)
        before, saved = self.gradients(at.there), self.activations(at) + halved * self.halved
        for done in sorted({0, 1, count - 2, count - 1} & set(range(count))):
            more = self.of_head + self.in_block() + (0 if halved else self.recomputed)
            copies = self.copies(self._in_blocks(at.held), backward=True)
            if self.sharded and self.single:
                # what was reduced last: of the block before, or of the last micro-batch
                more += self.exact * self.trained_block if done else self.left
                if self.group == 1:
                    copies -= self.compute * done * self.block
                elif done + 1 == count:  # the embedding comes next
                    copies += self.compute * (self.embedding - self.block)
            gradients = before + self.added(done * self.trained_block, there)
            yield self._terms(gradients, copies, saved - done * self.kept, more)
        if self.sharded:
            yield from self._ending()
        elif self.stages[at.stage] == 0:
            yield self._at_table(there)

    def _at_table(self, there: bool) -> dict[str, int]:
        """The end of a backward pass without FSDP: of a tied table the head's gradient, too."""
        table = self.shape.table // (self.layout.tp if self.shape.causal else 1)
        tied = self.shape.causal and self.shape.head is None and self.single
        again = there or self.replicated
        more = 0 if self.adapters else self.stored * table * (2 if tied else int(again))
        more += self.added(self.count * self.trained_block, there) if there else 0
        after = self.gradients((True,) * len(self.stages), ending=True)
        return self._terms(after, self.copies(0, self.again), 0, more)

    def _ending(self) -> Iterator[dict[str, int]]:
        """The end of the last backward pass, when FSDP reduces what the ends have left."""
        after, ends = self.optimizing()["gradients"], self.trained_ends
        if not self.grouped:
            divided = after if self.single else self.stored * self.trained // self.group
            copies = 0 if self.single else self.copies(0, True)
            yield self._terms(divided + self.exact * ends, copies, 0, self.exact * ends)
            return
        first, embedding = after - after * ends // max(1, self.trained), self.embedding
        if self.adapters:
            embedding = 0
        gathered, head = self.compute * embedding, self.of_head
        # of a tied table its own gradient and the sum
        more, copies = head * (1 if embedding else 3), self.compute * self.root + 2 * gathered
        yield self._terms(first + more, copies, 0, self.exact * self.trained_block)
        yield self._terms(first + self.compute * ends, gathered, 0, self.exact * (ends - embedding))
        yield self._terms(first + head, gathered, 0, self.exact * embedding)


class ZeroPeak(Peak):
    """Of a rank of DeepSpeed's ZeRO (0.19.8), held against what ranks held on CPUs; all hold as
    much. What offload leaves on a GPU has not been measured on one."""

    def __init__(self, work: Work) -> None:
        assert work.zero is not None
        self.zero, self.ranks = work.zero, work.layout.world
        width = 2 if work.precision == "bf16" else 4
        alone = Layout(micro_batch_size=work.layout.micro_batch_size)
        super().__init__(dataclasses.replace(work, layout=alone, weights_bytes=width), 0)
        self.copied = "communication buffers" if self.zero.stage == 2 else "gathered weights"
        self.buffers = self.stored * self.zero.bucket * self.zero.buckets
        if self.zero.stage == 3:
            self.of_head = self.of_half = 0  # in the bucket, which copies counts
        self.everything = self.count * self.block + self.ends
        # elements of which this rank has the moments
        self.mine = self.trained // (self.ranks if self.zero.stage else 1)

    def static(self) -> dict[str, int]:
        zero, third, here = self.zero, self.zero.stage == 3, not self.zero.optimizer_offloaded
        kept = self.stored * self.everything // (self.ranks if third else 1)
        return {
            "parameters": 0 if zero.parameters_offloaded else kept,
            "optimizer": here * (_MASTER if zero.stage else 8) * self.mine,
            "divided gradients": here * third * self.stored * self.mine,
            "communication buffers": 0 if zero.stage == 2 else self.buffers,
            "teacher": self.taught[0],
        }

    @property
    def offloaded(self) -> int:
        """Bytes of the host's memory: moments, gradients in full precision, weights."""
        moved = self.zero.optimizer_offloaded * (_MASTER + 4) * self.mine
        weights = self.stored * self.everything // self.ranks
        return moved + self.zero.parameters_offloaded * weights

    @property
    def snapshot(self) -> int:
        return _MASTER * self.mine

    def gradients(self, there: tuple[bool, ...], ending: bool = False) -> int:
        stage, whole = self.zero.stage, self.stored * self.trained
        part = whole // self.ranks
        if stage == 3 or (stage == 2 and self.zero.optimizer_offloaded):
            return 0
        if stage == 2:
            return part * (any(there) + (ending and self.work.accumulation > 1))
        # beside them this rank's part, or a bucket
        added = part if stage else min(whole, self.stored * 500_000_000)
        return whole * (any(there) or ending) + added * ending

    def added(self, weights: int, there: bool) -> int:
        """Stage 2 has those in its bucket whole, and so has stage 3, in a piece (`copies`)."""
        if self.zero.stage < 2:
            return super().added(weights, there)
        whole = min(weights, self.zero.bucket) if self.zero.stage == 2 else 0
        return self.stored * (whole + (not there) * (weights - whole) // self.ranks)

    def optimizing(self) -> dict[str, int]:
        """Gradients in full precision, and the narrow ones that they and new weights come from."""
        stage, wide, here = self.zero.stage, 4 * self.half, not self.zero.optimizer_offloaded
        if stage == 0:
            return {"gradients": self.stored * self.trained}
        if stage == 3:
            each = wide + self.stored if self.half else 4
            return {"gradients": here * each * min(self.mine, self.zero.updated)}
        found = here * (wide + 2 * self.stored) * self.mine
        return {"communication buffers": 0, "gradients": found}

    def copies(self, held: int, backward: bool) -> int:
        """Stage 3: what may stay and the block in work; backward, a bucket in one piece as well."""
        if self.zero.stage == 2:
            return backward * self.buffers
        if self.zero.stage < 3:
            return 0
        live = min(self.everything, self.zero.gathered + self.block + self.embedding)
        return self.stored * (live + backward * min(self.trained, self.zero.bucket))

    def worst(self) -> Memory:
        """At first, before anything is divided, every rank has the whole network in fp32."""
        start = Memory({"whole network at the start": 4 * self.everything}, "start")
        return max(super().worst(), start, key=lambda memory: memory.peak_bytes)


def needed(peak_bytes: int) -> int:
    """What a device must have for a peak of tensors: them, what the allocator reserves beyond, and
    what CUDA and NCCL take. 10 GiB of tensors need 13."""
    table = rows(FILE)
    reserve = round(peak_bytes * table["reserve"]["share"])
    return int(peak_bytes + reserve + table["context_bytes"])


def memory(work: Work, pp_rank: int | None = None) -> Memory:
    """Of the worst rank, or of a place on the pipeline."""
    pp = work.layout.pp
    places = sorted({0, 1 % pp, (pp - 2) % pp, pp - 1}) if pp_rank is None else [pp_rank]
    return max((_rank(work, place).worst() for place in places), key=lambda one: one.peak_bytes)


def least_bytes(work: Work) -> int:
    """What its first rank holds in the optimizer: a bound below `memory`, found in little time."""
    rank = _rank(work, 0)
    return sum(rank.static().values()) + rank.optimizing().get("gradients", 0)


def snapshot_bytes(work: Work) -> int:
    """Host memory that one rank's copies take while a checkpoint is saved, on the worst place of
    the pipeline: with AdamW in fp32 12 bytes a trained parameter."""
    return max(_rank(work, place).snapshot for place in range(work.layout.pp))


def offloaded_bytes(work: Work) -> int:
    """Host memory that one rank's weights and moments take in the place of the device's."""
    return ZeroPeak(work).offloaded if work.zero else 0


def _rank(work: Work, pp_rank: int) -> Peak:
    return ZeroPeak(work) if work.zero else Peak(work, pp_rank)
