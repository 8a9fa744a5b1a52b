"""What one rank holds in memory at the worst moment of a step (moments.py), under DeepSpeed's ZeRO,
too, and what a device needs for that: memory.yaml has what allocator, CUDA and NCCL take."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rekindle.catalog.tables import rows
from rekindle.plan.inflight import Moment
from rekindle.plan.moments import Memory as Memory
from rekindle.plan.moments import Moments
from rekindle.plan.work import Work
from rekindle.spec.layout import Layout

FILE = Path(__file__).with_suffix(".yaml")
_MASTER = 12  # weights in full precision and two moments


def needed(peak_bytes: int) -> int:
    """What a device must have for a peak of tensors: them, what the allocator reserves beyond, and
    what CUDA and NCCL take. 10 GiB of tensors need 13."""
    table = rows(FILE)
    reserve = round(peak_bytes * table["reserve"]["share"])
    return int(peak_bytes + reserve + table["context_bytes"])


def memory(work: Work, pp_rank: int | None = None) -> Memory:
    """Of the worst rank, or of a place on the pipeline."""
    pp = work.layout.pp
    places = {0, 1, pp - 2, pp - 1} if pp > 1 else {0}
    asked = [pp_rank] if pp_rank is not None else sorted(p for p in places if 0 <= p < pp)
    found = [_rank(work, place).worst() for place in asked]
    return max(found, key=lambda memory: memory.peak_bytes)


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
    return ZeroMoments(work).offloaded if work.zero else 0


def _rank(work: Work, pp_rank: int) -> Moments:
    return ZeroMoments(work) if work.zero else Moments(work, pp_rank)


class ZeroMoments(Moments):
    """Of a rank of DeepSpeed's ZeRO (0.19.8), in closed form, held against what ranks held on CPUs;
    all hold as much. What offload leaves on a GPU has not been measured on one."""

    def __init__(self, work: Work) -> None:
        assert work.zero is not None
        self.zero, self.ranks = work.zero, work.layout.world
        width = 2 if work.precision == "bf16" else 4
        alone = Layout(micro_batch_size=work.layout.micro_batch_size)
        super().__init__(dataclasses.replace(work, layout=alone, weights_bytes=width), 0)
        if self.zero.stage >= 2:
            self.group = self.ranks  # of gradients, as blocks leave them
        self.copies = "gathered weights"
        self._weights = self.count * (self.block + self.adapters) + self.ends
        self._states = self.ranks if self.zero.stage else 1  # ranks among which moments lie

    def static(self) -> dict[str, int]:
        zero, whole = self.zero, self.stored * self._weights
        kept = whole // (self.ranks if zero.stage == 3 else 1)
        master = (_MASTER if zero.stage else 8) * self.trained // self._states
        divided = self.stored * self.trained // self.ranks if zero.stage == 3 else 0
        return {
            "parameters": 0 if zero.parameters_offloaded else kept,
            "optimizer": 0 if zero.optimizer_offloaded else master,
            "divided gradients": 0 if zero.optimizer_offloaded else divided,
            # gradients on their way to the rank that keeps them
            "communication buffers": self.stored * zero.bucket * zero.buckets,
            "teacher": self.taught[0],
        }

    @property
    def offloaded(self) -> int:
        """Bytes of the host's memory: moments, gradients in full precision, weights."""
        zero, whole = self.zero, self.stored * self._weights
        moved = (_MASTER + 4) * self.trained // self._states if zero.optimizer_offloaded else 0
        return moved + (whole // self.ranks if zero.parameters_offloaded else 0)

    @property
    def snapshot(self) -> int:
        return _MASTER * self.trained // self._states

    def gradients(self, there: tuple[bool, ...], ending: bool = False) -> int:
        stage, whole = self.zero.stage, self.stored * self.trained
        part = whole // self.ranks
        if stage == 3 or (stage == 2 and self.zero.optimizer_offloaded):
            return 0
        if stage == 2:
            return part * (int(any(there)) + int(ending and self.work.accumulation > 1))
        kept = whole if any(there) or ending else 0
        added = {0: min(whole, self.stored * 500_000_000), 1: part}[stage]
        return kept + (added if ending else 0)

    def optimizing(self) -> dict[str, int]:
        """Gradients in full precision, and the narrow ones that they and new weights come from."""
        zero, mine = self.zero, self.trained // self._states
        if zero.stage == 0:
            return {"gradients": self.stored * self.trained}
        widened = 4 if self.half else 0
        if zero.stage == 3:
            each = widened + self.stored if self.half else 4
            found = each * min(mine, zero.updated)
            return {"gradients": 0 if zero.optimizer_offloaded else found}
        found = 0 if zero.optimizer_offloaded else (widened + 2 * self.stored) * mine
        return {"communication buffers": 0, "gradients": found}

    def passing(self, blocks_held: int, begun: int = 0) -> tuple[int, int]:
        """Stage 3: what may stay and the block in work; backward, a bucket in one piece as well."""
        if self.zero.stage < 3:
            return 0, 0
        live = self.stored * min(self._weights, self.zero.gathered + self.block + self.embedding)
        return live, live + self.stored * min(self.trained, self.zero.bucket)

    def worst(self) -> Memory:
        """At first, before anything is divided, every rank has the whole network in fp32."""
        found, whole = super().worst(), 4 * self._weights
        if whole <= found.peak_bytes:
            return found
        return Memory({"whole network at the start": whole}, "start")

    def _forward(self, at: Moment) -> Iterator[dict[str, int]]:
        for terms in super()._forward(at):
            yield {"communication buffers": 0, **terms} if self.zero.stage == 2 else terms

    def _head_gradient(self) -> int:
        return super()._head_gradient() // self.group
