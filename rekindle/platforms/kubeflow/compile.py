"""A pipeline for Kubeflow Pipelines: its own IR with the run's arguments as defaults and our image
in it.

Pure: the same IR and arguments give the same bytes. KFP is its own platform, so the IR is not
rebuilt from the Graph; what the Graph is for here is that everything in it was understood before it
is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from rekindle.ir.compile import DUMPER
from rekindle.ir.graph import Graph
from rekindle.ir.values import bind
from rekindle.platforms.admission import admit

OWN_IMAGES = "rekindle/"


@dataclasses.dataclass(frozen=True)
class Definition:
    """What is submitted: file names and their bytes."""

    files: Mapping[str, bytes]


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], image: str | None = None
) -> Definition:
    """One YAML file, named after the pipeline, that `kfp.Client` and the KFP UI take.

    `arguments` become the defaults of the pipeline's parameters; `image` stands in for the images
    whose repository begins with `rekindle/`. RequestError if the arguments do not fit the pipeline,
    UnsupportedError if something in it does not run there.
    """
    admit(graph, "kubeflow")
    values = bind(graph, arguments)
    spec, *platforms = [d for d in yaml.load_all(ir_text, _loader()) if d is not None]
    parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    for name, value in values.items():
        parameters[name] |= {"defaultValue": value, "isOptional": True}
    for executor in spec.get("deploymentSpec", {}).get("executors", {}).values():
        container = executor.get("container", {})
        if image and container.get("image", "").startswith(OWN_IMAGES):
            container["image"] = image
    text = yaml.dump_all([spec, *platforms], Dumper=DUMPER, sort_keys=True, allow_unicode=True)
    return Definition({f"{graph.name}.yaml": text.encode()})


def _loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)
