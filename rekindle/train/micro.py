"""Micro-batches on their way from the loader to the device, and the rows that they are made of.

Neither host nor device waits for the other: micro-batches are copied to a GPU on a stream of its
own, one ahead of the work, from memory that the loader has pinned; a few numbers come back as
`Numbers`, copied behind the work that makes them, and a later read finds them there. On a CPU both
are what they say, at once.

Shapes: B rows or sequences, T tokens of this rank, N targets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rekindle.train.documents import Documents

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Micro:
    """One micro-batch: what the network takes, and what its loss is made of.

    `inputs` are the network's own, first dimension B. Of classes: `labels` int64 [B] and `weights`
    float64 [B], 0 for rows that are none; of joined texts B is 1 in `inputs`, and `targets` int64
    [texts] says where each text begins. Of tokens: `targets` int64 [N], which of the flattened
    [B * T] tokens are followed by a token to predict, and `labels` [N], that token. Of tags:
    `targets` [N], which of these tokens are a word's first, and `labels` [N], its tag. `documents`
    where several share a sequence. `count` float64 [1] is the number of targets in the global
    batch; `key` seeds dropout, and stays on the host."""

    inputs: Tensors
    labels: torch.Tensor
    count: torch.Tensor
    key: int
    weights: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    documents: Documents | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of it, in an order that `with_tensors` knows."""
        yield from self.inputs.values()
        yield from (t for t in (self.labels, self.count, self.weights, self.targets)
                    if t is not None)  # fmt: skip
        if self.documents is not None:
            yield from self.documents.tensors()

    def with_tensors(self, moved: Iterator[torch.Tensor]) -> Micro:
        """The same with `tensors` replaced, in their order."""
        return Micro(
            inputs={name: next(moved) for name in self.inputs}, labels=next(moved),
            count=next(moved), key=self.key, weights=None if self.weights is None else next(moved),
            targets=None if self.targets is None else next(moved),
            documents=None if self.documents is None else self.documents.with_tensors(moved),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Rows of the shards that become one micro-batch: their number (negative: none), which sequence
    each is in, and how long the longest may be."""

    table: pa.Table
    rows: np.ndarray
    slots: np.ndarray
    length: int


class Feed:
    """Copies micro-batches to `device`, with floating-point inputs as `exact`."""

    def __init__(self, device: torch.device, exact: torch.dtype) -> None:
        self.device, self.exact = device, exact
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, micro: Sequence[Micro]) -> Iterator[Micro]:
        """Each micro-batch on the device, ready for the current stream."""
        if self.stream is None:
            yield from map(self._moved, micro)
            return
        ahead = self._copied(micro[0]) if micro else None
        for following in [*micro[1:], None]:
            assert ahead is not None
            moved, copied = ahead
            ahead = self._copied(following) if following is not None else None
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in moved.tensors():
                tensor.record_stream(current)  # its memory is the other stream's to give out again
            yield moved

    def _copied(self, micro: Micro) -> tuple[Micro, Any]:
        with torch.cuda.stream(self.stream):
            moved = self._moved(micro)
            return moved, self.stream.record_event()

    def _moved(self, micro: Micro) -> Micro:
        moved = (t.to(self.device, non_blocking=True) for t in micro.tensors())
        return micro.with_tensors(t.to(self.exact) if t.is_floating_point() else t for t in moved)


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
        """The numbers; waits until they are there."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()

    def seconds_since(self, earlier: Numbers) -> float:
        """Between the work that made the `earlier` ones and the work that made these, both read."""
        if self.event is not None and earlier.event is not None:
            return float(earlier.event.elapsed_time(self.event)) / 1e3
        return self.at - earlier.at
