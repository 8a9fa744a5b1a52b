"""Machines and the links between their GPUs, and how fast a group of ranks can exchange
data.

Ranks are numbered as in spec/layout.py, `tp` fastest, so an axis is known by its size and
the distance between its ranks. A ring through several nodes uses a node's NICs in the
share that its ranks are of the node: eight ranks a node use all of them, one of eight an
eighth."""

import dataclasses

from rekindle.catalog.machines import Gpu
from rekindle.spec.layout import Layout


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """`size` ranks on `nodes` that exchange `bytes_per_second` each, one way,
    at the peak."""

    size: int
    nodes: int
    bytes_per_second: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`nodes` alike. `inside_bytes_per_second` of one GPU to another of its node,
    `between_bytes_per_second` of a whole node to others; peaks, one way. None: not known.
    """

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    inside_bytes_per_second: float | None
    between_bytes_per_second: float | None

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    def group(self, size: int, distance: int) -> RankGroup:
        """`size` ranks, each `distance` from the next: 16 neighbours on nodes of 8 with
        400 GB/s inside and 200 between exchange 200 GB/s; 2 of them that are 8 apart 25.
        """
        ranks_in_node = max(1, min(size, self.gpus_per_node // distance))
        nodes = -(-size // ranks_in_node)
        # a link that is not known is taken as no limit; the plan's notes say so
        inside_speed = self.inside_bytes_per_second or float("inf")
        if nodes == 1:
            return RankGroup(size, 1, inside_speed)
        node_speed = self.between_bytes_per_second or float("inf")
        slowest = node_speed * ranks_in_node / self.gpus_per_node
        if ranks_in_node > 1:
            slowest = min(inside_speed, slowest)
        return RankGroup(size, nodes, slowest)


def groups(cluster: Cluster, layout: Layout) -> dict[str, RankGroup]:
    """Groups by axis; `weights` are the ranks that share the shards of weights:
    those of shard and cp."""
    groups_by_axis = {}
    distance = 1
    # the order in which ranks are numbered: that of spec/layout.py, the fastest axis
    # first
    for axis in ("tp", "cp", "shard", "dp", "pp"):
        size = getattr(layout, axis)
        groups_by_axis[axis] = cluster.group(size, distance)
        distance *= size
    groups_by_axis["weights"] = cluster.group(layout.cp * layout.shard, layout.tp)
    return groups_by_axis
