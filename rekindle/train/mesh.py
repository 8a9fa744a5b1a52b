"""The ranks arranged by the axes of a layout, and the process groups that follow from it.

Order of the axes, slowest first: pp, dp, shard, cp, tp (spec/layout.py says why). Weights
are sharded over shard x cp, because context-parallel ranks hold the same weights, too."""

import dataclasses
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rekindle.spec.layout import Layout

T = TypeVar("T")
Ranks = dist.ProcessGroup | None
"""Some of the ranks. As a result, None says that there are no others; as an argument of
torch.distributed, it stands for all ranks."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """This rank's place among all ranks, axis by axis."""

    layout: Layout
    device: torch.device
    ranks: DeviceMesh | None = None
    """None where every rank holds the whole model: DDP needs no mesh of axes."""

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Self:
        """The mesh of a layout on the ranks of this job; all ranks have to call it."""
        if layout.only_replicates:
            return cls(layout, device)
        shape = (layout.pp, layout.dp, layout.shard, layout.cp, layout.tp)
        names = ("pp", "dp", "shard", "cp", "tp")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        mesh["shard", "cp"]._flatten("weights")
        return cls(layout, device, mesh)

    def place(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        if self.ranks is None:
            return dist.get_rank() if axis == "dp" else 0
        return int(self.ranks.get_local_rank(axis))

    def leads(self, *axes: str) -> bool:
        """Whether this rank is the first on each of these axes."""
        return not any(map(self.place, axes))

    def group(self, axis: str) -> Ranks:
        """The ranks that differ from this one on that axis only; None where there are no others."""
        if self.ranks is None or getattr(self.layout, axis) == 1:
            return None
        return self.ranks.get_group(axis)

    @property
    def replicas(self) -> Ranks:
        """The ranks that hold the same weights as this one; None where there are no others."""
        if self.ranks is None:
            return dist.group.WORLD if self.layout.dp > 1 else None
        return self.group("dp")

    @property
    def data_rank(self) -> int:
        """Which part of the batch this rank works on, of `layout.data`."""
        return self.place("dp") * self.layout.shard + self.place("shard")

    def over(self, *axes: str) -> DeviceMesh:
        """The part of the mesh that has these axes; `weights` is shard x cp."""
        assert self.ranks is not None
        return self.ranks[axes]


def of_all(value: T, group: Ranks = None) -> list[T]:
    """The `value` of each rank, in the order of ranks (a collective on the host)."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def of_first(value: T, group: Ranks = None) -> T:
    """The `value` of rank 0 (a collective on the host)."""
    # one element, because torch broadcasts into a list
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group, device=torch.device("cpu"))
    return values[0]
