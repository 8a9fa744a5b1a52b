"""A compiled pipeline with other defaults, images, inputs and settings in it, for the platforms
that take KFP's own encoding; and the containers in it, by the names of their steps, for who shows
what a definition runs without reading all of it into a Graph."""

import copy
import graphlib
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rekindle.ir.distribution import PLATFORM
from rekindle.ir.graph import Graph, Step
from rekindle.ir.read.raw import documents

OWN_IMAGES = "rekindle/"
Raw = Mapping[str, Any]  # of the IR, which is not changed


def rewritten(
    ir_text: str, arguments: Mapping[str, Any], image: str | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The pipeline, and the documents of platform settings behind it, with `arguments` for defaults
    and `image` for images of `rekindle/`."""
    spec, *settings = documents(ir_text)
    _leave_out_what_nothing_refers_to(spec)
    parameters = _at(_at(spec["root"], "inputDefinitions"), "parameters")
    for name, value in arguments.items():
        parameters[name] |= {"defaultValue": value, "isOptional": True}
    for executor in executors_of(spec).values():
        container = _at(executor, "container")
        if image and (container.get("image") or "").startswith(OWN_IMAGES):
            container["image"] = image
    return spec, settings


def _leave_out_what_nothing_refers_to(spec: dict[str, Any]) -> None:
    """Reading follows references from the root: what it did not see may not be valid, which the
    platform would not take."""
    components, reached, waiting = _at(spec, "components"), dict[str, Any](), [spec["root"]]
    while waiting:
        for task in _at(_at(waiting.pop(), "dag"), "tasks").values():
            if (name := task["componentRef"]["name"]) not in reached:
                reached[name] = components[name]
                waiting.append(components[name])
    labels = {component.get("executorLabel") for component in reached.values()}
    for group, known in ((components, reached), (executors_of(spec), labels)):
        for name in [name for name in group if name not in known]:
            del group[name]


def executors_of(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The executors of the pipeline by label."""
    return _at(_at(spec, "deploymentSpec"), "executors")


def _at(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping under `key`; in a document written by hand it may be missing, or null."""
    return data.get(key) or {}


def _made(data: dict[str, Any], key: str) -> dict[str, Any]:
    """The same, to be written into."""
    if data.get(key) is None:
        data[key] = {}
    found: dict[str, Any] = data[key]
    return found


def with_launchers(
    spec: Raw, settings: Sequence[Raw], graph: Graph, lowered: Callable[[Step], dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The pipeline, and the documents behind it, with a launcher in place of each step that has a
    distribution. `lowered` gives its container, once for each executor. Results of its tasks are
    never taken from the cache, and nothing is left of what `distribute()` wrote."""
    made = copy.deepcopy(dict(spec))
    steps = distributed(made, graph)
    for label, step in steps.items():
        made["deploymentSpec"]["executors"][label]["container"] = lowered(step)
    for task in tasks_of(made, steps):
        _at(task, "cachingOptions").pop("enableCache", None)
    documents = [copy.deepcopy(dict(document)) for document in settings]
    for document in documents:
        _at(document, "platforms").pop(PLATFORM, None)
    return made, [document for document in documents if document.get("platforms")]


def distributed(spec: Mapping[str, Any], graph: Graph) -> dict[str, Step]:
    """The steps that run on several nodes, by the label of their executor."""
    steps = [step for step in graph.steps() if step.distribution is not None]
    return {component_of(spec, step)["executorLabel"]: step for step in steps}


def component_of(spec: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """The component of the IR that a step is made from."""
    components: dict[str, dict[str, Any]] = spec["components"]
    return components.get(f"comp-{step.component}") or components[step.component]


def tasks_of(spec: Mapping[str, Any], labels: Container[str]) -> Iterator[dict[str, Any]]:
    """Every task, at every depth, that is one of the executors in `labels`."""
    components = _at(spec, "components")
    for around in (spec["root"], *components.values()):
        for task in _at(_at(around, "dag"), "tasks").values():
            name = _at(task, "componentRef").get("name", "")
            if _at(components, name).get("executorLabel") in labels:
                yield task


def with_output(spec: Mapping[str, Any], labels: Container[str], name: str) -> dict[str, Any]:
    """The pipeline with one more output artifact for the executors in `labels`."""
    made = copy.deepcopy(dict(spec))
    kind = {"artifactType": {"schemaTitle": "system.Artifact", "schemaVersion": "0.0.1"}}
    for component in made["components"].values():
        if component.get("executorLabel") in labels:
            component.setdefault("outputDefinitions", {}).setdefault("artifacts", {})[name] = kind
    return made


def with_retries(
    spec: Raw,
    labels: Container[str],
    count: Callable[[int], int],
    policy: Raw,
    always: Raw = MappingProxyType({}),
) -> dict[str, Any]:
    """The pipeline with other retries for the tasks of the executors in `labels`: `count` says how
    many, from how many the author allows; `policy` is for who says nothing of a field, `always` for
    everybody."""
    made = copy.deepcopy(dict(spec))
    for task in tasks_of(made, labels):
        own = _at(task, "retryPolicy")
        retries = count(int(own.get("maxRetryCount", 0)))
        task["retryPolicy"] = {**policy, **own, "maxRetryCount": retries, **always}
    return made


def with_secrets(
    spec: Raw,
    settings: Sequence[Raw],
    secrets: Mapping[str, tuple[str, str]],
    kept: Mapping[str, Container[str]],
) -> list[dict[str, Any]]:
    """The documents behind the pipeline, with secrets of Kubernetes in the environment of every
    step: variable -> name of the secret, key in it. Executors in `kept` lose all settings but those
    that it names."""
    documents = [copy.deepcopy(dict(document)) for document in settings] or [{"platforms": {}}]
    kubernetes = _made(_made(documents[0], "platforms"), "kubernetes")
    wishes = _made(_made(kubernetes, "deploymentSpec"), "executors")
    for label, executor in executors_of(spec).items():
        if label in kept:
            there = {k: v for k, v in wishes.pop(label, {}).items() if k in kept[label]}
            wishes |= {label: there} if there else {}
        if "container" in executor and secrets:
            wanted = _made(wishes, label).setdefault("secretAsEnv", [])
            for env, (name, key) in sorted(secrets.items()):  # as kfp-kubernetes writes them
                parameter = {"runtimeValue": {"constant": name}}
                named = {"secretName": name, "secretNameParameter": parameter}
                keys = [{"envVar": env, "secretKey": key}]
                wanted.append({"keyToEnv": keys, "optional": False, **named})
    if not wishes:
        del kubernetes["deploymentSpec"]
    if not kubernetes:
        del documents[0]["platforms"]["kubernetes"]
    return [document for document in documents if document["platforms"]]


def prefixed(spec: Mapping[str, Any], words: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The pipeline with `words` in front of the commands of executors, by their labels."""
    made = copy.deepcopy(dict(spec))
    for label, executor in executors_of(made).items():
        container = _at(executor, "container")
        if label in words and container.get("command"):
            container["command"] = [*words[label], *container["command"]]
    return made


def executors(spec: Raw, around: Raw | None = None, path: str = "") -> Iterator[tuple[str, Raw]]:
    """Path and container of every step in the pipeline, or in the component `around` at `path`,
    those of nested pipelines too; a step comes after what it waits for. Importers have none."""
    known = spec["deploymentSpec"].get("executors", {})
    tasks = (around or spec["root"])["dag"]["tasks"]
    waits = {name: tasks[name].get("dependentTasks", ()) for name in sorted(tasks)}
    for name in graphlib.TopologicalSorter(waits).static_order():
        inner = spec["components"][tasks[name]["componentRef"]["name"]]
        at = f"{path}/{name}" if path else name
        if "dag" in inner:
            yield from executors(spec, inner, at)
        elif container := known.get(inner["executorLabel"], {}).get("container"):
            yield at, container


def launched(spec: Mapping[str, Any], command: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What each launcher, a container with this `command`, is told, by the step it stands for."""
    found = ((path, one) for path, one in executors(spec) if one.get("command") == [*command])
    return {path: json.loads(one["args"][0]) for path, one in found}


def asked_of(container: Mapping[str, Any]) -> str:
    """The resources that a container asks for, in words; "" for none."""
    resources = container.get("resources", {})
    accelerator = resources.get("accelerator", {})
    count = accelerator.get("resourceCount", accelerator.get("count"))  # the latter of older KFP
    kind = accelerator.get("resourceType", accelerator.get("type"))
    cpus = resources.get("resourceCpuLimit") or f"{resources.get('cpuLimit', 0):g}"
    memory = f"{resources['memoryLimit']:g}G" if resources.get("memoryLimit") else ""
    asked = [
        f"{count} x {kind}" if kind else "",
        f"{cpus} CPUs" if cpus != "0" else "",
        resources.get("resourceMemoryLimit", memory),
    ]
    return ", ".join(filter(None, asked))
