"""The steps of a pipeline for Kubeflow as its cache sees them."""

from __future__ import annotations

from collections.abc import Mapping

from rekindle.ir.read.pipeline import read
from rekindle.platforms.cache_diff import CacheKey
from rekindle.platforms.cache_keys import of_graph


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """From the files that `compile` writes."""
    (content,) = (content for name, content in files.items() if name.endswith(".yaml"))
    graph = read(content.decode())
    values = {n: p.default for n, p in graph.inputs.parameters.items()}
    return of_graph(graph, values)
