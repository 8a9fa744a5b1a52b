"""The PipelineJob of Vertex AI that a pipeline may come in.

Its arguments become the defaults of the pipeline, its output folder the place for artifacts. Who
runs it, and where, is for the config to say. Authority: the proto of aiplatform_v1.PipelineJob."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rekindle.errors import RequestError
from rekindle.ir.graph import Graph, Parameter
from rekindle.ir.read.fields import Fields, Refusals
from rekindle.ir.values import from_ir

_WHERE = "runtimeConfig.parameterValues"
_OF_THE_CONFIG = {
    "labels": "labels", "serviceAccount": "service_account", "network": "network",
    "encryptionSpec": "kms_key",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """The pipeline inside, and what the job adds to it."""

    pipeline: Any
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    root: str = ""

    def applied(self, graph: Graph) -> Graph:
        """`graph` with the job's arguments as its defaults; RequestError if they do not fit."""
        parameters = dict(graph.inputs.parameters)
        for name, value in self.arguments.items():
            if name not in parameters:
                known = ", ".join(parameters) or "none"
                what = f"the pipeline has no parameter `{name}`"
                raise RequestError(what, where=_WHERE, fix=f"it takes {known}")
            parameters[name] = _given(parameters[name], value)
        inputs = dataclasses.replace(graph.inputs, parameters=parameters)
        root = self.root or graph.pipeline_root
        return dataclasses.replace(graph, inputs=inputs, pipeline_root=root)


def unwrap(document: Any, refusals: Refusals) -> Job:
    """What is in a PipelineJob; a document that is none is the pipeline itself."""
    if not isinstance(document, dict) or "pipelineSpec" not in document:
        return Job(document)
    job = Fields(document, "", refusals)
    for key in ("displayName", "name"):
        job.take(key, str, "")
    for key, field in _OF_THE_CONFIG.items():
        job.refuse(key, f"`{key}` of a job of Vertex AI", f"set platforms.vertex.{field}")
    runtime = job.fields("runtimeConfig")
    arguments = runtime.take("parameterValues", dict, {})
    root = runtime.take("gcsOutputDirectory", str, "")
    runtime.refuse("parameters", "arguments of schema 2.0", "compile it with kfp 2.x")
    runtime.close()
    pipeline = job.any("pipelineSpec")
    job.close()
    return Job(pipeline, arguments, root)


def _given(parameter: Parameter, value: Any) -> Parameter:
    try:
        return dataclasses.replace(parameter, default=from_ir(value, parameter.type))
    except ValueError as error:
        raise RequestError(f"`{parameter.name}`: {error}", where=_WHERE) from error
