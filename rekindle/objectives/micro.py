"""Micro-batches on their way from the loader to the device, and the rows that they are
made of.

Neither host nor device waits for the other: micro-batches are copied to a GPU on a stream
of its own, one ahead of the work, from pinned memory; a few numbers come back as
`Numbers`, copied behind the work that makes them, for a later read.

`Documents` are which tokens of a micro-batch see each other, found on the host. The
padding behind the last document of a sequence counts as one. A context-parallel rank
holds two chunks of each sequence (zigzag, batches.py), whose queries see the keys of
their document from its beginning on: a rank's queries fall into runs, each with a range
of keys that ends where the run ends: what a kernel with cumulative lengths computes (Dao
2023, arXiv 2307.08691). Texts with a class are joined in one sequence, too, so that
nothing but attention ever sees padding.

Shapes: B rows or sequences, T tokens of this rank, S of all, N targets or runs, R texts a
group."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

Tensors = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Micro:
    """One micro-batch: what the network takes, and what its loss is made of."""

    inputs: Tensors
    """The network's own, first dimension B; of joined texts B is 1."""
    labels: torch.Tensor
    """The right answers. Of classes int64 [B], of numbers float64 [B], of tokens and tags
    int64 [N], one for each target."""
    count: torch.Tensor
    """Float64 [1]: the number of targets in the global batch."""
    key: int
    """The seed of dropout, which stays on the host."""
    weights: torch.Tensor | None = None
    """Of classes and numbers, float64 [B]: 0 for rows that only fill the micro-batch."""
    targets: torch.Tensor | None = None
    """Int64: of tokens [N], which of the flattened [B * T] are followed by one to
    predict; of tags [N], which are a word's first; of joined texts [texts], where each
    begins."""
    documents: Documents | None = None
    """Which tokens see each other, where several texts share a sequence."""

    def with_each(self, change: Change) -> Micro:
        """The same with what `change` makes of each tensor."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                changed[name] = change(value)
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        documents = None
        if self.documents is not None:
            documents = self.documents.with_each(change)
        return dataclasses.replace(self, inputs=inputs, documents=documents, **changed)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The rows of a micro-batch."""

    table: pa.Table
    rows: np.ndarray
    """The number of each row in its split; negative: the row only fills the micro-batch."""
    slots: np.ndarray
    """The sequence that each row goes into."""
    length: int
    """Tokens of the longest sequence."""


class Feed:
    """Copies micro-batches to `device`; floating-point inputs are fp64 or fp32, by `precision`."""

    def __init__(self, device: torch.device, precision: str) -> None:
        self.device = device
        self.exact = torch.float64 if precision == "fp64" else torch.float32
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, micro: Sequence[Micro]) -> Iterator[Micro]:
        """Each micro-batch on the device, ready for the current stream.

        The next one is copied while this one is worked on."""
        if self.stream is None:
            yield from map(self._moved, micro)
            return
        ahead = self._copy(micro[0]) if micro else None
        for following in [*micro[1:], None]:
            assert ahead is not None
            moved, copied = ahead
            ahead = self._copy(following) if following is not None else None
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)

            def record(tensor: torch.Tensor, current: Any = current) -> torch.Tensor:
                tensor.record_stream(current)  # its memory is the other stream's to give out again
                return tensor

            yield moved.with_each(record)

    def _copy(self, micro: Micro) -> tuple[Micro, Any]:
        """A micro-batch whose copy has begun, and the event of its end."""
        with torch.cuda.stream(self.stream):
            return self._moved(micro), self.stream.record_event()

    def _moved(self, micro: Micro) -> Micro:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = tensor.to(self.device, non_blocking=True)
            return moved.to(self.exact) if moved.is_floating_point() else moved

        return micro.with_each(move)


class Numbers:
    """A few numbers of one step, float64 [N] on a device, on their way to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self.event: Any = None
        self.at = time.perf_counter()
        if values.is_cuda:
            self.host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.host.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.event.record()
        else:
            self.host = values

    def read(self) -> list[float]:
        """The numbers, once they are on the host."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()

    def seconds_since(self, earlier: Numbers) -> float:
        """Seconds from the work that made `earlier` to the work that made these, both read."""
        if self.event is not None and earlier.event is not None:
            return float(earlier.event.elapsed_time(self.event)) / 1e3
        return self.at - earlier.at


Ints = npt.NDArray[np.int64]
ByHead = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

GROUP = 2.0
"""The most by which a text may be longer than the shortest of its group."""


@dataclasses.dataclass(eq=False)
class TextGroup:
    """Texts that follow each other, padded for attention to [R, `longest`]."""

    rows: int
    longest: int
    tokens: int
    """How many all its texts have together."""
    places: torch.Tensor
    """Int64 [R * longest]: the token that goes to each padded place. To padding goes the
    first token of the text, which the mask hides."""
    back: torch.Tensor
    """Int64 [tokens]: the padded place of each token."""
    mask: torch.Tensor | None
    """Bool [R, 1, 1, longest], False where there is no token; None: all texts have one length."""
    _by_head: dict[int, ByHead] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, lengths: list[int]) -> TextGroup:
        """Texts of these lengths, one after the other."""
        rows = len(lengths)
        longest = max(lengths)
        lengths_R = np.array(lengths)
        starts_R = np.cumsum(lengths_R) - lengths_R
        offsets_RT = np.arange(longest)[None].repeat(rows, 0)
        real_RT = offsets_RT < lengths_R[:, None]
        places_RT = np.where(real_RT, starts_R[:, None] + offsets_RT, starts_R[:, None])
        mask = None
        if min(lengths) < longest:
            mask = torch.from_numpy(real_RT[:, None, None])
        return cls(
            rows,
            longest,
            tokens=sum(lengths),
            places=torch.from_numpy(places_RT.flatten()),
            back=torch.from_numpy(np.flatnonzero(real_RT)),
            mask=mask,
        )

    def by_head(self, heads: int) -> ByHead:
        """`places` and `back` between [tokens * heads] and [R * heads * longest], and what is
        added to scores [R * heads, longest, longest] to mask them.

        All layers of a micro-batch share them, so they are kept."""
        if heads not in self._by_head:
            numbers = torch.arange(heads, device=self.places.device)
            places = self.places.view(self.rows, 1, -1) * heads + numbers[:, None]
            row = self.back // self.longest
            offset = self.back % self.longest
            back = (row[:, None] * heads + numbers) * self.longest + offset[:, None]
            bias = None
            if self.mask is not None:
                bias = torch.zeros(self.mask.shape, device=self.mask.device)
                bias = bias.masked_fill_(~self.mask, float("-inf")).flatten(1, 2)
                bias = bias.repeat_interleave(heads, 0)
            self._by_head[heads] = places.flatten(), back.flatten(), bias
        return self._by_head[heads]

    def with_each(self, change: Change) -> TextGroup:
        """The same with what `change` makes of each tensor."""
        places = change(self.places)
        back = change(self.back)
        mask = None if self.mask is None else change(self.mask)
        return TextGroup(self.rows, self.longest, self.tokens, places, back, mask)


# Not a dataclass: before every block FSDP searches the fields of one for gradients, each
# length in them too, and makes a copy (6 ms a block for 500 documents); torch.compile
# would guard on them.
class Documents:
    """Runs of queries, one after the other in the flattened [B * T], and the keys that
    each sees.

    `queries` and `keys` are the lengths of the runs and of their key ranges; `ranges`
    says which (sequence, start, stop) of the whole keys [B, S] these are, empty where
    queries and keys are the same tokens. `starts` and `key_starts` are int32 [N + 1], the
    sums of the lengths, on the device; `ruler` and `key_ruler` are as long as the longest
    run and range and hold nothing: a compiler sees a length that varies. `groups`: of
    texts; `grouped`: whether there are any."""

    def __init__(
        self,
        queries: list[int],
        keys: list[int],
        ranges: tuple[tuple[int, int, int], ...],
        starts: torch.Tensor,
        key_starts: torch.Tensor,
        groups: tuple[TextGroup, ...] = (),
    ) -> None:
        self.queries = queries
        self.keys = keys
        self.ranges = ranges
        self.groups = groups
        self.grouped = bool(groups)
        self.starts = starts
        self.key_starts = key_starts
        self.ruler = self.key_ruler = torch.empty(1).expand(max(queries))
        if ranges:
            self.key_ruler = torch.empty(1).expand(max(keys))

    @classmethod
    def of_texts(cls, lengths: list[int]) -> Documents:
        """Texts one after the other, shorter first, in groups: of lengths 4, 5, 6, 7, 20 two."""
        groups: list[list[int]] = []
        for length in lengths:
            first = groups[-1][0] if groups else 0
            if not first <= length <= GROUP * first:
                groups.append([])
            groups[-1].append(length)
        return cls._of_runs(lengths, lengths, (), tuple(map(TextGroup.of, groups)))

    @classmethod
    def of(cls, numbers_BS: Ints, cp: int = 1, cp_rank: int = 0) -> Documents:
        """From each token's document: 1 1 2 and 1 0 0 (0 is padding) have the runs 2, 1, 1, 2."""
        begins_BS = np.ones(numbers_BS.shape, bool)
        begins_BS[:, 1:] = numbers_BS[:, 1:] != numbers_BS[:, :-1]
        # where the documents of each sequence begin
        firsts_of_rows = [np.flatnonzero(row).tolist() for row in begins_BS]
        length = numbers_BS.shape[1]
        if cp == 1:
            runs: list[int] = []
            for firsts in firsts_of_rows:
                runs += _gaps([*firsts, length])
            return cls._of_runs(runs, runs, ())
        queries: list[int] = []
        keys: list[int] = []
        ranges = []
        size = length // (2 * cp)
        for row, firsts in enumerate(firsts_of_rows):
            for chunk in (cp_rank, 2 * cp - 1 - cp_rank):
                low = chunk * size
                high = low + size
                inside = [first for first in firsts if low < first < high]
                # the chunk's first run goes on with a document that may begin before the chunk
                begin = max(first for first in firsts if first <= low)
                queries += _gaps([low, *inside, high])
                keys += _gaps([begin, *inside, high])
                ranges.append((row, begin, high))
        return cls._of_runs(queries, keys, tuple(ranges))

    @classmethod
    def of_rows(cls, rows: int, length: int, device: torch.device) -> Documents:
        """Each sequence is one document; made on the device, without asking it."""
        starts = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
        lengths = [length] * rows
        return cls(lengths, lengths, (), starts, starts)

    @classmethod
    def _of_runs(
        cls,
        queries: list[int],
        keys: list[int],
        ranges: tuple[tuple[int, int, int], ...],
        groups: tuple[TextGroup, ...] = (),
    ) -> Documents:
        starts = _starts(queries)
        key_starts = _starts(keys) if ranges else starts
        return cls(queries, keys, ranges, starts, key_starts, groups)

    def with_each(self, change: Change) -> Documents:
        """The same with what `change` makes of each tensor."""
        starts = change(self.starts)
        key_starts = change(self.key_starts) if self.ranges else starts
        groups = tuple(group.with_each(change) for group in self.groups)
        return Documents(self.queries, self.keys, self.ranges, starts, key_starts, groups)


def _gaps(bounds: list[int]) -> list[int]:
    return [high - low for low, high in itertools.pairwise(bounds)]


def _starts(lengths: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
