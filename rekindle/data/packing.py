"""How texts of different length share sequences: best-fit decreasing, the longest first, each into
the fullest sequence that still has room for it (Johnson 1974; at most 11/9 of the optimum).

Texts of one length are placed together, so that the work grows with the number of different lengths
rather than of texts."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt


def best_fit(lengths: npt.ArrayLike, capacity: int) -> tuple[npt.NDArray[np.int64], int]:
    """The number of the sequence that each text goes into, [texts], and how many sequences there
    are; every length is 1 to `capacity`.

    `best_fit([3, 5, 5, 2], 8)` gives `[0, 0, 1, 1]` and 2: the first 5 has the 3 beside it, the
    second the 2."""
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
