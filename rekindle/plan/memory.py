"""What one rank holds at the worst moment of a step, also under DeepSpeed's ZeRO, and
what a device needs for that: memory.yaml has what allocator, CUDA and NCCL take.

There is one prediction, this closed form: a plan weighs hundreds of layouts in
milliseconds and without torch. A trace, in which the engine runs on tensors without
values, differs from it by 0.3 to 1 % on average, less than the reserve that is added to
either, so that two predictions would only raise the question which is right; it is the
tests' instrument (tests/plan/traced), and is itself held against ranks that train. The
cost: where the closed form is far off, by 3.3 % at worst of 24 configs that a seed drew,
there is no other prediction to ask.

Memory is summed over a block (Korthikanti et al. 2022, arXiv 2205.05198), one function a
term and few moments of a step, and not tensor by tensor: that was within 2 % of a trace
instead of 5 %, where the plan adds 20 %, took 1,100 lines, and made each name of a tensor
in the engine its business. Tests allow 3 % below a trace and 5 % above, for each layout.
Rejected: coefficients of a paper alone, because head norms, dropout that joins documents,
autocast's copies and the loss are 3 to 50 % of some peaks; fewer moments, because the
ends of FSDP's backward pass are the peak of models with large tables."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rekindle.plan.inflight import Moment, moments
from rekindle.plan.tensors import Rank
from rekindle.plan.work import Work
from rekindle.spec.layout import Layout
from rekindle.tables import rows

FILE = Path(__file__).with_suffix(".yaml")
_MASTER = 12  # bytes an element: weights in full precision and two moments
_MOMENTS = 8  # bytes an element of two moments in full precision
# DeepSpeed's default `reduce_bucket_size`, in elements (0.19.8)
_BUCKET_ELEMENTS = 500_000_000


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its worst moment, in `phase`, by `terms`; `pp_rank`:
    the worst place."""

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
        """The moment at which the rank holds most."""
        static = {**self.static(), "pipeline buffers": self._pipeline_buffer_bytes()}
        candidates = [("optimizer", {**static, **self.optimizing()})]
        for at in moments(self.layout, self.pp_rank, self.work.accumulation):
            if at.is_backward:
                candidates += [("backward", {**static, **terms}) for terms in self._backward(at)]
            else:
                candidates += [("forward", {**static, **terms}) for terms in self._forward(at)]
        phase, terms = max(candidates, key=lambda candidate: sum(candidate[1].values()))
        return Memory({k: v for k, v in terms.items() if v}, phase, self.pp_rank)

    def _pipeline_buffer_bytes(self) -> int:
        """A buffer for each micro-batch that a pipeline receives, in either direction."""
        neighbours = 0
        for stage in self.stages:
            for neighbour in (stage - 1, stage + 1):
                # two stages of one rank hand over without a buffer
                if 0 <= neighbour <= self.last_stage and neighbour not in self.stages:
                    neighbours += 1
        received = self.stream * self.size * self.work.accumulation
        return neighbours * received

    def optimizing(self) -> dict[str, int]:
        """What there is beside the states while the optimizer updates."""
        return {"gradients": self.gradients((True,) * len(self.stages), ending=True)}

    def _terms(
        self, gradients: int, copies: int, activations: int, temporaries: int
    ) -> dict[str, int]:
        """What there is in a moment, by term, beside what stays from step to step."""
        return {
            "gradients": gradients,
            self.copies_term: copies,
            "activations": activations,
            "temporaries": temporaries,
        }

    def _in_blocks(self, counts: Sequence[int]) -> int:
        """Micro-batches of each stage, times its blocks."""
        return sum(n * blocks for n, blocks in zip(counts, self.blocks_by_stage, strict=True))

    def _forward(self, at: Moment) -> Iterator[dict[str, int]]:
        """What there is at the loss; before there are activations, where FSDP gathers the
        ends; and where a teacher runs."""
        gradients = self.gradients(at.has_gradients)
        copies = self.copies(self._in_blocks(at.held), backward=False)
        temporaries = self.loss(at.stage) + self.unreleased_bytes
        yield self._terms(gradients, copies, self.activations(at), temporaries)
        if self.gathers_blocks:
            gathered = self.root_elements + (self.embedding_elements or self.block_elements)
            yield self._terms(gradients, 2 * self.compute_width * gathered, 0, 0)
        yield self._terms(gradients, self.teacher_bytes[1], 0, self.teaching())

    def _backward(self, at: Moment) -> Iterator[dict[str, int]]:
        """What there is in the first two blocks that a backward pass goes through, in the
        last two, and then in the ends."""
        count = self.blocks_by_stage[at.stage]
        has_gradients = at.has_gradients[at.stage]
        halved_blocks = self._in_blocks(at.halved)
        gradients_before = self.gradients(at.has_gradients)
        saved = self.activations(at) + halved_blocks * self.halved_bytes
        # between these the terms grow evenly, so none of the others is the worst
        for done in sorted({0, 1, count - 2, count - 1} & set(range(count))):
            temporaries = self.head_gradient_bytes + self.in_block()
            if not halved_blocks:
                temporaries += self.recomputed_bytes
            copies = self.copies(self._in_blocks(at.held), backward=True)
            if self.sharded and self.no_pipeline:
                # what was reduced last: of the block before, or of the last micro-batch
                if done:
                    temporaries += self.exact_width * self.trained_block_elements
                else:
                    temporaries += self.unreleased_bytes
                if self.shard_ranks == 1:
                    copies -= self.compute_width * done * self.block_elements
                elif done + 1 == count:  # the embedding comes next
                    copies += self.compute_width * (self.embedding_elements - self.block_elements)
            added = self.added(done * self.trained_block_elements, has_gradients)
            activations = saved - done * self.kept_bytes
            yield self._terms(gradients_before + added, copies, activations, temporaries)
        if self.sharded:
            yield from self._ending()
        elif self.stages[at.stage] == 0:
            yield self._at_table(has_gradients)

    def _at_table(self, has_gradients: bool) -> dict[str, int]:
        """What there is at the end of a backward pass without FSDP:
        of a tied table the head's gradient, too."""
        table = self.shape.table
        if self.shape.causal:
            table //= self.layout.tp
        tied = self.shape.causal and self.shape.head is None and self.no_pipeline
        temporaries = 0
        if not self.adapter_elements:
            if tied:
                temporaries = 2 * self.stored_width * table
            elif has_gradients or self.replicated:
                temporaries = self.stored_width * table
        if has_gradients:
            trained = self.block_count * self.trained_block_elements
            temporaries += self.added(trained, has_gradients)
        gradients_after = self.gradients((True,) * len(self.stages), ending=True)
        return self._terms(gradients_after, self.copies(0, self.recomputes), 0, temporaries)

    def _ending(self) -> Iterator[dict[str, int]]:
        """What there is at the end of the last backward pass,
        when FSDP reduces what the ends have left."""
        gradients_after = self.optimizing()["gradients"]
        ends = self.trained_end_elements
        if not self.gathers_blocks:
            divided = gradients_after
            copies = 0
            if not self.no_pipeline:
                divided = self.stored_width * self.trained_elements // self.shard_ranks
                copies = self.copies(0, True)
            end_bytes = self.exact_width * ends
            yield self._terms(divided + end_bytes, copies, 0, end_bytes)
            return
        of_blocks = gradients_after - gradients_after * ends // max(1, self.trained_elements)
        embedding = 0 if self.adapter_elements else self.embedding_elements
        embedding_bytes = self.compute_width * embedding
        head = self.head_gradient_bytes
        # of a tied table its own gradient and the sum
        head_gradients = head if embedding else 3 * head
        copies = self.compute_width * self.root_elements + 2 * embedding_bytes
        block_bytes = self.exact_width * self.trained_block_elements
        yield self._terms(of_blocks + head_gradients, copies, 0, block_bytes)
        root_bytes = self.exact_width * (ends - embedding)
        yield self._terms(of_blocks + self.compute_width * ends, embedding_bytes, 0, root_bytes)
        yield self._terms(of_blocks + head, embedding_bytes, 0, self.exact_width * embedding)


class ZeroPeak(Peak):
    """The moments of a rank of DeepSpeed's ZeRO (0.19.8), held against what ranks held on
    CPUs; all hold as much. What offload leaves on a GPU has not been measured on one."""

    def __init__(self, work: Work) -> None:
        assert work.zero is not None
        self.zero = work.zero
        self.ranks = work.layout.world
        width = 2 if work.precision == "bf16" else 4
        alone = Layout(micro_batch_size=work.layout.micro_batch_size)
        super().__init__(dataclasses.replace(work, layout=alone, weights_bytes=width), 0)
        self.copies_term = "gathered weights"
        if self.zero.stage == 2:
            self.copies_term = "communication buffers"
        self.buffer_bytes = self.stored_width * self.zero.bucket * self.zero.buckets
        if self.zero.stage == 3:
            # they are in the bucket, which `copies` counts
            self.head_gradient_bytes = 0
            self.half_block_gradient_bytes = 0
        self.all_elements = self.block_count * self.block_elements + self.end_elements
        # elements of which this rank has the moments
        self.own_elements = self.trained_elements
        if self.zero.stage:
            self.own_elements //= self.ranks

    def static(self) -> dict[str, int]:
        zero = self.zero
        parameters = 0
        if not zero.parameters_offloaded:
            parameters = self.stored_width * self.all_elements
            if zero.stage == 3:
                parameters //= self.ranks
        optimizer = 0
        divided_gradients = 0
        if not zero.optimizer_offloaded:
            optimizer = (_MASTER if zero.stage else _MOMENTS) * self.own_elements
            if zero.stage == 3:
                divided_gradients = self.stored_width * self.own_elements
        return {
            "parameters": parameters,
            "optimizer": optimizer,
            "divided gradients": divided_gradients,
            "communication buffers": 0 if zero.stage == 2 else self.buffer_bytes,
            "teacher": self.teacher_bytes[0],
        }

    @property
    def offloaded(self) -> int:
        """Bytes of the host's memory: moments, gradients in full precision, weights."""
        size = 0
        if self.zero.optimizer_offloaded:
            size += (_MASTER + 4) * self.own_elements
        if self.zero.parameters_offloaded:
            size += self.stored_width * self.all_elements // self.ranks
        return size

    @property
    def snapshot(self) -> int:
        return _MASTER * self.own_elements

    def gradients(self, has_gradients: tuple[bool, ...], ending: bool = False) -> int:
        stage = self.zero.stage
        whole = self.stored_width * self.trained_elements
        part = whole // self.ranks
        if stage == 3 or (stage == 2 and self.zero.optimizer_offloaded):
            return 0
        if stage == 2:
            parts = int(any(has_gradients))
            if ending and self.work.accumulation > 1:
                parts += 1
            return part * parts
        size = whole if any(has_gradients) or ending else 0
        if ending:
            # beside them this rank's part, or a bucket
            size += part if stage else min(whole, self.stored_width * _BUCKET_ELEMENTS)
        return size

    def added(self, weights: int, has_gradients: bool) -> int:
        """Stage 2 has those in its bucket whole, and so has stage 3,
        in a piece (`copies`)."""
        if self.zero.stage < 2:
            return super().added(weights, has_gradients)
        elements = min(weights, self.zero.bucket) if self.zero.stage == 2 else 0
        if not has_gradients:
            elements += (weights - elements) // self.ranks
        return self.stored_width * elements

    def optimizing(self) -> dict[str, int]:
        """Gradients in full precision,
        and the narrow ones that they and new weights come from."""
        zero = self.zero
        if zero.stage == 0:
            return {"gradients": self.stored_width * self.trained_elements}
        if zero.stage == 3:
            gradients = 0
            if not zero.optimizer_offloaded:
                # it updates a piece of `sub_group_size` elements at a time
                width = 4 + self.stored_width if self.half_precision else 4
                gradients = width * min(self.own_elements, zero.updated)
            return {"gradients": gradients}
        gradients = 0
        if not zero.optimizer_offloaded:
            width = 2 * self.stored_width
            if self.half_precision:
                width += 4
            gradients = width * self.own_elements
        return {"communication buffers": 0, "gradients": gradients}

    def copies(self, held: int, backward: bool) -> int:
        """Stage 3: what may stay and the block in work; backward,
        a bucket in one piece as well."""
        if self.zero.stage == 2:
            return self.buffer_bytes if backward else 0
        if self.zero.stage < 3:
            return 0
        live = self.zero.gathered + self.block_elements + self.embedding_elements
        elements = min(self.all_elements, live)
        if backward:
            elements += min(self.trained_elements, self.zero.bucket)
        return self.stored_width * elements

    def worst(self) -> Memory:
        """At first, before anything is divided,
        every rank has the whole network in fp32."""
        start = Memory({"whole network at the start": 4 * self.all_elements}, "start")
        return max(super().worst(), start, key=lambda memory: memory.peak_bytes)


def needed(peak_bytes: int) -> int:
    """What a device must have for a peak of tensors: them, what the allocator reserves
    beyond, and what CUDA and NCCL take. 10 GiB of tensors need 13."""
    table = rows(FILE)
    reserve = round(peak_bytes * table["reserve"]["share"])
    return int(peak_bytes + reserve + table["context_bytes"])


def memory(work: Work, pp_rank: int | None = None) -> Memory:
    """Memory of the worst rank, or of that at a place on the pipeline."""
    if pp_rank is not None:
        return _rank(work, pp_rank).worst()
    pp = work.layout.pp
    # the ends of a pipeline and their neighbours, one of which is the worst
    places = sorted({0, 1 % pp, (pp - 2) % pp, pp - 1})
    peaks = (_rank(work, rank).worst() for rank in places)
    return max(peaks, key=lambda memory: memory.peak_bytes)


def least_bytes(work: Work) -> int:
    """What its first rank holds in the optimizer: a bound below `memory`,
    found in little time."""
    rank = _rank(work, 0)
    return sum(rank.static().values()) + rank.optimizing().get("gradients", 0)


def snapshot_bytes(work: Work) -> int:
    """Host memory that one rank's copies take while a checkpoint is saved, on the worst
    place of the pipeline: with AdamW in fp32 12 bytes a trained parameter."""
    return max(_rank(work, rank).snapshot for rank in range(work.layout.pp))


def offloaded_bytes(work: Work) -> int:
    """Host memory that one rank's weights and moments take in the place of the
    device's."""
    return ZeroPeak(work).offloaded if work.zero else 0


def _rank(work: Work, pp_rank: int) -> Peak:
    return ZeroPeak(work) if work.zero else Peak(work, pp_rank)
