"""Executors of the IR -> `Container` (image, command, args, env, resources) or the fields of an
`Importer` (an artifact from outside); all other kinds of executor are refused."""

from typing import Any

from rekindle.ir.graph import Container, Resources
from rekindle.ir.placeholders import (
    Argument,
    Reference,
    Template,
    parse,
    parse_argument,
    parse_value,
)
from rekindle.ir.read import preamble
from rekindle.ir.read.fields import Fields, malformed

_OTHER_KINDS = {
    "resolver": "resolvers look up artifacts in a metadata store",
    "customJob": "custom jobs run on Vertex AI only",
}
# The IR says each resource twice: as a float (legacy), and as a quantity, which is to be believed.
_RESOURCES = (
    ("cpu_request", "resourceCpuRequest", "cpuRequest"),
    ("cpu_limit", "resourceCpuLimit", "cpuLimit"),
    ("memory_request", "resourceMemoryRequest", "memoryRequest"),
    ("memory_limit", "resourceMemoryLimit", "memoryLimit"),
)


def read_executor(executor: Fields) -> Container | dict[str, Any] | None:
    """The executor's container, or the fields of an `Importer`; None, with the refusal noted, if it
    is an executor of another kind."""
    other = [kind for kind in _OTHER_KINDS if executor.has(kind)]
    for kind in other:
        executor.refuse(kind, f"`{kind}` is not supported: {_OTHER_KINDS[kind]}")
    if other:
        return None
    if not executor.has("importer") and not executor.has("container"):
        raise malformed(None, "a container or an importer", executor.where)
    found = (
        _import(executor.fields("importer"))
        if executor.has("importer")
        else _container(executor.fields("container"))
    )
    executor.close()
    return found


def _import(fields: Fields) -> dict[str, Any]:
    source = fields.fields("artifactUri")
    if source.has("runtimeParameter"):
        name = source.take("runtimeParameter", str, "")
        uri = Template((Reference(("inputs", "parameters", name)),))
    else:
        uri = parse(source.take("constant", str, ""), source.at("constant"))
    source.close()
    fields.any("typeSchema")  # the component's output says it, too
    found = {
        "uri": uri,
        "metadata": parse_value(fields.take("metadata", dict, {}), fields.at("metadata")),
        "again": fields.take("reimport", bool, False),
        "to_workspace": fields.take("downloadToWorkspace", bool, False),
    }
    fields.close()
    return found


def _container(fields: Fields) -> Container:
    words = [str(word) for word in fields.take("command", list, [])]
    found = preamble.recognise(words)
    args = [str(word) for word in fields.take("args", list, [])]
    container = Container(
        image=fields.take("image", str, ""),
        command=_arguments(list(found.command), fields.at("command")),
        as_written=_arguments(words, fields.at("command")),
        args=_arguments(args, fields.at("args")), env=_env(fields), source=found.source,
        requirements=found.requirements, runtime_requirements=found.runtime_requirements,
        pip_options=found.pip_options, resources=_resources(fields.fields("resources")),
    )  # fmt: skip
    fields.any("lifecycle")  # a setting of the step
    fields.close()
    return container


def _arguments(words: list[str], where: str) -> tuple[Argument, ...]:
    return tuple(parse_argument(word, f"{where}[{i}]") for i, word in enumerate(words))


def _env(container: Fields) -> dict[str, Argument]:
    env: dict[str, Argument] = {}
    for variable in container.list_of("env"):
        name, value = variable.take("name", str, ""), variable.take("value", str, "")
        env[name] = parse(value, variable.at("value"))
        variable.close()
    return env


def _resources(fields: Fields) -> Resources:
    found = {}
    for name, quantity, legacy in _RESOURCES:
        number = fields.take(legacy, float, 0.0)
        unit = "G" if "memory" in name else ""
        found[name] = fields.take(quantity, str, f"{number:g}{unit}" if number else "")
    accelerator = fields.fields("accelerator")
    kind, count = accelerator.any("type"), accelerator.any("count")
    found["accelerator_type"] = str(accelerator.any("resourceType") or kind or "")
    found["accelerator_count"] = str(accelerator.any("resourceCount") or count or "")
    accelerator.close()
    fields.close()
    return Resources(**found)
