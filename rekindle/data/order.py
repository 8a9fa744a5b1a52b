"""Which rows each optimizer step trains on, as arithmetic.

The rows of global batch k, and the sequences they share, are a pure function of (seed,
epoch, lengths, k), so loader state is one integer. A permutation is the stable argsort of
Philox words keyed by (seed, epoch), whose stream is the same in all versions of numpy.

The rows of an epoch are shuffled in windows of shards, so that memory does not grow with
the rows, and a node needs the files of a few windows only: with several windows the
shards are shuffled first, and cut into windows of about as many rows. What fills no batch
begins the next window.

With `lengths`, rows of like length meet in a batch, which saves padding: the permuted
rows of a window are cut into groups of `BUCKET_BATCHES` batches, each group is sorted by
length, and the full batches of the window are shuffled.

With `pack_length`, rows of a shard share sequences by `best_fit`, and the sequences of a
window are shuffled. How many a shard fills depends on its lengths alone, which rows meet
on the epoch, too.

With `classes`, a window draws equally often from each class, which goes through its rows
in a fixed random order, on and on, from one epoch to the next. With `shares`, it draws so
from sources: each window has shards of all of them, where a source has fewer shards than
there are windows all."""

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
# streams of random words: what is permuted by one
# must not depend on what another permutes
_ROWS = 0
_BATCHES = 1
_GROUPS = 2
_SHARDS = 3


@dataclass(frozen=True)
class Batch:
    """One global batch: N rows in `global_batch_size` sequences, called slots."""

    rows: Indices
    """Row numbers, [N]; PADDING where a slot holds nothing."""
    slots: Indices
    """Which slot each row lies in, [N], ascending; every slot occurs."""


@dataclass(frozen=True)
class _Epoch:
    """Windows of an epoch: the shards of each, and how many sequences are drawn from each
    source before each one, and in all, [windows + 1, sources]."""

    windows: list[Indices]
    drawn: Indices

    @property
    def before(self) -> Indices:
        return np.asarray(self.drawn.sum(1))


def _sequences(rows: Indices, starts: Indices) -> pa.LargeListArray:
    """The rows of each sequence, by where in `rows` each starts,
    and the last one ends."""
    return pa.LargeListArray.from_arrays(pa.array(starts), pa.array(rows))


class SampleOrder:
    """The order of one training: `batch(step)` for
    any step, in any order; keeps one window."""

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
        """`rows` and, where packed, `sequences` of each shard, and `sources`, the number
        of its source, whose `shares` of an epoch's sequences sum to 1; `lengths` are
        tokens; `windows` is the least number of windows. `expect` learns which shards are
        read from now on, and which will be next. ValueError for nonsense."""
        self.rows = sum(rows)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.pack_length = pack_length
        self.by_length = lengths is not None
        if self.rows < 1 or min(rows) < 1 or global_batch_size < 1:
            raise ValueError(f"need rows and a batch size, got {self.rows} and {global_batch_size}")
        if pack_length is not None and (len(sequences) != len(rows) or lengths is None or classes):
            raise ValueError("packing needs lengths, and the sequences of each shard; no classes")
        if shares and (len(sources) != len(rows) or classes):
            raise ValueError("shares need the source of each shard, and no classes")
        self._lengths = lengths
        self._classes = classes
        self._expect = expect
        self._shares = np.asarray(shares)
        self._sources = np.asarray(sources if shares else [0] * len(rows), np.int64)
        # the number of each shard's first row, and of the row behind the last shard
        self._starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._filled = np.asarray(rows if pack_length is None else sequences, np.int64)
        self._total = int(self._filled.sum())
        least_windows = max(windows, self.rows // WINDOW_ROWS, len(rows) // WINDOW_SHARDS)
        # a window has the batches of one group at least, and a shard of some source
        most_windows = self._total // (BUCKET_BATCHES * global_batch_size)
        most_shards = int(np.bincount(self._sources).max())
        self._windows = max(1, min(least_windows, most_windows, most_shards))
        # two: at the end of an epoch the first window of the next one is asked for
        self._epoch = functools.lru_cache(2)(self._make_epoch)
        self._batches = functools.lru_cache(1)(self._load)

    def batch(self, step: int) -> Batch:
        """Global batch `step` (from 0); unpacked, `slots` is 0, 1, 2, ..."""
        number, position = self.epoch_of(step)
        size = self.global_batch_size
        # the first batch that each window begins
        first_batches = self._epoch(number).before[:-1] // size
        window = int(np.searchsorted(first_batches, position, side="right")) - 1
        start = (position - int(first_batches[window])) * size
        sequences = self._batches(number, window).slice(start, size)
        slots = np.repeat(np.arange(size, dtype=np.int64), sequences.value_lengths())
        return Batch(np.asarray(sequences.flatten()), slots)

    def steps(self, epochs: float) -> int:
        """Optimizer steps of so many epochs: with
        5 batches an epoch, 1.5 epochs are 8."""
        # rounded first: 1.1 * 10 is 11.000000000000002, and 11 steps are meant
        return max(1, math.ceil(round(epochs * self.steps_in_epoch, 6)))

    def epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch that `step` belongs to and its position there, both from 0."""
        return divmod(step, self.steps_in_epoch)

    @property
    def steps_in_epoch(self) -> int:
        """Batches in one pass over the rows, the short last one included."""
        return -(-self._total // self.global_batch_size)

    def _make_epoch(self, number: int) -> _Epoch:
        """An epoch: the shards of each source, shuffled and divided among the windows."""
        window_of = np.full(len(self._filled), -1)  # -1: a shard of all windows
        for source in np.unique(self._sources):
            source_shards = np.flatnonzero(self._sources == source)
            if len(source_shards) >= self._windows:
                # with shares the same ones each time, so that rows come in turns
                turn = 0 if len(self._shares) else number
                places = self._permutation(len(source_shards), turn, _SHARDS, source)
                window_of[source_shards] = places * self._windows // len(source_shards)
        drawn = self._drawn_before(window_of)
        by_window = np.argsort(window_of, kind="stable")
        # where the shards of each window begin in
        # `by_window`, behind those of all windows
        begins = np.searchsorted(window_of[by_window], np.arange(self._windows + 1))
        of_all_windows = by_window[: begins[0]]
        windows = list[Indices]()
        bounds = [0]  # where the windows that are large enough begin and end
        for window, end in enumerate(drawn.sum(1).tolist()[1:]):
            is_last = window + 1 == self._windows
            # a window fills a batch at least; a smaller one is joined to the next
            start = int(drawn[bounds[-1]].sum())
            if is_last or min(end - start, self._total - end) >= self.global_batch_size:
                own = by_window[begins[bounds[-1]] : begins[window + 1]]
                windows.append(np.sort(np.concatenate([of_all_windows, own])))
                bounds.append(window + 1)
        return _Epoch(windows, drawn[bounds])

    def _drawn_before(self, window_of: Indices) -> Indices:
        """[windows + 1, sources]: sequences that are drawn from each source before a
        window, in proportion to what it has in those before; a source that is in all
        follows the others."""
        counts = [self._total]
        if len(self._shares):
            # 1 exactly at the end: a rounded sum of shares could lose the last sequence
            bounds = np.append(np.cumsum(self._shares)[:-1], 1.0)
            counts = np.diff(np.floor(self._total * bounds).astype(np.int64), prepend=0).tolist()
        # at 0 the shards of all windows, then those of each window
        sequences_by_window = np.bincount(window_of + 1, self._filled, self._windows + 1)
        drawn = list[list[int]]()
        for source, count in enumerate(counts):
            is_own = self._sources == source
            own = np.bincount(window_of[is_own] + 1, self._filled[is_own], self._windows + 1)
            followed = sequences_by_window if own[0] else own
            # whole numbers of any size: count * before may be beyond 64 bits
            totals = np.cumsum(followed[1:]).astype(np.int64).tolist()
            drawn.append([0, *(count * total // totals[-1] for total in totals)])
        return np.array(drawn, np.int64).T

    def _load(self, number: int, window: int) -> pa.LargeListArray:
        """The batches that a window begins, all of them full but for the epoch's last."""
        epoch = self._epoch(number)
        size = self.global_batch_size
        is_last = window + 1 == len(epoch.windows)
        next_shards = self._epoch(number + 1).windows[0] if is_last else epoch.windows[window + 1]
        # sequences of the window before that filled no batch
        carried = int(epoch.before[window]) % size
        first_window = window - 1 if carried else window
        shards = np.concatenate(epoch.windows[first_window : window + 1])
        self._expect(shards, next_shards)
        sequences = self._window_sequences(number, window)
        if carried:
            before = self._window_sequences(number, window - 1)
            sequences = pa.concat_arrays([before.slice(len(before) - carried), sequences])
        if not is_last:
            sequences = sequences.slice(0, len(sequences) // size * size)
        if self.by_length and self.pack_length is None:
            rows = np.asarray(sequences.flatten())
            sequences = sequences.take(self._by_length(rows, shards, number, window))
        empty_slots = -len(sequences) % size
        padding = _sequences(np.full(empty_slots, PADDING, np.int64), np.arange(empty_slots + 1))
        return pa.concat_arrays([sequences, padding])

    def _by_length(self, rows: Indices, shards: Indices, number: int, window: int) -> Indices:
        """How rows of these shards, each a sequence of its own, are ordered by length."""
        assert self._lengths is not None
        all_rows = self._rows_of(shards)
        by_row = np.argsort(all_rows)
        places = by_row[np.searchsorted(all_rows[by_row], rows)]
        lengths = np.asarray(self._lengths(shards))[places]
        size = self.global_batch_size
        group = size * BUCKET_BATCHES
        parts = list[Indices]()
        for start in range(0, len(rows), group):
            parts.append(start + np.argsort(lengths[start : start + group], kind="stable"))
        order = np.concatenate(parts)
        # the short last batch of the epoch stays the last
        full = len(rows) // size
        batches = order[: full * size].reshape(full, size)
        batches = batches[self._permutation(full, number, _BATCHES, window)]
        return np.concatenate([batches.ravel(), order[full * size :]])

    def _window_sequences(self, number: int, window: int) -> pa.LargeListArray:
        """What a window adds to an epoch, in random order."""
        shards = self._epoch(number).windows[window]
        if self.pack_length is not None:
            # with shares the same packs each time, so that they come in turns
            sequences = self._packed(shards, 0 if len(self._shares) else number)
        else:
            rows = self._rows_of(shards)
            sequences = _sequences(rows, np.arange(len(rows) + 1))
        if self._classes is not None or len(self._shares):
            sequences = sequences.take(self._shared(shards, number, window))
        if self.pack_length is not None:
            # inverted: so packed texts keep the order
            # that they had before sources were mixed
            places = self._permutation(len(sequences), number, _BATCHES, window)
            return sequences.take(np.argsort(places))
        return sequences.take(self._permutation(len(sequences), number, _ROWS, window))

    def _shared(self, shards: Indices, number: int, window: int) -> Indices:
        """Which sequences of a window are drawn: the share of each class or source."""
        epoch = self._epoch(number)
        begins = epoch.drawn[window]
        counts = epoch.drawn[window + 1] - begins
        if self._classes is not None:
            classes, group_of = np.unique(np.asarray(self._classes(shards)), return_inverse=True)
            share, remainder = divmod(int(counts[0]), len(classes))
            counts = np.full(len(classes), share)
            counts[:remainder] += 1
        else:
            group_of = np.repeat(self._sources[shards], self._filled[shards])
        drawn = list[Indices]()
        for group, count in enumerate(counts.tolist()):
            members = np.flatnonzero(group_of == group)
            members = members[self._permutation(len(members), 0, _GROUPS, group)]
            begin = number * count
            if len(self._shares) and (self._sources == group).sum() < self._windows:
                # all of its shards are in each window
                begin = number * int(epoch.drawn[-1][group]) + int(begins[group])
            # on and on through the members, from one epoch to the next
            turns = (begin + np.arange(count)) % max(len(members), 1)
            drawn.append(members[turns])
        return np.concatenate(drawn)

    def _packed(self, shards: Indices, number: int) -> pa.LargeListArray:
        assert self._lengths is not None
        assert self.pack_length is not None
        lengths = np.asarray(self._lengths(shards))
        if lengths.min() < 1 or lengths.max() > self.pack_length:
            raise ValueError(f"packing needs lengths of 1 to {self.pack_length} tokens")
        parts = list[pa.LargeListArray]()
        begin = 0  # of the shard's rows in `lengths`
        for shard in shards.tolist():
            first, end = self._starts[shard : shard + 2]
            order = self._permutation(int(end - first), number, _ROWS, shard)
            sequence_of, count = best_fit(lengths[begin:][order], self.pack_length)
            if count != self._filled[shard]:
                raise ValueError(f"a shard fills {count} sequences, not {self._filled[shard]}")
            by_pack = np.argsort(sequence_of, kind="stable")
            starts = np.searchsorted(sequence_of[by_pack], np.arange(count + 1)).astype(np.int64)
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
        # Philox's two words of key and four of counter,
        # the first two of which it counts itself
        key = np.array([self.seed, epoch], np.uint64)
        counter = np.array([0, 0, window, stream], np.uint64)
        words = np.random.Philox(key=key, counter=counter).random_raw(count)
        return np.argsort(np.asarray(words), kind="stable")


def best_fit(lengths: npt.ArrayLike, capacity: int) -> tuple[npt.NDArray[np.int64], int]:
    """The number of the sequence that each text goes into, [texts], and how many there
    are, by best-fit decreasing: the longest first, each into the fullest sequence that
    still has room (Johnson 1974; at most 11/9 of the optimum). [3, 5, 5, 2] in 8: `[0, 0,
    1, 1]` and 2."""
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
            # all texts of one length at once: each
            # of these sequences takes as many as fit
            texts_in_each = room // length
            stop = min(end, start + len(sequences) * texts_in_each)
            numbers = np.repeat(sequences, texts_in_each)
            sequence_of[longest_first[start:stop]] = numbers[: stop - start]
            in_last = stop - start - (len(sequences) - 1) * texts_in_each
            shelf.put(sequences[:-1], room - texts_in_each * length)
            shelf.put(sequences[-1:], room - in_last * length)
            start = stop
    return sequence_of, shelf.count


class _Shelf:
    """The sequences that still have room, by how much they have."""

    def __init__(self, capacity: int, shortest: int) -> None:
        self.count = 0
        self._capacity = capacity
        self._shortest = shortest
        self._rooms: list[int] = []  # ascending, each once
        self._with_room: dict[int, list[int]] = {}

    def take(self, length: int, texts: int) -> tuple[list[int], int]:
        """As many sequences as `texts` texts of `length` need, if there are so many, all
        with the least room that suffices for one, and that room; new ones where none
        suffices."""
        place = bisect_left(self._rooms, length)
        has_room = place < len(self._rooms)
        room = self._rooms[place] if has_room else self._capacity
        needed = -(-texts // (room // length))
        if not has_room:
            self.count += needed
            return list(range(self.count - needed, self.count)), room
        with_room = self._with_room[room]
        sequences = with_room[:needed]
        del with_room[:needed]
        if not with_room:
            del self._with_room[room], self._rooms[place]
        return sequences, room

    def put(self, sequences: list[int], room: int) -> None:
        """Sequences that have `room` left; no text fits into less than the shortest."""
        if not sequences or room < self._shortest:
            return
        if room not in self._with_room:
            insort(self._rooms, room)
            self._with_room[room] = []
        self._with_room[room] += sequences
