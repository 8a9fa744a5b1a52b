"""What Vertex AI tells the replicas of a CustomJob -> `Rendezvous`.

CLUSTER_SPEC is JSON: `cluster` has the addresses of each worker pool, pool 0 with one replica, and
`task` says which one this is. Nodes are counted through the pools in their order; the primary
replica is node rank 0. RANK and its like, which some versions set, are left alone: their meaning
changed over time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from rekindle.errors import RequestError
from rekindle.launch.rendezvous import Rendezvous

_POOL = re.compile(r"workerpool(\d+)")


def rendezvous(environment: Mapping[str, str], gpus: int) -> Rendezvous:
    """The node's place; a job of one replica may lack CLUSTER_SPEC."""
    text = environment.get("CLUSTER_SPEC", "")
    if not text:
        return Rendezvous(ranks_per_node=max(1, gpus))
    try:
        spec = json.loads(text)
        pools = {name: list(hosts) for name, hosts in spec["cluster"].items()}
        kind, index = str(spec["task"]["type"]), int(spec["task"]["index"])
        address, _, port = str(pools["workerpool0"][0]).rpartition(":")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RequestError(f"CLUSTER_SPEC cannot be read: {error!r}", where=text[:200]) from error
    names = sorted((n for n in pools if _POOL.fullmatch(n)), key=lambda n: int(n[10:]))
    if kind not in names or not 0 <= index < len(pools[kind]):
        raise RequestError(
            f"CLUSTER_SPEC says this is {kind} {index}, which is not in its cluster",
            where=text[:200],
        )
    nodes = sum(len(pools[name]) for name in names)
    rank = index + sum(len(pools[name]) for name in names[: names.index(kind)])
    place = Rendezvous(nodes, rank, max(1, gpus), address, int(port) if port.isdigit() else 0)
    return place.checked("CLUSTER_SPEC")
