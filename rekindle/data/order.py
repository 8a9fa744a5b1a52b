"""Which rows each optimizer step trains on, as arithmetic.

The rows of global batch k are a pure function of (seed, epoch, lengths, k): they depend neither on
how many ranks share the batch nor on what ran before, so loader state is one integer. A permutation
is the stable argsort of Philox words keyed by (seed, epoch); numpy keeps a bit generator's stream
the same in all versions, unlike `Generator.permutation`.

With `lengths`, rows of like length meet in a batch, which saves padding: the permuted rows are cut
into windows of `BUCKET_BATCHES` batches, each window is sorted by length, and the full batches of
the epoch are shuffled.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

PADDING = -1
BUCKET_BATCHES = 50
_ROWS, _BATCHES = 0, 1


class SampleOrder:
    """The order of one training: `batch(step)` for any step, in any sequence; keeps one epoch."""

    def __init__(
        self, *, rows: int, global_batch_size: int, seed: int, lengths: npt.ArrayLike | None = None
    ) -> None:
        if rows < 1 or global_batch_size < 1:
            raise ValueError(f"need rows and a batch size, got {rows} and {global_batch_size}")
        self.rows, self.global_batch_size, self.seed = rows, global_batch_size, seed
        self._lengths = None if lengths is None else np.asarray(lengths)
        if self._lengths is not None and self._lengths.shape != (rows,):
            raise ValueError(f"lengths of shape {self._lengths.shape} for {rows} rows")
        self.steps_per_epoch = steps_per_epoch(rows, global_batch_size)
        self._epoch, self._batches = -1, np.empty((0, 0), np.int64)

    def batch(self, step: int) -> Indices:
        """Row numbers of global batch `step` (from 0), [global_batch_size]; the last of an epoch
        ends in PADDING."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._epoch_batches(epoch)
        batch: Indices = self._batches[position].copy()
        return batch

    def _epoch_batches(self, epoch: int) -> Indices:
        """All batches of an epoch, [steps_per_epoch, global_batch_size]."""
        size = self.global_batch_size
        order = _permutation(self.rows, self.seed, epoch, _ROWS)
        if self._lengths is not None:
            window = size * BUCKET_BATCHES
            pieces = [order[i : i + window] for i in range(0, self.rows, window)]
            order = np.concatenate([p[np.argsort(self._lengths[p], kind="stable")] for p in pieces])
        padded = np.full(self.steps_per_epoch * size, PADDING, np.int64)
        padded[: self.rows] = order
        batches = padded.reshape(self.steps_per_epoch, size)
        if self._lengths is not None:
            full = self.rows // size
            batches[:full] = batches[_permutation(full, self.seed, epoch, _BATCHES)]
        return batches


def batch_indices(
    step: int, *, rows: int, global_batch_size: int, seed: int, lengths: npt.ArrayLike | None = None
) -> Indices:
    """Row numbers of global batch `step`, padded with PADDING; `SampleOrder` is the same with a
    memory.

    `batch_indices(0, rows=3, global_batch_size=4, seed=0)` holds 0, 1 and 2 in some order, then -1.
    """
    order = SampleOrder(rows=rows, global_batch_size=global_batch_size, seed=seed, lengths=lengths)
    return order.batch(step)


def steps_per_epoch(rows: int, global_batch_size: int) -> int:
    """Batches in one pass over the rows, the short last one included."""
    return -(-rows // global_batch_size)


def _permutation(count: int, seed: int, epoch: int, stream: int) -> Indices:
    key = np.array([seed, epoch], np.uint64)
    words = np.random.Philox(key=key, counter=np.array([0, 0, 0, stream], np.uint64)).random_raw(
        count
    )
    return np.argsort(np.asarray(words), kind="stable")
