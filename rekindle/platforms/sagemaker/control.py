"""Which conditions and loops the service takes over: the other conditions a step looks at itself,
the other loops are unrolled."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Set
from typing import Any

from rekindle.ir.flatten import Flat, Guard, Output, read_by
from rekindle.ir.graph import Graph, Step, SubDag
from rekindle.ir.origin import loop_origins
from rekindle.platforms.sagemaker import conditions


def divided(
    flats: Mapping[str, Flat], values: Mapping[str, Any]
) -> tuple[dict[str, Flat], dict[str, tuple[Guard, ...]]]:
    """The steps with the conditions that become Condition steps, and by path those that a step
    looks at itself: those that compare what no Condition step can, and where what a branch made is
    read outside of it, since its steps have to run either way, and so do those of the branches
    inside."""
    inside = {
        guard.path
        for flat in flats.values()
        for guard in flat.guards
        if not conditions.is_plain(guard, values)
    }
    inside |= {
        guard.path
        for flat in flats.values()
        for source in read_by(flat)
        if isinstance(source, Output)
        for guard in flats[source.path].guards
        if guard.path not in {mine.path for mine in flat.guards}
    }
    steps, guarded = {}, {}
    for path, flat in flats.items():
        kept = list(itertools.takewhile(lambda g: g.path not in inside, flat.guards))
        steps[path] = dataclasses.replace(flat, guards=tuple(kept))
        guarded[path] = flat.guards[len(kept) :]
    return steps, guarded


def loops(graph: Graph, changeable: Set[str]) -> frozenset[str]:
    """The paths of the loops that a ForEach can run: over an argument that a run may change, of
    steps that neither wait for each other nor give anything that is read, outside of conditions
    and other loops."""
    over = loop_origins(graph)
    plain: set[str] = {""}
    found: set[str] = set()
    for node in graph.nodes():
        if not isinstance(node, SubDag) or node.path.rpartition("/")[0] not in plain:
            continue
        if node.loop is None and node.condition is None:
            plain.add(node.path)
        steps = node.dag.nodes.values()
        apart = all(isinstance(n, Step) and not n.condition and not n.upstream for n in steps)
        results = {*node.dag.parameters, *node.dag.artifacts}
        given = over.get(node.path)
        if given and given <= changeable and apart and not results and not node.condition:
            found.add(node.path)
    return frozenset(found)
