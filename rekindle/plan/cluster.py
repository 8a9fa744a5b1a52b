"""Machines and the links between their GPUs, and how fast a group of ranks can exchange
data.

Ranks are numbered as in spec/layout.py, `tp` fastest, so the ranks of a group along an
axis lie at equal distances, and its size and that distance say which nodes it spans. A
ring through several nodes has the share of a node's network that its ranks are of the
node's: eight ranks of eight have all of it, one of eight an eighth."""

import dataclasses
import math

from rekindle.catalog.machines import Gpu
from rekindle.spec.layout import Layout


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange data with each other."""

    size: int
    """How many ranks."""
    nodes: int
    """On how many machines they are."""
    bytes_per_second: float
    """What each of them can send at the peak; infinite where that is not known."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Machines that are alike. Speeds are peaks, one way; None: not known."""

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    inside_bytes_per_second: float | None
    """From a GPU to the others of its node."""
    between_bytes_per_second: float | None
    """From a whole node to others."""

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    def group(self, size: int, distance: int) -> RankGroup:
        """The group of `size` ranks, each `distance` from the next.

        On nodes of 8 with 400 GB/s inside and 200 between, 16 neighbours exchange 200 GB/s
        each: the ring crosses a node's network once. 2 ranks that are 8 apart have 25."""
        ranks_in_node = max(1, min(size, self.gpus_per_node // distance))
        nodes = math.ceil(size / ranks_in_node)
        # a link of unknown speed is taken as no limit; the plan's notes say so
        inside_speed = self.inside_bytes_per_second or float("inf")
        if nodes == 1:
            return RankGroup(size, 1, inside_speed)
        node_speed = self.between_bytes_per_second or float("inf")
        slowest = node_speed * ranks_in_node / self.gpus_per_node
        if ranks_in_node > 1:
            slowest = min(inside_speed, slowest)
        return RankGroup(size, nodes, slowest)


def groups(cluster: Cluster, layout: Layout) -> dict[str, RankGroup]:
    """A rank's groups by axis, and as `weights` the ranks over which weights are sharded:
    those of shard and cp, which are neighbours in the order of ranks."""
    groups_by_axis = {}
    distance = 1
    # the order in which spec/layout.py numbers ranks, the fastest axis first
    for axis in ("tp", "cp", "shard", "dp", "pp"):
        size = getattr(layout, axis)
        groups_by_axis[axis] = cluster.group(size, distance)
        distance *= size
    groups_by_axis["weights"] = cluster.group(layout.cp * layout.shard, layout.tp)
    return groups_by_axis
