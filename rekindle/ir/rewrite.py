"""A compiled pipeline with other defaults and images in it, for the platforms that take KFP's own
encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from rekindle.ir.graph import Graph

OWN_IMAGES = "rekindle/"


def rewritten(
    ir_text: str, arguments: Mapping[str, Any], image: str | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The pipeline, and the documents of platform settings behind it.

    `arguments` become the defaults of the pipeline's parameters; `image` stands in for the images
    whose repository begins with `rekindle/`."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    spec, *settings = [d for d in yaml.load_all(ir_text, loader) if d is not None]
    spec = spec.get("pipelineSpec", spec)
    parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    for name, value in arguments.items():
        parameters[name] |= {"defaultValue": value, "isOptional": True}
    for executor in spec.get("deploymentSpec", {}).get("executors", {}).values():
        container = executor.get("container", {})
        if image and container.get("image", "").startswith(OWN_IMAGES):
            container["image"] = image
    return spec, settings


def needs_our_image(graph: Graph) -> bool:
    """Whether a step runs in an image of rekindle, for which a cloud needs a name it can pull."""
    return any(step.container.image.startswith(OWN_IMAGES) for step in graph.steps())
