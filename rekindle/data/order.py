"""Which rows each optimizer step trains on, as arithmetic.

The rows of global batch k, and the sequences they share, are a pure function of (seed, epoch,
lengths, k), so loader state is one integer. A permutation is the stable argsort of Philox words
keyed by (seed, epoch), whose stream is the same in all versions of numpy.

With `lengths`, rows of like length meet in a batch, which saves padding: the permuted rows are cut
into windows of `BUCKET_BATCHES` batches, each window is sorted by length, and the full batches of
the epoch are shuffled.

With `pack_length`, several rows share a sequence: `best_fit` fills sequences from each window of
`PACK_WINDOW` permuted rows, and the sequences of the epoch are shuffled. Epochs then differ a
little in their number of batches.

With `classes`, an epoch draws equally often from each class, which goes through its rows in a fixed
random order, on and on, from one epoch to the next."""

import dataclasses
import math
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

PADDING = -1
BUCKET_BATCHES = 50
PACK_WINDOW = 1 << 14
_ROWS, _BATCHES, _CLASSES = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Batch:
    """One global batch: N rows in `global_batch_size` sequences, called slots."""

    rows: Indices
    """Row numbers, [N]; PADDING where a slot holds nothing."""
    slots: Indices
    """Which slot each row lies in, [N], ascending; every slot occurs."""


@dataclasses.dataclass(frozen=True)
class _Epoch:
    """The batches of one epoch: batch i is `rows[starts[i] : starts[i + 1]]`."""

    rows: Indices
    slots: Indices
    starts: Indices


class SampleOrder:
    """The order of one training: `batch(step)` for any step, in any sequence; keeps one epoch."""

    def __init__(
        self, *, rows: int, global_batch_size: int, seed: int, lengths: npt.ArrayLike | None = None,
        pack_length: int | None = None, classes: npt.ArrayLike | None = None,
    ) -> None:  # fmt: skip
        """`lengths` are tokens, [rows], and so are `classes`; ValueError for nonsense."""
        if rows < 1 or global_batch_size < 1:
            raise ValueError(f"need rows and a batch size, got {rows} and {global_batch_size}")
        self.rows, self.global_batch_size, self.seed = rows, global_batch_size, seed
        self.pack_length = pack_length
        self._lengths = None if lengths is None else np.asarray(lengths)
        self.by_length = lengths is not None
        if self._lengths is not None and self._lengths.shape != (rows,):
            raise ValueError(f"lengths of shape {self._lengths.shape} for {rows} rows")
        if pack_length is not None and (
            self._lengths is None or self._lengths.min() < 1 or self._lengths.max() > pack_length
        ):
            raise ValueError(f"packing needs lengths of 1 to {pack_length} tokens")
        self._classes: list[Indices] = []
        if classes is not None:
            shuffled = _permutation(rows, seed, 0, _CLASSES)
            of_row = np.asarray(classes)[shuffled]
            self._classes = [shuffled[of_row == one] for one in np.unique(of_row)]
        self._number, self._epoch = -1, _Epoch(*(np.empty(0, np.int64),) * 3)
        self._packed_steps: list[int] = []

    def batch(self, step: int) -> Batch:
        """Global batch `step` (from 0); unpacked, `slots` is 0, 1, 2, ..."""
        number, position = self.epoch_of(step)
        epoch = self._load(number)
        part = slice(epoch.starts[position], epoch.starts[position + 1])
        return Batch(epoch.rows[part].copy(), epoch.slots[part].copy())

    def steps(self, epochs: float) -> int:
        """Optimizer steps of so many epochs: with 5 batches an epoch, 1.5 epochs are 8."""
        whole = int(epochs)
        steps = sum(self.steps_in_epoch(epoch) for epoch in range(whole))
        if epochs > whole:
            steps += math.ceil(round((epochs - whole) * self.steps_in_epoch(whole), 6))
        return max(1, steps)

    def epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch that `step` belongs to and its position there, both from 0."""
        if self.pack_length is None:
            return divmod(step, self.steps_in_epoch(0))
        epoch = 0
        while step >= self.steps_in_epoch(epoch):
            step -= self.steps_in_epoch(epoch)
            epoch += 1
        return epoch, step

    def steps_in_epoch(self, epoch: int) -> int:
        """Batches in one pass over the rows, the short last one included."""
        if self.pack_length is None:
            return -(-self.rows // self.global_batch_size)
        while len(self._packed_steps) <= epoch:
            self._packed_steps.append(len(self._load(len(self._packed_steps)).starts) - 1)
        return self._packed_steps[epoch]

    def _load(self, number: int) -> _Epoch:
        if number != self._number:
            self._number = number
            self._epoch = self._plain(number) if self.pack_length is None else self._packed(number)
        return self._epoch

    def _drawn(self, number: int) -> Indices:
        """The rows of an epoch, as many as there are, in random order."""
        order = _permutation(self.rows, self.seed, number, _ROWS)
        if not self._classes:
            return order
        share, more = divmod(self.rows, len(self._classes))
        drawn = []
        for turn, rows in enumerate(self._classes):
            count = share + (turn < more)
            drawn.append(rows[(number * count + np.arange(count)) % len(rows)])
        return np.concatenate(drawn)[order]

    def _plain(self, number: int) -> _Epoch:
        size, steps = self.global_batch_size, self.steps_in_epoch(number)
        order = self._drawn(number)
        if self._lengths is not None:
            window = size * BUCKET_BATCHES
            pieces = [order[i : i + window] for i in range(0, self.rows, window)]
            order = np.concatenate([p[np.argsort(self._lengths[p], kind="stable")] for p in pieces])
        padded = np.full(steps * size, PADDING, np.int64)
        padded[: self.rows] = order
        batches = padded.reshape(steps, size)
        if self._lengths is not None:
            full = self.rows // size
            batches[:full] = batches[_permutation(full, self.seed, number, _BATCHES)]
        starts = np.arange(steps + 1, dtype=np.int64) * size
        return _Epoch(padded, np.tile(np.arange(size, dtype=np.int64), steps), starts)

    def _packed(self, number: int) -> _Epoch:
        assert self._lengths is not None
        assert self.pack_length is not None
        size = self.global_batch_size
        order = self._drawn(number)
        pack_of, packs = np.empty(self.rows, np.int64), 0
        for start in range(0, self.rows, PACK_WINDOW):
            window = slice(start, start + PACK_WINDOW)
            fitted, count = best_fit(self._lengths[order[window]], self.pack_length)
            pack_of[window] = fitted + packs
            packs += count
        steps = -(-packs // size)
        empty = np.arange(packs, steps * size, dtype=np.int64)
        places = np.concatenate([_permutation(packs, self.seed, number, _BATCHES)[pack_of], empty])
        rows = np.concatenate([order, np.full(len(empty), PADDING, np.int64)])
        by_place = np.argsort(places, kind="stable")
        places = places[by_place]
        starts = np.searchsorted(places, np.arange(steps + 1) * size).astype(np.int64)
        return _Epoch(rows[by_place], places % size, starts)


def _permutation(count: int, seed: int, epoch: int, stream: int) -> Indices:
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, stream], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(count)
    return np.argsort(np.asarray(words), kind="stable")


def best_fit(lengths: npt.ArrayLike, capacity: int) -> tuple[npt.NDArray[np.int64], int]:
    """The number of the sequence that each text goes into, [texts], and how many there are, by
    best-fit decreasing: the longest first, each into the fullest sequence that still has room
    (Johnson 1974; at most 11/9 of the optimum). `best_fit([3, 5, 5, 2], 8)` gives `[0, 0, 1, 1]`
    and 2."""
    texts = np.asarray(lengths)
    longest_first = np.argsort(-texts, kind="stable")
    distinct, counts = np.unique(texts, return_counts=True)
    sequence_of = np.empty(len(texts), np.int64)
    shelf = _Shelf(capacity, shortest=int(distinct[0]) if len(distinct) else capacity)
    start = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = start + count
        while start < end:
            sequences, room = shelf.take(length, end - start)
            each = room // length
            stop = min(end, start + len(sequences) * each)
            sequence_of[longest_first[start:stop]] = np.repeat(sequences, each)[: stop - start]
            in_last = stop - start - (len(sequences) - 1) * each
            shelf.put(sequences[:-1], room - each * length)
            shelf.put(sequences[-1:], room - in_last * length)
            start = stop
    return sequence_of, shelf.count


class _Shelf:
    """The sequences that still have room, by how much they have."""

    def __init__(self, capacity: int, shortest: int) -> None:
        self.count = 0
        self._capacity, self._shortest = capacity, shortest
        self._rooms: list[int] = []
        self._with_room: dict[int, list[int]] = {}

    def take(self, length: int, texts: int) -> tuple[list[int], int]:
        """As many sequences as `texts` texts of `length` need, if there are so many, all with the
        least room that suffices for one, and that room; new ones where none suffices."""
        at = bisect_left(self._rooms, length)
        room = self._rooms[at] if at < len(self._rooms) else self._capacity
        wanted = -(-texts // (room // length))
        if at == len(self._rooms):
            self.count += wanted
            return list(range(self.count - wanted, self.count)), room
        waiting = self._with_room[room]
        taken, waiting[:] = waiting[:wanted], waiting[wanted:]
        if not waiting:
            del self._with_room[room], self._rooms[at]
        return taken, room

    def put(self, sequences: list[int], room: int) -> None:
        """Sequences that have `room` left; no text fits into less than the shortest."""
        if not sequences or room < self._shortest:
            return
        if room not in self._with_room:
            insort(self._rooms, room)
            self._with_room[room] = []
        self._with_room[room] += sequences
