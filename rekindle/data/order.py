"""Which rows each optimizer step trains on, as arithmetic.

The rows of global batch k, and the sequences they share, are a pure function of (seed, epoch,
lengths, k), so loader state is one integer. A permutation is the stable argsort of Philox words
keyed by (seed, epoch), whose stream is the same in all versions of numpy.

The rows of an epoch are shuffled in windows of shards, so that memory does not grow with the rows,
and a node needs the files of a few windows only: with several windows the shards are shuffled
first, and cut into windows of about as many rows. What fills no batch begins the next window.

With `lengths`, rows of like length meet in a batch, which saves padding: the permuted rows of a
window are cut into groups of `BUCKET_BATCHES` batches, each group is sorted by length, and the full
batches of the window are shuffled.

With `pack_length`, rows of a shard share sequences by `best_fit`, and the sequences of a window are
shuffled. How many a shard fills depends on its lengths alone, which rows meet on the epoch, too.

With `classes`, a window draws equally often from each class, which goes through its rows in a fixed
random order, on and on, from one epoch to the next. With `shares`, it draws so from sources: each
window has shards of all of them, where a source has fewer shards than there are windows all."""

import functools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Indices = npt.NDArray[np.int64]
Lookup = Callable[[Indices], npt.ArrayLike]
"""A number for each row of the shards with these numbers, one shard after the other."""

PADDING = -1
BUCKET_BATCHES = 50
WINDOW_ROWS = 1 << 20
WINDOW_SHARDS = 256
_ROWS, _BATCHES, _GROUPS, _SHARDS = 0, 1, 2, 3


@dataclass(frozen=True)
class Batch:
    """One global batch: N rows in `global_batch_size` sequences, called slots."""

    rows: Indices
    """Row numbers, [N]; PADDING where a slot holds nothing."""
    slots: Indices
    """Which slot each row lies in, [N], ascending; every slot occurs."""


@dataclass(frozen=True)
class _Epoch:
    """Windows of an epoch: the shards of each, and how many sequences are drawn from each source
    before each one, and in all, [windows + 1, sources]."""

    windows: list[Indices]
    drawn: Indices

    @property
    def before(self) -> Indices:
        return np.asarray(self.drawn.sum(1))


def _sequences(rows: Indices, starts: Indices) -> pa.LargeListArray:
    """The rows of each sequence, given where in `rows` each starts, and the last one ends."""
    return pa.LargeListArray.from_arrays(pa.array(starts), pa.array(rows))


class SampleOrder:
    """The order of one training: `batch(step)` for any step, in any sequence; keeps one window."""

    def __init__(
        self,
        *,
        rows: Sequence[int],
        global_batch_size: int,
        seed: int,
        lengths: Lookup | None = None,
        pack_length: int | None = None,
        sequences: Sequence[int] = (),
        classes: Lookup | None = None,
        windows: int = 1,
        sources: Sequence[int] = (),
        shares: Sequence[float] = (),
        expect: Callable[[Indices, Indices], None] = lambda now, soon: None,
    ) -> None:
        """`rows` and, where packed, `sequences` of each shard, and `sources`, the number of its
        source, whose `shares` of an epoch's sequences sum to 1; `lengths` are tokens; `windows` is
        the least number of windows. `expect` learns which shards are read from now on, and which
        will be next. ValueError for nonsense."""
        self.rows, self.global_batch_size, self.seed = sum(rows), global_batch_size, seed
        self.pack_length, self.by_length = pack_length, lengths is not None
        if self.rows < 1 or min(rows) < 1 or global_batch_size < 1:
            raise ValueError(f"need rows and a batch size, got {self.rows} and {global_batch_size}")
        if pack_length is not None and (len(sequences) != len(rows) or lengths is None or classes):
            raise ValueError("packing needs lengths, and the sequences of each shard; no classes")
        if shares and (len(sources) != len(rows) or classes):
            raise ValueError("shares need the source of each shard, and no classes")
        self._lengths, self._classes, self._expect = lengths, classes, expect
        self._shares = np.asarray(shares)
        self._sources = np.asarray(sources if shares else [0] * len(rows), np.int64)
        self._starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._filled = np.asarray(rows if pack_length is None else sequences, np.int64)
        self._total = int(self._filled.sum())
        wanted = max(windows, self.rows // WINDOW_ROWS, len(rows) // WINDOW_SHARDS)
        most = self._total // (BUCKET_BATCHES * global_batch_size)
        self._windows = max(1, min(wanted, most, int(np.bincount(self._sources).max())))
        self._cut = functools.lru_cache(2)(self._epoch)  # the next one's first window is asked for
        self._batches = functools.lru_cache(1)(self._load)

    def batch(self, step: int) -> Batch:
        """Global batch `step` (from 0); unpacked, `slots` is 0, 1, 2, ..."""
        number, position = self.epoch_of(step)
        size, epoch = self.global_batch_size, self._cut(number)
        firsts = epoch.before[:-1] // size
        window = int(np.searchsorted(firsts, position, side="right")) - 1
        start = (position - int(firsts[window])) * size
        found = self._batches(number, window).slice(start, size)
        slots = np.repeat(np.arange(size, dtype=np.int64), found.value_lengths())
        return Batch(np.asarray(found.flatten()), slots)

    def steps(self, epochs: float) -> int:
        """Optimizer steps of so many epochs: with 5 batches an epoch, 1.5 epochs are 8."""
        return max(1, math.ceil(round(epochs * self.steps_in_epoch, 6)))

    def epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch that `step` belongs to and its position there, both from 0."""
        return divmod(step, self.steps_in_epoch)

    @property
    def steps_in_epoch(self) -> int:
        """Batches in one pass over the rows, the short last one included."""
        return -(-self._total // self.global_batch_size)

    def _epoch(self, number: int) -> _Epoch:
        """An epoch's shards, those of each source shuffled and divided among the windows."""
        window_of = np.full(len(self._filled), -1)
        for source in np.unique(self._sources):
            mine = np.flatnonzero(self._sources == source)
            if len(mine) >= self._windows:
                # with shares the same ones each time, so that rows come in turns
                turn = 0 if len(self._shares) else number
                places = self._permutation(len(mine), turn, _SHARDS, source)
                window_of[mine] = places * self._windows // len(mine)
        drawn = self._drawn_before(window_of)
        by_window = np.argsort(window_of, kind="stable")
        begins = np.searchsorted(window_of[by_window], np.arange(self._windows + 1))
        windows, kept, first = list[Indices](), [0], 0
        for window, end in enumerate(drawn.sum(1).tolist()[1:]):
            last = window + 1 == self._windows
            # a window fills a batch, whose rest goes to the next
            start = int(drawn[kept[-1]].sum())
            if last or min(end - start, self._total - end) >= self.global_batch_size:
                own = by_window[begins[first] : begins[window + 1]]
                windows.append(np.sort(np.concatenate([by_window[: begins[0]], own])))
                kept.append(window + 1)
                first = window + 1
        return _Epoch(windows, drawn[kept])

    def _drawn_before(self, window_of: Indices) -> Indices:
        """[windows + 1, sources]: sequences that are drawn from each source before a window, in
        proportion to what it has in those before; a source that is in all follows the others."""
        wanted = [self._total]
        if len(self._shares):
            bounds = np.append(np.cumsum(self._shares)[:-1], 1.0)
            wanted = np.diff(np.floor(self._total * bounds).astype(np.int64), prepend=0).tolist()
        every = np.bincount(window_of + 1, self._filled, self._windows + 1)
        drawn = []
        for source, count in enumerate(wanted):
            mine = self._sources == source
            own = np.bincount(window_of[mine] + 1, self._filled[mine], self._windows + 1)
            held = np.cumsum((every if own[0] else own)[1:]).astype(np.int64).tolist()
            drawn.append([0, *(count * before // held[-1] for before in held)])
        return np.array(drawn, np.int64).T

    def _load(self, number: int, window: int) -> pa.LargeListArray:
        """The batches that begin with what this window adds, whole but for the epoch's last."""
        epoch, size = self._cut(number), self.global_batch_size
        last = window + 1 == len(epoch.windows)
        soon = self._cut(number + 1).windows[0] if last else epoch.windows[window + 1]
        left = int(epoch.before[window]) % size
        read = np.concatenate(epoch.windows[window - bool(left) : window + 1])
        self._expect(read, soon)
        made = self._drawn(number, window)
        if left:
            before = self._drawn(number, window - 1)
            made = pa.concat_arrays([before.slice(len(before) - left), made])
        if not last:
            made = made.slice(0, len(made) // size * size)
        if self.by_length and self.pack_length is None:
            made = made.take(self._by_length(np.asarray(made.flatten()), read, number, window))
        empty = -len(made) % size
        nothing = _sequences(np.full(empty, PADDING, np.int64), np.arange(empty + 1))
        return pa.concat_arrays([made, nothing])

    def _by_length(self, made: Indices, held: Indices, number: int, window: int) -> Indices:
        """How rows of the shards `held`, each a sequence of its own, are ordered by length."""
        assert self._lengths is not None
        rows = self._rows_of(held)
        by_row = np.argsort(rows)
        lengths = np.asarray(self._lengths(held))[by_row[np.searchsorted(rows[by_row], made)]]
        size = self.global_batch_size
        group = size * BUCKET_BATCHES
        starts = range(0, len(made), group)
        parts = [at + np.argsort(lengths[at : at + group], kind="stable") for at in starts]
        order = np.concatenate(parts)
        full = len(made) // size
        shuffled = order[: full * size].reshape(full, size)
        shuffled = shuffled[self._permutation(full, number, _BATCHES, window)]
        return np.concatenate([shuffled.ravel(), order[full * size :]])

    def _drawn(self, number: int, window: int) -> pa.LargeListArray:
        """What a window adds to an epoch, in random order."""
        shards, packed = self._cut(number).windows[window], self.pack_length is not None
        if packed:
            made = self._packed(shards, 0 if len(self._shares) else number)
        else:
            rows = self._rows_of(shards)
            made = _sequences(rows, np.arange(len(rows) + 1))
        if self._classes is not None or len(self._shares):
            made = made.take(self._shared(shards, number, window))
        order = self._permutation(len(made), number, _BATCHES if packed else _ROWS, window)
        return made.take(np.argsort(order) if packed else order)

    def _shared(self, shards: Indices, number: int, window: int) -> Indices:
        """Which sequences of a window are drawn: of each class, or each source, its share."""
        epoch = self._cut(number)
        counts, begins = epoch.drawn[window + 1] - epoch.drawn[window], epoch.drawn[window]
        if self._classes is not None:
            classes, group_of = np.unique(np.asarray(self._classes(shards)), return_inverse=True)
            share, more = divmod(int(counts[0]), len(classes))
            counts = share + (np.arange(len(classes)) < more)
        else:
            group_of = np.repeat(self._sources[shards], self._filled[shards])
        drawn = []
        for group, count in enumerate(counts.tolist()):
            mine = np.flatnonzero(group_of == group)
            mine = mine[self._permutation(len(mine), 0, _GROUPS, group)]
            begin = number * count
            if len(self._shares) and (self._sources == group).sum() < self._windows:
                # all of its shards are in each window
                begin = number * int(epoch.drawn[-1][group]) + int(begins[group])
            drawn.append(mine[(begin + np.arange(count)) % max(len(mine), 1)])
        return np.concatenate(drawn)

    def _packed(self, shards: Indices, number: int) -> pa.LargeListArray:
        assert self._lengths is not None
        assert self.pack_length is not None
        lengths = np.asarray(self._lengths(shards))
        if lengths.min() < 1 or lengths.max() > self.pack_length:
            raise ValueError(f"packing needs lengths of 1 to {self.pack_length} tokens")
        parts, begin = list[pa.LargeListArray](), 0
        for shard in shards.tolist():
            first, end = self._starts[shard : shard + 2]
            order = self._permutation(int(end - first), number, _ROWS, shard)
            fitted, count = best_fit(lengths[begin:][order], self.pack_length)
            if count != self._filled[shard]:
                raise ValueError(f"a shard fills {count} sequences, not {self._filled[shard]}")
            by_pack = np.argsort(fitted, kind="stable")
            starts = np.searchsorted(fitted[by_pack], np.arange(count + 1)).astype(np.int64)
            parts.append(_sequences(first + order[by_pack], starts))
            begin += int(end - first)
        return pa.concat_arrays(parts)

    def _rows_of(self, shards: Indices) -> Indices:
        """Numbers of the rows of shards, one shard after the other."""
        sizes = np.diff(self._starts)[shards]
        ends = np.cumsum(sizes)
        first: Indices = np.repeat(self._starts[shards] - (ends - sizes), sizes)
        return first + np.arange(ends[-1])

    def _permutation(self, count: int, epoch: int, stream: int, window: int) -> Indices:
        key = np.array([self.seed, epoch], np.uint64)
        counter = np.array([0, 0, window, stream], np.uint64)
        words = np.random.Philox(key=key, counter=counter).random_raw(count)
        return np.argsort(np.asarray(words), kind="stable")


def best_fit(lengths: npt.ArrayLike, capacity: int) -> tuple[npt.NDArray[np.int64], int]:
    """The number of the sequence that each text goes into, [texts], and how many there are, by
    best-fit decreasing: the longest first, each into the fullest sequence that still has room
    (Johnson 1974; at most 11/9 of the optimum). [3, 5, 5, 2] in 8: `[0, 0, 1, 1]` and 2."""
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
