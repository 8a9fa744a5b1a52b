"""Which part of a tensor a rank holds."""

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Interval = tuple[int, int]
"""[start, end) of a dimension."""


def intervals(tensor: torch.Tensor) -> list[Interval]:
    """Which part of a tensor this rank holds, one [start, end) a dimension. Tensor
    parallelism (the mesh's last dimension) divides first, then FSDP: 7 rows on 4 ranks
    are 2, 2, 2, 1."""
    bounds = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return bounds
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if not divides(placement):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        start, end = bounds[dim]
        size = -(-(end - start) // mesh.size(axis))
        low = min(start + coordinate[axis] * size, end)
        bounds[dim] = (low, min(low + size, end))
    return bounds


def divides(placement: Placement) -> bool:
    """Whether a placement cuts its dimension; FSDP over tensor parallelism has its own kind."""
    return isinstance(placement, Shard | _StridedShard)
