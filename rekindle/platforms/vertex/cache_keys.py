"""The steps of a job for Vertex AI as its cache sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rekindle.ir.read.pipeline import read
from rekindle.platforms.cache_diff import CacheKey
from rekindle.platforms.cache_keys import of_graph


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """From the files that `compile` writes."""
    (content,) = (content for name, content in files.items() if name.endswith(".vertex.json"))
    job = json.loads(content)
    graph = read(json.dumps(job["pipelineSpec"]))
    return of_graph(graph, job["runtimeConfig"]["parameterValues"])
