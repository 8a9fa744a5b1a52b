"""Copies of the tensors of one moment in host memory, and whether a machine can hold
those of all its ranks: 12 bytes a parameter that is trained with AdamW in fp32."""

import dataclasses
import itertools
import logging
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rekindle import formats
from rekindle.errors import CheckpointError
from rekindle.launch import process
from rekindle.train.dcp import THREADS, Piece
from rekindle.train.mesh import of_all

log = logging.getLogger(__name__)

_COPY_BYTES = 16 << 20  # no piece of work is larger, so that threads end together
_ALIGNMENT = 64


class Snapshot:
    """Host memory, allocated once, in which the tensors of one moment outlive the next step."""

    def __init__(self) -> None:
        self.places: dict[str, torch.Tensor] = {}
        self.layout: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self.pinned: Pinned | None = None
        self.copiers = ThreadPoolExecutor(THREADS, "snapshot", torch.set_num_threads, (1,))

    def take(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """The same pieces with copies of their tensors, which hold until the next call."""
        layout = {name: (piece.local.size(), piece.local.dtype) for name, piece in pieces.items()}
        if layout != self.layout:
            self.release()  # before there are new ones
            tensors = {name: piece.local for name, piece in pieces.items()}
            self.places, self.pinned = _allocate(tensors)
            self.layout = layout
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, piece in pieces.items():
            copies += _parts(self.places[name], piece.local)
        shares = [copies[start::THREADS] for start in range(THREADS)]
        list(self.copiers.map(_copy, [share for share in shares if share]))
        if any(not piece.local.is_cpu for piece in pieces.values()):
            torch.accelerator.synchronize()
        pieces_of_copies = {}
        for name, piece in pieces.items():
            pieces_of_copies[name] = dataclasses.replace(piece, local=self.places[name])
        return pieces_of_copies

    def release(self) -> None:
        """Give the memory back; the copies of the last `take` are gone."""
        if self.pinned is not None:
            self.pinned.release()
        self.places = {}
        self.layout = {}
        self.pinned = None


class Pinned:
    """Host memory that CUDA may copy into directly, until it is unregistered with the driver."""

    def __init__(self, start: int, size: int, cudart: Any) -> None:
        self.start = start
        self.cudart = cudart
        self.is_registered = int(cudart.cudaHostRegister(start, size, 0)) == 0
        if not self.is_registered:
            log.warning("cannot pin %d bytes of host memory; saves will take longer", size)

    def release(self) -> None:
        """Unregister the memory; a second call does nothing."""
        if self.is_registered:
            self.is_registered = False
            self.cudart.cudaHostUnregister(self.start)


def snapshot_bytes(pieces: Mapping[str, Piece]) -> int:
    """Host memory that a snapshot of the pieces takes: 64 GB of weights and moments take 64 GB."""
    return sum(_aligned(piece.local.nbytes) for piece in pieces.values())


def check_host_memory(pieces: Mapping[str, Piece]) -> None:
    """Raises CheckpointError on all ranks where a machine cannot hold the snapshots of
    its ranks; before the first save, in which the kernel would kill a rank."""
    machine = process.memory_identity()
    needs_of_ranks = of_all((machine, snapshot_bytes(pieces), process.available_bytes()))
    needs_of_machines: dict[str, list[tuple[int, int]]] = {}
    for machine, snapshot_size, available_bytes in needs_of_ranks:
        needs_of_machines.setdefault(machine, []).append((snapshot_size, available_bytes))
    for _, needs in sorted(needs_of_machines.items()):
        needed = sum(snapshot_size for snapshot_size, _ in needs)
        available = min(available_bytes for _, available_bytes in needs)
        if needed > available:
            message = f"a checkpoint needs {formats.binary(needed)} of host memory for the copies "
            message += f"of {len(needs)} ranks on one machine, and {formats.binary(available)} are "
            message += "left there"
            fix = "raise the container's memory limit, use machines with more memory, or shard "
            fix += "the model over more machines (train.layout.shard); model.lora and "
            fix += "train.weights: bf16 make the copies smaller"
            raise CheckpointError(message, where="train.checkpoint", fix=fix)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _allocate(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Pinned | None]:
    """An uninitialised host tensor for each, each with a storage of its own size."""
    sizes = [_aligned(tensor.nbytes) for tensor in tensors.values()]
    *starts, total = itertools.accumulate(sizes, initial=0)
    arena = mmap.mmap(-1, max(total, 1))
    arena.madvise(mmap.MADV_HUGEPAGE)
    pinned = None
    if any(tensor.is_cuda for tensor in tensors.values()):
        start = torch.frombuffer(arena, dtype=torch.uint8).data_ptr()
        pinned = Pinned(start, total, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    places = {}
    for (name, tensor), start in zip(tensors.items(), starts, strict=True):
        memory = torch.frombuffer(arena, dtype=torch.uint8, count=tensor.nbytes, offset=start)
        places[name] = memory.view(tensor.dtype).view(tensor.size())
    return places, pinned


def _parts(target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Target and source, cut into parts that threads can share."""
    if source.nbytes <= _COPY_BYTES or not source.is_contiguous():
        return [(target, source)]
    size = _COPY_BYTES // source.element_size()
    targets = torch.split(target.view(-1), size)
    sources = torch.split(source.view(-1), size)
    return list(zip(targets, sources, strict=True))


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
