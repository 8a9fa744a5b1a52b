"""The moments of a step, one of which is the worst for the memory of a rank, in closed form. Each
is a sum of sizes of tensors (tensors.py, temporaries.py), and tests hold the largest against traces
of the engine itself (tests/plan/traced)."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from rekindle.plan import updates
from rekindle.plan.inflight import Moment, moments
from rekindle.plan.temporaries import Temporaries
from rekindle.spec.layout import Layout


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


class Moments(Temporaries):
    def worst(self) -> Memory:
        # what a pipeline receives into: one buffer a micro-batch and direction, which it keeps
        ways = sum(
            (stage > 0 and stage - 1 not in self.stages)
            + (stage < self.final and stage + 1 not in self.stages)
            for stage in self.stages
        )
        received = ways * self.stream * self.part * self.hidden * self.work.accumulation
        held = {**self.static(), "pipeline buffers": received}
        found = [("optimizer", self.optimizing())]
        for moment in self._passes():
            passes = self._backward(moment) if moment.is_backward else self._forward(moment)
            name = "backward" if moment.is_backward else "forward"
            found += [(name, terms) for terms in passes]
        found += [("backward", terms) for terms in self._ending()]
        whole = [(name, {**held, **terms}) for name, terms in found]
        name, terms = max(whole, key=lambda moment: sum(moment[1].values()))
        return Memory({k: v for k, v in terms.items() if v}, name, self.pp_rank)

    def optimizing(self) -> dict[str, int]:
        return {
            "gradients": self.gradients((True,) * len(self.stages), ending=True),
            "temporaries": updates.temporary_bytes(self.work, self.stored),
        }  # fmt: skip

    def _passes(self) -> Iterable[Moment]:
        micro = self.work.accumulation
        if self.layout.pp > 1:
            bare = Layout(pp=self.layout.pp, schedule=self.layout.schedule)
            return moments(bare, self.pp_rank, micro, tuple(self.blocks))
        done = (micro - 1,)
        return [Moment(0, backward, (1,), (0,), done, done) for backward in (False, True)]

    def _saved(self, at: Moment) -> int:
        """For the backward passes of all micro-batches under way."""
        saved = self._in_blocks(at.held) * self.kept + self._sent(at) + self.inputs_held
        saved -= at.held[-1] * self.narrowed
        return saved + sum(n * self.ends_kept(stage) for stage, n in enumerate(at.held))

    def _in_blocks(self, counts: tuple[int, ...]) -> int:
        return sum(n * blocks for n, blocks in zip(counts, self.blocks, strict=True))

    def _passing(self, at: Moment) -> tuple[int, int]:
        return self.passing(self._in_blocks(at.held), at.held[0] if self.first else 0)

    def _halved(self, at: Moment) -> int:
        return self._in_blocks(at.halved) * self.halved

    def _narrow(self, at: Moment, but: int | None = None) -> int:
        """Gradients that the second half of zero bubble's backward pass left for FSDP to widen."""
        if not self.sharded or not self.half or self.layout.schedule != "zero_bubble":
            return 0
        return self.compute * sum(
            own for number, own in enumerate(self.each)
            if number != but and self.stages[number] > 0 and at.there[number]
        )  # fmt: skip

    def _forward(self, at: Moment) -> Iterator[dict[str, int]]:
        """At the loss, and in the attention of the last block before it."""
        copies, _ = self._passing(at)
        terms = {
            "gradients": self.gradients(at.there), self.copies: copies,
            "activations": self._saved(at),
        }  # fmt: skip
        more = self._halved(at) + self._narrow(at) + self.left + self.lesson
        if self.work.teacher is not None:  # before the student's own blocks
            root = self.gathered * self.root if self.grouped else 0
            yield {
                **terms, self.copies: root + self.taught[1], "activations": self.inputs_held,
                "temporaries": self.teaching + self.left,
            }  # fmt: skip
        yield {**terms, "temporaries": self.loss(at.stage) + more}
        if not self.shape.causal:  # beside the one piece that a block's weights came in
            copies += self.gathered * (self.block + self.adapters) if self.grouped else 0
            # what the embedding and the block before gave, of which half precision keeps copies
            before = 2 * self.stream * self.part * self.hidden if self.half else 0
            yield {**terms, self.copies: copies, "temporaries": self.norms_forward + before + more}
        if self.grouped:  # the same of the ends, before there are activations
            most = 2 * self.gathered * (self.root + (self.embedding or self.block))
            yield {**terms, self.copies: most, "activations": self.inputs_held}
        if self.work.checkpointing == "none":  # its feed-forward has not been yet
            saved, scores = terms["activations"], self.attention_forward
            saved -= 0 if self.narrowed else self.mlp
            yield {**terms, "activations": saved, "temporaries": scores + more}

    def _backward(self, at: Moment) -> Iterator[dict[str, int]]:
        """At its beginning, at the first and last blocks that it goes through, and its end."""
        saved, count = self._saved(at), self.blocks[at.stage]
        before, (_, copies) = self.gradients(at.there), self._passing(at)
        terms = {"gradients": before, self.copies: copies}
        if at.halved[at.stage]:
            for more in self._halving(at):
                activations = saved + self.loss_kept(at.stage)
                yield {**terms, "activations": activations, "temporaries": more}
            return
        there = copies if self.sharded else self._passing(at)[0]  # of the forward pass still
        one_less = self.gathered * (self.block + self.adapters) if self.grouped else 0
        for activations, temporaries in self._beginning(at, saved):
            yield {
                "gradients": before, self.copies: there - one_less,
                "activations": activations, "temporaries": temporaries + self.left,
            }  # fmt: skip
        if self.stages[at.stage] == self.final:
            saved -= self.behind
        if self.work.checkpointing != "none":
            again = self.norm_and_attention + self.attention_forward
            more = self._head_gradient() + self.left
            yield {**terms, self.copies: there, "activations": saved, "temporaries": again + more}
        whole = saved + (self.narrowed if self.stages[at.stage] == self.final else 0)
        for done in {0, 1, count - 2, count - 1}:
            if 0 <= done < count:
                activations = (whole if done else saved) - done * self.kept
                yield {**self._at_block(at, done, before, copies), "activations": activations}
        single = self.sharded and self.layout.pp == 1 and self.group == 1
        for done in {1, count} if single else ():
            activations = whole - done * self.kept
            yield {**self._reducing(at, done, before, copies), "activations": activations}
        if not self.sharded and self.stages[at.stage] == 0:
            yield self._at_table(at, whole - count * self.kept)

    def _beginning(self, at: Moment, saved: int) -> Iterator[tuple[int, int]]:
        """Activations and temporaries before the first block's own backward pass, when FSDP puts
        its weights together: at the loss, whose gradients are multiplied by what came in; where
        the gradient of the chosen tokens is added to zeros; and at the last norm."""
        if self.stages[at.stage] != self.final or not self.shape.causal:
            return
        kept, head = self.loss_kept(at.stage), self._head_gradient()
        cast = self.stored * self.head * self.hidden if self.casts and not self.adapters else 0
        yield saved + kept, max(kept, cast)
        yield saved, head + 3 * self.last_norm * self.tokens * self.hidden
        residual = self.stream * self.part * self.hidden  # there is none
        yield saved - self.behind, head + self.norm_backward - residual

    def _again(self) -> int:
        if self.work.checkpointing == "none":
            return 0
        again = self.whole
        if self.work.checkpointing == "selective":
            # the last product is not made again, so its result stays where it was kept
            again += self.compute * self.tokens * self.hidden - self.products
        # a norm in fp32 has its input, which was kept where a block begins with one
        return again - (self.entering if self.stream >= 4 and self.shape.causal else 0)

    def _halving(self, at: Moment) -> Iterator[int]:
        """At the end of zero bubble's first half, and the beginning of the second."""
        halved = self._halved(at) + self._narrow(at, at.stage)
        yield halved + max(self.norm_backward, self.attention_backward)
        # the feed-forward once more for the weights, whose narrow gradients FSDP widens block by
        # block, beginning behind the head
        narrow = 0
        if self.sharded and self.half:
            head = self.shape.causal and self.stages[at.stage] == self.final
            own = self.head * self.hidden if head and not self.adapters else 0
            narrow = self.compute * (self.trained_block + own)
        yield halved + self.mlp_backward + narrow

    def _at_block(self, at: Moment, done: int, before: int, copies: int) -> dict[str, int]:
        """The backward pass of a block, when it has gone through `done` of them."""
        there = at.there[at.stage]
        temporaries = self._again() + self.block_backward(self._own(there))
        gradients = before + self._head_gradient()
        temporaries += self._halved(at) + self._narrow(at) + (self.waiting(done) if there else 0)
        temporaries += 0 if done else self.left
        if not done and self.stages[at.stage] < self.final:  # what came in is in a buffer
            temporaries -= self.stream * self.part * self.hidden
        if not there and not self.replicated:
            each = self.exact if self.sharded and self.layout.pp > 1 else self.each_gradient
            divided = 1 if self.layout.pp > 1 else self.group
            gradients += done * each * self.trained_block // divided
        if self.layout.pp == 1 and self.sharded:
            temporaries += self.reduced if done else 0  # those of the block before
            narrow = self.each_gradient - self.exact if there else 0
            gradients += done * narrow * self.trained_block // self.group
            if self.group == 1:
                copies -= self.gathered * done * (self.block + self.adapters)
            elif done + 1 == self.count:  # the embedding comes next, if it is a group
                copies += self.gathered * (self.embedding - self.block - self.adapters)
        return {"gradients": gradients, self.copies: copies, "temporaries": temporaries}

    def _own(self, there: bool) -> int:
        """Bytes of each gradient of the block that is being gone through: FSDP has them until the
        block is, autocast narrow until the end, others where there are none to add them to."""
        if self.adapters:
            return 0
        if self.sharded:
            return self.compute
        if not there:
            return 0 if self.replicated else self.stored
        return self.compute if self.waiting(1) else 0

    def _reducing(self, at: Moment, done: int, before: int, copies: int) -> dict[str, int]:
        """Replicas of what tp ranks divide: a block's gradients in one piece, and divided."""
        own = self.trained_block
        whole = before - self.exact * done * own if at.there[at.stage] else 0
        return {
            "gradients": whole + self.each_gradient * (done - 1) * own + self._head_gradient(),
            self.copies: copies - self.gathered * done * (self.block + self.adapters),
            "temporaries": 3 * self.exact * own,
        }  # fmt: skip

    def _head_gradient(self) -> int:
        """Of the head, made before those of the blocks; of a tied table it waits for its own."""
        if self.layout.pp > 1 or not self.shape.causal or self.adapters:
            return 0
        size = self.head * self.hidden
        if self.sharded:
            return self.compute * size
        added = self.replicated or self.work.accumulation > 1
        return 0 if added and self.shape.head else self.stored * size

    def _at_table(self, at: Moment, saved: int) -> dict[str, int]:
        """The end of a backward pass without FSDP: the table's gradient, beside what is there."""
        table = self.shape.table // (self.layout.tp if self.shape.causal else 1)
        single = self.layout.pp == 1
        tied = self.shape.causal and self.shape.head is None and single
        again = at.there[at.stage] or (single and self.layout.world > 1)
        there = tuple(n == at.stage or has for n, has in enumerate(at.there))
        forgotten = self.remembered and self.work.checkpointing != "none"
        copies = self.passing(0)[0] if self.layout.tp == 1 and not forgotten else 0
        waiting = self.waiting(self.blocks[at.stage]) if at.there[at.stage] else 0
        # of a tied table the head's gradient waits for its own
        own = 0 if self.adapters else self.stored * table * (2 if tied else int(again))
        return {
            "gradients": self.gradients(there, ending=True), self.copies: copies,
            "activations": 0 if single else saved, "temporaries": own + waiting + self._halved(at),
        }  # fmt: skip

    def _ending(self) -> Iterator[dict[str, int]]:
        """The end of the last backward pass, when FSDP reduces what is left."""
        if not self.sharded:
            return
        after, ends = self.gradients((True,) * len(self.stages), ending=True), self.trained_ends
        if self.layout.pp > 1:
            # gradients that were kept whole are reduced, those of the ends last
            shards = self.stored * self.trained // self.group
            _, copies = self.passing(0)
            whole = self.exact * ends
            yield {"gradients": shards + whole, self.copies: copies, "temporaries": whole}
            yield {"gradients": after, self.copies: copies, "temporaries": self.reduced}
            return
        first = after - self.each_gradient * ends // self.group
        head = self._head_gradient()
        if head and not self.embedding:  # of a tied table: the head's gradient, its own, the sum
            yield {
                "gradients": first + 3 * head, self.copies: self.gathered * ends,
                "temporaries": self.reduced,
            }  # fmt: skip
        if self.group == 1:
            yield {"gradients": first, "temporaries": 3 * self.exact * ends}
            return
        # The embedding's weights are put together from one piece while its gradient is made, and
        # stay until it is reduced; the root group is reduced before it.
        embedding, root = self.trained_embedding, ends - self.trained_embedding
        both, whole = self.gathered * (self.root + 2 * embedding), self.gathered * embedding
        yield {"gradients": first + head, self.copies: both, "temporaries": self.reduced}
        yield {
            "gradients": first + self.gathered * (root + embedding), self.copies: whole,
            "temporaries": self.exact * root,
        }  # fmt: skip
        first += self.each_gradient * root // self.group
        yield {"gradients": first + whole + head, "temporaries": self.exact * embedding}
        yield {"gradients": after + head, "temporaries": self.exact * (embedding or root)}

    def _sent(self, at: Moment) -> int:
        """Outputs, which a pipeline holds until their backward pass; schedules of two stages a rank
        hold all that they have sent until the end of the step, zero bubble the gradients of all
        inputs, and what one stage hands to the other of the same rank until the next step."""
        if self.layout.pp == 1:
            return 0
        sent, two, micro = 0, len(self.stages) > 1, self.work.accumulation
        halves = self.layout.schedule == "zero_bubble"
        for number, stage in enumerate(self.stages):
            held, backward = at.held[number], at.backward[number]
            if stage < self.final:
                sent += (micro if stage + 1 in self.stages else at.forward[number]) if two else held
            if stage > 0 and two and (halves or stage - 1 not in self.stages):
                sent += backward
            if stage > 0 and (self.stream >= 4 or self.work.checkpointing != "none"):
                sent -= held  # its first block's input is a buffer
        return sent * self.stream * self.part * self.hidden
