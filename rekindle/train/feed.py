"""From the host to the device and back without either waiting for the other.

Decides when micro-batches are copied to a GPU: on a stream of its own, one ahead of the work, from
memory that the loader has pinned. And how a few numbers come back: `Numbers` are copied behind the
work that makes them, and a later read finds them there. On a CPU both are what they
say, at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rekindle.train.micro import Micro


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
        found: list[float] = self.host.tolist()
        return found

    def seconds_since(self, earlier: Numbers) -> float:
        """Between the work that made the `earlier` ones and the work that made these, both read."""
        if self.event is not None and earlier.event is not None:
            return float(earlier.event.elapsed_time(self.event)) / 1e3
        return self.at - earlier.at
