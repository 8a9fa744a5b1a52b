"""The micro-batches of each step for one rank, prepared while the step before is
computed.

Global batch k holds a fixed number of sequences, cut into micro-batches of fixed size;
micro-batch j belongs to data rank j mod `layout.data`. Every data rank gets the same
number, if need be an empty one that weighs nothing. tp and pp peers prepare the same; cp
peers take two chunks of each sequence so that causal attention is as much work for each
(zigzag). What a device would have to be asked for is found here, on the host. Nothing
here draws a random number.

Shapes: B rows or sequences, T tokens of this rank, N targets."""

import dataclasses
import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from rekindle.data.manifest import Shards
from rekindle.data.order import Batch, SampleOrder
from rekindle.objectives.loss import Loss
from rekindle.objectives.micro import Chosen, Ints, Micro
from rekindle.tasks.base import Task
from rekindle.train.mesh import Mesh

TRAIN = "train"
VALIDATION = "validation"
SHAPES = 8
"""How many lengths the sequences of a pipeline have: it keeps a schedule for each."""


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one step trains on."""

    micro: tuple[Micro, ...]
    """This rank's micro-batches, on the host."""
    rows: tuple[int, ...]
    """The examples in them."""
    examples: int
    """Of the whole batch, as the numbers that follow."""
    targets: int
    tokens: int
    squares: int
    """The sum of documents' squared lengths, to which attention's work is proportional."""


class Batches:
    """The work of each step, prepared one step ahead in a thread.

    `joined`: whether texts that are not packed share a sequence."""

    def __init__(
        self,
        loss: Loss,
        task: Task,
        shards: Shards,
        split: str,
        order: SampleOrder,
        mesh: Mesh,
        seed: int,
        joined: bool = False,
    ) -> None:
        self.task = task
        self.shards = shards
        self.split = split
        self.order = order
        self.loss = loss
        self.mesh = mesh
        self.seed = seed
        self.settings = shards.manifest.settings
        self.joined = joined
        self.waited = 0.0  # seconds, since the start
        self._ahead: tuple[int, Future[StepWork]] | None = None
        # one OpenMP thread: a second pool slows training (steps of 107 to 128 ms instead of 97)
        self._pool = ThreadPoolExecutor(1, "batches", torch.set_num_threads, (1,))

    def work(self, step: int, last: int) -> StepWork:
        """The work of `step`; starts on the one after it unless that is `last`."""
        began = time.perf_counter()
        if self._ahead is not None and self._ahead[0] == step:
            work = self._ahead[1].result()
        else:
            work = self.make(step)
        self._ahead = None
        if step + 1 < last:
            self._ahead = step + 1, self._pool.submit(self.make, step + 1)
        self.waited += time.perf_counter() - began
        return work

    def ids(self, work: StepWork) -> list[str]:
        """Names of the examples that this rank works on."""
        rows = self.shards.take(self.split, np.array(work.rows, np.int64))
        return rows.column("id").to_pylist()  # type: ignore[no-any-return]

    def arranged(self, rows: Ints, slots: Ints) -> Micro:
        """A micro-batch of chosen `rows` (negative: none) in `slots`."""
        length = self._longest(self._lengths(rows), slots)
        return self._pinned(self._micro(rows, slots, length, 0, torch.ones(1)))

    def make(self, step: int) -> StepWork:
        """The work of `step`, made now."""
        layout = self.mesh.layout
        batch = self.order.batch(step)
        is_real = batch.rows >= 0
        lengths = self._lengths(batch.rows)
        chosen = self._chosen(batch, lengths)
        longest = [length for _, _, _, length in chosen]
        if layout.pp > 1:  # a pipeline moves one shape
            longest = [max(longest)] * len(longest)
        targets = max(1, int(self.shards.targets(self.split, batch.rows[is_real]).sum()))
        count = torch.tensor([targets], dtype=torch.float64)
        micro = []
        rows_of_this_rank: list[int] = []
        for (number, rows, slots, _), length in zip(chosen, longest, strict=True):
            micro.append(self._micro(rows, slots, length, self._key(step, number), count))
            rows_of_this_rank += [int(row) for row in rows if row >= 0]
        if layout.pp > 1:
            micro = self.loss.alike(self, micro)
        real_lengths = lengths[is_real]
        return StepWork(
            micro=tuple(map(self._pinned, micro)),
            rows=tuple(rows_of_this_rank),
            examples=len(real_lengths),
            targets=targets,
            tokens=int(real_lengths.sum()),
            squares=int((real_lengths**2).sum()),
        )

    def _chosen(self, batch: Batch, lengths: Ints) -> list[tuple[int, Ints, Ints, int]]:
        """This rank's micro-batches: number, rows, slots, and tokens of the longest sequence."""
        layout = self.mesh.layout
        size = layout.micro_batch_size
        sequences = self.order.global_batch_size
        if layout.pp == 1:  # a pipeline's schedule has one number of micro-batches
            sequences = int(batch.slots[batch.rows >= 0].max(initial=0)) + 1
        rounds = -(-sequences // (size * layout.data))
        chosen = []
        for turn in range(rounds):
            number = turn * layout.data + self.mesh.data_rank
            first = number * size
            inside = (batch.slots >= first) & (batch.slots < first + size)
            rows = batch.rows[inside]
            slots = batch.slots[inside] - first
            longest = self._longest(lengths[inside], slots)
            if not len(rows):  # beyond the batch
                rows = np.full(size, -1)
                slots = np.arange(size)
            chosen.append((number, rows, slots, longest))
        return chosen

    def _key(self, step: int, micro: int) -> int:
        """Of the dropout of a micro-batch: tp peers share it, cp peers do not."""
        entropy = [self.seed, step, micro]
        cp = self.mesh.place("cp")
        if cp:
            entropy.append(cp)
        words = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
        return int(words[0] >> np.uint64(1))

    def _pinned(self, micro: Micro) -> Micro:
        """In memory from which a GPU copies while both go on."""
        if self.mesh.device.type != "cuda":
            return micro
        return micro.with_each(lambda tensor: tensor.pin_memory())

    def _lengths(self, rows: Ints) -> Ints:
        """Tokens of each row; none of one that is negative."""
        lengths: Ints = self.shards.lengths(self.split, np.maximum(rows, 0))
        return np.where(rows >= 0, lengths, 0)

    def _longest(self, lengths: Ints, slots: Ints) -> int:
        """Tokens of the longest sequence, rounded up to what the layout can divide."""
        layout = self.mesh.layout
        if self.order.pack_length is not None:
            longest = self.order.pack_length
        else:
            longest = int(np.bincount(slots, weights=lengths).max(initial=1))
            if layout.pp > 1:
                longest = self.rounded(longest)
        # what tp divides, and cp into two chunks a rank
        unit = layout.tp
        if layout.cp > 1:
            unit *= 2 * layout.cp
        return -(-max(longest, 1) // unit) * unit

    @property
    def packs(self) -> bool:
        """Whether texts are packed."""
        return self.order.pack_length is not None

    def rounded(self, length: int) -> int:
        """Up to one of `SHAPES` lengths: a pipeline keeps a schedule, with buffers, for each."""
        grain = -(-self._most // SHAPES)
        return min(-(-length // grain) * grain, max(self._most, length))

    @functools.cached_property
    def _most(self) -> int:
        return self.shards.longest(self.split)

    def _micro(self, rows: Ints, slots: Ints, length: int, key: int, count: torch.Tensor) -> Micro:
        chosen = Chosen(self.shards.take(self.split, np.maximum(rows, 0)), rows, slots, length)
        return self.loss.micro(self, chosen, key, count)
