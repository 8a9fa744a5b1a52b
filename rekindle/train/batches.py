"""The micro-batches of each step for one rank, prepared while the step before is computed.

Global batch k holds a fixed number of sequences, cut into micro-batches of fixed size; micro-batch
j belongs to data rank j mod `layout.data`. Every data rank gets the same number, if need be an
empty one that weighs nothing. tp and pp peers prepare the same; cp peers take two chunks of each
sequence so that causal attention is as much work for each (zigzag). What a device would have to be
asked for is found here, on the host. Nothing here draws a random number.

Shapes: B rows or sequences, T tokens of this rank, N targets."""

import dataclasses
import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from rekindle.data.manifest import Shards
from rekindle.data.order import SampleOrder
from rekindle.tasks.base import Task
from rekindle.train.mesh import Mesh
from rekindle.train.micro import Chosen, Ints, Micro
from rekindle.train.objectives import objective_of

TRAIN, VALIDATION = "train", "validation"
SHAPES = 8  # lengths of the sequences of a pipeline, which keeps a schedule for each


@dataclasses.dataclass(frozen=True)
class StepWork:
    """One step. `micro`: this rank's micro-batches, on the host; `rows`: the examples in them. Of
    the batch: `examples`, `targets`, `tokens`; `squares`: the sum of documents' squared lengths."""

    micro: tuple[Micro, ...]
    rows: tuple[int, ...]
    examples: int
    targets: int
    tokens: int
    squares: int


class Batches:
    """StepWork by step, one step ahead in a thread; `waited`: for it. `joined`: in one sequence."""

    def __init__(
        self,
        task: Task,
        shards: Shards,
        split: str,
        order: SampleOrder,
        mesh: Mesh,
        seed: int,
        joined: bool = False,
    ) -> None:
        self.task, self.shards, self.split, self.order = task, shards, split, order
        self.objective = objective_of(task)
        self.mesh, self.seed = mesh, seed
        self.settings = shards.manifest.settings
        self.joined = joined
        self.waited = 0.0
        self._ahead: tuple[int, Future[StepWork]] | None = None
        # one OpenMP thread: a second pool slows training (steps of 107 to 128 ms instead of 97)
        self._pool = ThreadPoolExecutor(1, "batches", torch.set_num_threads, (1,))

    def work(self, step: int, last: int) -> StepWork:
        """The work of `step`; starts on the one after it unless that is `last`."""
        began = time.perf_counter()
        if self._ahead is not None and self._ahead[0] == step:
            found = self._ahead[1].result()
        else:
            found = self.make(step)
        self._ahead = None
        if step + 1 < last:
            self._ahead = step + 1, self._pool.submit(self.make, step + 1)
        self.waited += time.perf_counter() - began
        return found

    def ids(self, work: StepWork) -> list[str]:
        """Names of the examples that this rank works on."""
        rows = self.shards.take(self.split, np.array(work.rows, np.int64))
        return rows.column("id").to_pylist()  # type: ignore[no-any-return]

    def arranged(self, rows: Ints, slots: Ints) -> Micro:
        """A micro-batch of chosen `rows` (negative: none) in `slots`."""
        length = self._longest(self._lengths(rows), slots)
        return self._pinned(self._micro(rows, slots, length, 0, torch.ones(1)))

    def make(self, step: int) -> StepWork:
        layout = self.mesh.layout
        batch = self.order.batch(step)
        size = layout.micro_batch_size
        full = self.order.global_batch_size
        if layout.pp == 1:  # a pipeline's schedule has one number of them
            full = int(batch.slots[batch.rows >= 0].max(initial=0)) + 1
        rounds = -(-full // (size * layout.data))
        mine = [turn * layout.data + self.mesh.data_rank for turn in range(rounds)]
        known = self._lengths(batch.rows)
        picks, longest = list[tuple[Ints, Ints]](), list[int]()
        for j in mine:
            inside = (batch.slots >= j * size) & (batch.slots < (j + 1) * size)
            rows, slots = batch.rows[inside], batch.slots[inside] - j * size
            longest.append(self._longest(known[inside], slots))
            if not len(rows):  # beyond the batch
                rows, slots = np.full(size, -1), np.arange(size)
            picks.append((rows, slots))
        if layout.pp > 1:  # a pipeline moves one shape
            longest = [max(longest)] * len(longest)
        real = batch.rows[batch.rows >= 0]
        lengths = known[batch.rows >= 0]
        targets = max(1, int(self.shards.targets(self.split, real).sum()))
        count = torch.tensor([targets], dtype=torch.float64)
        micro = [
            self._micro(rows, slots, length, self._key(step, j), count)
            for j, (rows, slots), length in zip(mine, picks, longest, strict=True)
        ]
        if layout.pp > 1:
            micro = self.objective.alike(self, micro)
        return StepWork(
            micro=tuple(map(self._pinned, micro)),
            rows=tuple(int(row) for rows, _ in picks for row in rows if row >= 0),
            examples=len(real),
            targets=targets,
            tokens=int(lengths.sum()),
            squares=int((lengths**2).sum()),
        )

    def _key(self, step: int, micro: int) -> int:
        cp = self.mesh.place("cp")
        words = np.random.SeedSequence([self.seed, step, micro, *([cp] if cp else [])])
        return int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def _pinned(self, micro: Micro) -> Micro:
        """In memory from which a GPU copies while both go on."""
        if self.mesh.device.type != "cuda":
            return micro
        return micro.with_each(lambda tensor: tensor.pin_memory())

    def _lengths(self, rows: Ints) -> Ints:
        """Tokens of each row; none of one that is negative."""
        held: Ints = self.shards.lengths(self.split, np.maximum(rows, 0)) * (rows >= 0)
        return held

    def _longest(self, lengths: Ints, slots: Ints) -> int:
        """Tokens of the longest sequence, rounded up to what the layout can divide."""
        layout = self.mesh.layout
        longest = self.order.pack_length or int(np.bincount(slots, weights=lengths).max(initial=1))
        unit = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
        if layout.pp > 1 and self.order.pack_length is None:
            longest = self.rounded(longest)
        return -(-max(longest, 1) // unit) * unit

    def rounded(self, length: int) -> int:
        """Up to one of `SHAPES` lengths: a pipeline keeps a schedule, with buffers, for each."""
        grain = -(-self._most // SHAPES)
        return min(-(-length // grain) * grain, max(self._most, length))

    @functools.cached_property
    def _most(self) -> int:
        return self.shards.longest(self.split)

    def _micro(self, rows: Ints, slots: Ints, length: int, key: int, count: torch.Tensor) -> Micro:
        chosen = Chosen(self.shards.take(self.split, np.maximum(rows, 0)), rows, slots, length)
        return self.objective.micro(self, chosen, key, count)
