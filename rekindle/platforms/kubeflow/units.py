"""The steps of a pipeline for Kubeflow as its cache sees them."""

from __future__ import annotations

from collections.abc import Mapping

from rekindle.ir.read.pipeline import read
from rekindle.platforms.difference import Unit
from rekindle.platforms.units import of_graph


def units(files: Mapping[str, bytes]) -> tuple[Unit, ...]:
    """From the files that `compile` writes."""
    (content,) = (content for name, content in files.items() if name.endswith(".yaml"))
    graph = read(content.decode())
    values = {n: p.default for n, p in graph.inputs.parameters.items()}
    return of_graph(graph, values)
