"""What comes around a compiled pipeline: a second document, and the job that it may be in.

The second document says what each executor, and the pipeline as a whole, asks of a platform. Of
what kfp-kubernetes writes (`kubernetes`, kubernetes_executor_config.proto) timeouts and secrets in
the environment are typed, everything else stays a `Setting` under its name there, for each platform
to take or to refuse. `rekindle` is what `distribute()` writes.

Of a PipelineJob of Vertex AI the arguments become the defaults of the pipeline, its output folder
the place for artifacts. Authority: the proto of aiplatform_v1.PipelineJob."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rekindle.errors import RequestError
from rekindle.ir.distribution import PLATFORM, from_settings
from rekindle.ir.graph import Constant, Graph, Secret, Setting
from rekindle.ir.read.bindings import read_parameter
from rekindle.ir.read.raw import Fields, Refusals, malformed
from rekindle.ir.values import from_ir

Wishes = dict[str, Any]  # what an executor asks for, as fields of its Step
_WHERE = "runtimeConfig.parameterValues"
_OF_THE_CONFIG = {
    "labels": "labels", "serviceAccount": "service_account", "network": "network",
    "encryptionSpec": "kms_key",
}  # fmt: skip


def read_platforms(
    document: Any, refusals: Refusals
) -> tuple[dict[str, Wishes], tuple[Setting, ...]]:
    """Wishes by the label of the executor, and what is asked for the whole pipeline."""
    executors: dict[str, Wishes] = {}
    whole: list[Setting] = []
    top = Fields(document, "", refusals)
    for platform, fields in top.each("platforms"):
        if platform not in ("kubernetes", PLATFORM):
            refusals.add(f"settings of the platform `{platform}`", fields.where)
            continue
        deployment = fields.fields("deploymentSpec")
        for label, executor in deployment.each("executors"):
            wishes = executors.setdefault(label, {})
            if platform == PLATFORM:
                wishes["distribution"] = from_settings(executor.data, executor.where)
            else:
                seconds = executor.any("activeDeadlineSeconds")  # protobuf writes an int64 as text
                if seconds is not None and not str(seconds).removesuffix(".0").isdecimal():
                    where = executor.at("activeDeadlineSeconds")
                    raise malformed(seconds, "a number of seconds", where)
                secrets = [s for one in executor.list_of("secretAsEnv") for s in _secrets(one)]
                taken = {"activeDeadlineSeconds", "secretAsEnv"}
                wishes["timeout_seconds"] = float(seconds) if seconds is not None else None
                wishes["secrets"] = tuple(secrets)
                wishes["settings"] = tuple(_settings(executor, taken))
        deployment.close()
        whole += _settings(fields.fields("pipelineConfig"), set())
        fields.close()
    top.close()
    return executors, tuple(whole)


def _settings(fields: Fields, taken: set[str]) -> list[Setting]:
    names = [str(key) for key in fields.data if key not in taken and fields.has(str(key))]
    return [Setting(name, fields.any(name), fields.at(name)) for name in names]


def _secrets(fields: Fields) -> list[Secret]:
    plain = fields.take("secretName", str, "")
    named = read_parameter(fields.fields("secretNameParameter"), None) or Constant(plain)
    optional = fields.take("optional", bool, False)
    found = [
        Secret(p.take("envVar", str, ""), named, p.take("secretKey", str, ""), p.where, optional)
        for p in fields.list_of("keyToEnv")
    ]
    fields.close()
    return found


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
            try:
                default = from_ir(value, parameters[name].type)
            except ValueError as error:
                raise RequestError(f"`{name}`: {error}", where=_WHERE) from error
            parameters[name] = dataclasses.replace(parameters[name], default=default)
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
