"""A pipeline for Kubeflow Pipelines: its own IR with the run's arguments as defaults and our image
in it.

Pure: the same IR and arguments give the same bytes. KFP is its own platform, so the IR is not
rebuilt from the Graph; what the Graph is for here is that everything in it was understood before it
is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from rekindle.ir.compile import DUMPER
from rekindle.ir.graph import Graph
from rekindle.ir.rewrite import rewritten
from rekindle.ir.values import bind
from rekindle.platforms.admission import admit
from rekindle.platforms.definition import Definition
from rekindle.spec.model import KubeflowSpec


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: KubeflowSpec
) -> Definition:
    """One YAML file, named after the pipeline, that `kfp.Client` and the KFP UI take.

    RequestError if the arguments do not fit the pipeline, UnsupportedError if something in it does
    not run there.
    """
    admit(graph, "kubeflow")
    spec, settings = rewritten(ir_text, bind(graph, arguments), place.image)
    text = yaml.dump_all([spec, *settings], Dumper=DUMPER, sort_keys=True, allow_unicode=True)
    return Definition({f"{graph.name}.yaml": text.encode()})
