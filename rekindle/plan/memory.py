"""What one rank holds in memory at the worst moment of a step (moments.py, zero.py), and what a
device needs for that.

What the allocator keeps on top of tensors, and CUDA and NCCL for themselves, are named terms from
memory.yaml."""

import dataclasses
from pathlib import Path

from rekindle.catalog.tables import rows
from rekindle.plan.moments import Memory as Memory
from rekindle.plan.moments import Moments
from rekindle.plan.work import Work
from rekindle.plan.zero import ZeroMoments

FILE = Path(__file__).with_suffix(".yaml")


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
    table = rows(FILE)
    return Needed(peak_bytes, round(peak_bytes * table["reserve"]["share"]), table["context_bytes"])


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
    the pipeline: with AdamW 12 bytes a trained parameter in fp32, divided by ranks that share them.
    """
    return max(_rank(work, place).snapshot for place in range(work.layout.pp))


def offloaded_bytes(work: Work) -> int:
    """Host memory that one rank's weights and moments take in the place of the device's."""
    return ZeroMoments(work).offloaded if work.zero else 0


def _rank(work: Work, pp_rank: int) -> Moments:
    return ZeroMoments(work) if work.zero else Moments(work, pp_rank)
