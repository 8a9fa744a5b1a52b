"""A compiled pipeline with other defaults, images, inputs and settings in it, for the
platforms that take KFP's own encoding; and the containers in it, by the names of their
steps, for who shows what a definition runs without reading all of it into a Graph."""

import copy
import graphlib
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from rekindle.ir.distribution import PLATFORM
from rekindle.ir.graph import Graph, Step
from rekindle.ir.placeholders import mapped
from rekindle.ir.read.raw import documents
from rekindle.protojson import Json

OWN_IMAGES = "rekindle/"
JsonView: TypeAlias = Mapping[str, Any]
"""Json of a caller's, which is read or copied, and never written to."""


def rewritten(
    ir_text: str, arguments: Mapping[str, Any], image: str | None
) -> tuple[Json, list[Json]]:
    """The pipeline, and the documents of platform settings behind it, with `arguments`
    for defaults and `image` for images of `rekindle/`."""
    # an alias of YAML is one mapping in two places: a copy in each, so that one is edited
    spec, *settings = [mapped(document, lambda leaf: leaf) for document in documents(ir_text)]
    _leave_out_what_nothing_refers_to(spec)
    parameters = _at(_at(spec["root"], "inputDefinitions"), "parameters")
    for name, value in arguments.items():
        parameters[name] |= {"defaultValue": value, "isOptional": True}
    for executor in executors_of(spec).values():
        container = _at(executor, "container")
        if image and (container.get("image") or "").startswith(OWN_IMAGES):
            container["image"] = image
    return spec, settings


def _leave_out_what_nothing_refers_to(spec: Json) -> None:
    """Reading follows references from the root: what it did not see may not be valid,
    which the platform would not take."""
    components = _at(spec, "components")
    reached = set[str]()
    waiting = [spec["root"]]
    while waiting:
        for task in _at(_at(waiting.pop(), "dag"), "tasks").values():
            name = task["componentRef"]["name"]
            if name not in reached:
                reached.add(name)
                waiting.append(components[name])
    for name in components.keys() - reached:
        del components[name]
    labels = {component.get("executorLabel") for component in components.values()}
    by_label = executors_of(spec)
    for label in by_label.keys() - labels:
        del by_label[label]


def executors_of(spec: JsonView) -> dict[str, Json]:
    """The executors of the pipeline by label."""
    return _at(_at(spec, "deploymentSpec"), "executors")


def _at(data: JsonView, key: str) -> Json:
    """The mapping under `key`; in a document written by hand it may be missing, or null."""
    return data.get(key) or {}


def ensured(data: Json, key: str) -> Json:
    """The same, to be written into."""
    if data.get(key) is None:
        data[key] = {}
    mapping: Json = data[key]
    return mapping


def with_launchers(
    spec: JsonView, settings: Sequence[JsonView], graph: Graph, lowered: Callable[[Step], Json]
) -> tuple[Json, list[Json]]:
    """The pipeline, and the documents behind it, with a launcher in place of each step
    that has a distribution. `lowered` gives its container, once for each executor.
    Results of its tasks are never taken from the cache, and nothing is left of what
    `distribute()` wrote."""
    pipeline = copy.deepcopy(dict(spec))
    steps = distributed(pipeline, graph)
    for label, step in steps.items():
        pipeline["deploymentSpec"]["executors"][label]["container"] = lowered(step)
    for task in tasks_of(pipeline, steps):
        _at(task, "cachingOptions").pop("enableCache", None)
    documents = [copy.deepcopy(dict(document)) for document in settings]
    for document in documents:
        _at(document, "platforms").pop(PLATFORM, None)
    return pipeline, [document for document in documents if document.get("platforms")]


def distributed(spec: JsonView, graph: Graph) -> dict[str, Step]:
    """The steps that run on several nodes, by the label of their executor."""
    steps = [step for step in graph.steps() if step.distribution is not None]
    return {component_of(spec, step)["executorLabel"]: step for step in steps}


def component_of(spec: JsonView, step: Step) -> Json:
    """The component of the IR that a step is made from."""
    components: dict[str, Json] = spec["components"]
    return components.get(f"comp-{step.component}") or components[step.component]


def tasks_of(spec: JsonView, labels: Container[str]) -> Iterator[Json]:
    """Every task, at every depth, that is one of the executors in `labels`."""
    components = _at(spec, "components")
    for parent in (spec["root"], *components.values()):
        for task in _at(_at(parent, "dag"), "tasks").values():
            name = _at(task, "componentRef").get("name", "")
            if _at(components, name).get("executorLabel") in labels:
                yield task


def with_output(spec: JsonView, labels: Container[str], name: str) -> Json:
    """The pipeline with one more output artifact for the executors in `labels`."""
    pipeline = copy.deepcopy(dict(spec))
    artifact = {"artifactType": {"schemaTitle": "system.Artifact", "schemaVersion": "0.0.1"}}
    for component in pipeline["components"].values():
        if component.get("executorLabel") in labels:
            outputs = component.setdefault("outputDefinitions", {})
            outputs.setdefault("artifacts", {})[name] = artifact
    return pipeline


def with_retries(
    spec: JsonView,
    labels: Container[str],
    count: Callable[[int], int],
    policy: JsonView,
    always: JsonView = MappingProxyType({}),
) -> Json:
    """The pipeline with other retries for the tasks of the executors in `labels`: `count`
    says how many, from how many the author allows; `policy` is for who says nothing of a
    field, `always` for everybody."""
    pipeline = copy.deepcopy(dict(spec))
    for task in tasks_of(pipeline, labels):
        own = _at(task, "retryPolicy")
        retries = count(int(own.get("maxRetryCount") or 0))
        task["retryPolicy"] = {**policy, **own, "maxRetryCount": retries, **always}
    return pipeline


def with_secrets(
    spec: JsonView,
    settings: Sequence[JsonView],
    secrets: Mapping[str, tuple[str, str]],
    kept: Mapping[str, Container[str]],
) -> list[Json]:
    """The documents behind the pipeline, with secrets of Kubernetes in the environment of
    every step: variable -> name of the secret, key in it. Executors in `kept` lose all
    settings but those that it names."""
    documents = [copy.deepcopy(dict(document)) for document in settings] or [{"platforms": {}}]
    kubernetes = ensured(ensured(documents[0], "platforms"), "kubernetes")
    settings_of = ensured(ensured(kubernetes, "deploymentSpec"), "executors")
    for label, executor in executors_of(spec).items():
        if label in kept:
            own = settings_of.pop(label, None) or {}
            kept_settings = {name: own[name] for name in own if name in kept[label]}
            if kept_settings:
                settings_of[label] = kept_settings
        if "container" in executor and secrets:
            variables = ensured(settings_of, label).setdefault("secretAsEnv", [])
            variables += [_secret_as_env(env, *secrets[env]) for env in sorted(secrets)]
    if not settings_of:
        del kubernetes["deploymentSpec"]
    if not kubernetes:
        del documents[0]["platforms"]["kubernetes"]
    return [document for document in documents if document["platforms"]]


def with_variables(
    spec: Json,
    settings: Sequence[JsonView],
    labels: Container[str],
    variables: Mapping[str, str],
    secrets: Mapping[str, tuple[str, str]],
) -> list[Json]:
    """The documents behind the pipeline, with more variables for the executors in
    `labels`: values, which are written into `spec`, and secrets that may be missing."""
    documents = [copy.deepcopy(dict(document)) for document in settings] or [{"platforms": {}}]
    kubernetes = ensured(ensured(documents[0], "platforms"), "kubernetes")
    settings_of = ensured(ensured(kubernetes, "deploymentSpec"), "executors")
    for label, executor in executors_of(spec).items():
        if label not in labels or "container" not in executor:
            continue
        container = executor["container"]
        given = {variable["name"] for variable in container.get("env") or ()}
        more = [{"name": n, "value": v} for n, v in variables.items() if n not in given]
        if more:
            container["env"] = [*(container.get("env") or ()), *more]
        references = ensured(settings_of, label).setdefault("secretAsEnv", [])
        for env, (name, key) in sorted(secrets.items()):
            references.append(_secret_as_env(env, name, key, optional=True))
    return documents


def _secret_as_env(env: str, name: str, key: str, *, optional: bool = False) -> Json:
    """A secret in a variable, as kfp-kubernetes writes it: with its name in both fields."""
    return {
        "keyToEnv": [{"envVar": env, "secretKey": key}],
        "optional": optional,
        "secretName": name,
        "secretNameParameter": {"runtimeValue": {"constant": name}},
    }


def prefixed(spec: JsonView, words: Mapping[str, Sequence[str]]) -> Json:
    """The pipeline with `words` in front of the commands of executors, by their labels."""
    pipeline = copy.deepcopy(dict(spec))
    for label, executor in executors_of(pipeline).items():
        container = _at(executor, "container")
        if label in words and container.get("command"):
            container["command"] = [*words[label], *container["command"]]
    return pipeline


def executors(
    spec: JsonView, parent: JsonView | None = None, path: str = ""
) -> Iterator[tuple[str, JsonView]]:
    """Path and container of every step in the pipeline, or in the component `parent` at
    `path`, those of nested pipelines too; a step comes after what it waits for. Importers
    have none."""
    by_label = spec["deploymentSpec"].get("executors", {})
    tasks = (parent or spec["root"])["dag"]["tasks"]
    waits = {name: tasks[name].get("dependentTasks", ()) for name in sorted(tasks)}
    for name in graphlib.TopologicalSorter(waits).static_order():
        component = spec["components"][tasks[name]["componentRef"]["name"]]
        step_path = f"{path}/{name}" if path else name
        if "dag" in component:
            yield from executors(spec, component, step_path)
            continue
        container = by_label.get(component["executorLabel"], {}).get("container")
        if container:
            yield step_path, container


def launched(spec: JsonView, command: Sequence[str]) -> dict[str, Json]:
    """What each launcher, a container with this `command`, is told, by the step it stands for."""
    arguments = {}
    for path, container in executors(spec):
        if container.get("command") == [*command]:
            arguments[path] = json.loads(container["args"][0])
    return arguments


def asked_of(container: JsonView) -> str:
    """The resources that a container asks for, in words; "" for none."""
    resources = container.get("resources", {})
    accelerator = resources.get("accelerator", {})
    count = accelerator.get("resourceCount", accelerator.get("count"))  # the latter of older KFP
    kind = accelerator.get("resourceType", accelerator.get("type"))
    cpus = resources.get("resourceCpuLimit") or f"{resources.get('cpuLimit', 0):g}"
    parts = []
    if kind:
        parts.append(f"{count} x {kind}")
    if cpus != "0":
        parts.append(f"{cpus} CPUs")
    memory = resources.get("resourceMemoryLimit")
    if memory is None and resources.get("memoryLimit"):
        memory = f"{resources['memoryLimit']:g}G"
    if memory:
        parts.append(memory)
    return ", ".join(parts)
