"""Counts the bytes of tensors while they live, and says what they were at the worst moment.

`Live` owns the count: each storage from its birth to its end, by what it was made for. It works on
real tensors and on fake ones, which have sizes but no values."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, MOMENTS = "parameters", "gradients", "optimizer"
ACTIVATIONS, GATHERED, CASTS = "activations", "gathered weights", "copies of weights"
TEACHER = "teacher"
PIPELINE, TEMPORARIES = "pipeline buffers", "temporaries"
_CAST = torch.ops.aten._to_copy.default


@dataclasses.dataclass
class Held:
    """A storage: its bytes, the phase in which it was made and by what operation; `kind` where it
    is known what it is for. `born` counts storages; `was` are its bytes at the worst moment."""

    size: int
    phase: str
    made_by: str
    kind: str = ""
    born: int = 0
    was: int = 0


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made while it is active and still there. `peak` is
    the most since `begin`, and `at` the number of the growth that led to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.phase = ""
        self.peaks: dict[str, int] = {}
        self.paused = False
        self.asked = 0  # at which growth of a step to look
        self.worst: list[Held] = []
        self.phase_of_peak = ""
        self._growths = self.peak = self.at = self._born = 0
        self._held: dict[int, Held] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "_local_tensor") or kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its own operations on local tensors come by here
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.note(leaf, str(func))
            if func is _CAST:
                self._copied(args[0], out)
        return out

    def note(self, tensor: torch.Tensor, made_by: str = "") -> None:
        """Count the tensor's storage, if it is a new one."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            self._born += 1
            held = Held(0, self.phase, f"{made_by} {str(tensor.dtype)[6:]}{list(tensor.shape)}")
            held.born = self._born
            self._held[storage._cdata] = held
            self._grow(held, storage.nbytes())
            weakref.finalize(storage, self._end, storage._cdata)

    def _copied(self, source: torch.Tensor, out: torch.Tensor) -> None:
        held = self._held.get(source.untyped_storage()._cdata)
        of_weights = held is not None and held.kind in (PARAMETERS, GATHERED)
        if of_weights and source.numel() == out.numel():
            self.call(CASTS, [out])

    def call(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what tensors are for."""
        for tensor in tensors:
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None:
                held.kind = kind

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A phase, from which what is still there is kept for the backward pass."""
        self.phase, since = "forward", self._born
        try:
            yield
        finally:
            self.phase = "backward"
            for held in self._held.values():
                if held.born > since:
                    held.kind = held.kind or ACTIVATIONS

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Nothing is counted."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def begin(self, asked: int = 0) -> None:
        """A step begins; at its growth number `asked` what there is is noted in `worst`."""
        self.asked, self.worst = asked, []
        self.peaks, self._growths, self.peak, self.at = {}, 0, 0, 0
        self._reach()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP gives memory back so, and takes it again."""
        held = self._held.get(storage._cdata)
        if held is not None:
            held.kind = GATHERED
            self._grow(held, storage.nbytes() - held.size)

    def _grow(self, held: Held, by: int) -> None:
        held.size += by
        self.bytes += by
        if by > 0:
            self._growths += 1
            if self._growths == self.asked:
                self.worst = list(self._held.values())
                for other in self.worst:
                    other.was = other.size
        self._reach()

    def _reach(self) -> None:
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.bytes)
        if self.bytes > self.peak:
            self.peak, self.at = self.bytes, self._growths
            self.phase_of_peak = self.phase

    def _end(self, key: int) -> None:
        self.bytes -= self._held.pop(key).size

    @contextlib.contextmanager
    def counting(self) -> Iterator[Live]:
        """Active, resized storages included."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, *args: Any) -> Any:
            done = resize(storage, *args)
            self.resized(storage)
            return done

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
