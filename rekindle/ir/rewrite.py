"""A compiled pipeline with other defaults and images in it, for the platforms that take KFP's own
encoding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import yaml

from rekindle.ir.distribution import PLATFORM
from rekindle.ir.graph import Graph, Step

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


def with_launchers(
    spec: Mapping[str, Any],
    settings: Sequence[Mapping[str, Any]],
    graph: Graph,
    lowered: Callable[[Step], dict[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The pipeline, and the documents behind it, with a launcher in place of each step that has a
    distribution.

    `lowered` gives the container of the launcher (KFP's: image, command, args, env). Results of its
    tasks are never taken from the cache, and nothing is left of what `distribute()` wrote. Steps
    that share an executor share a launcher, so `lowered` is asked once for each executor."""
    made = copy.deepcopy(dict(spec))
    steps = distributed(made, graph)
    for label, step in steps.items():
        made["deploymentSpec"]["executors"][label]["container"] = lowered(step)
    for task in tasks_of(made, steps):
        task.get("cachingOptions", {}).pop("enableCache", None)
    documents = [copy.deepcopy(dict(document)) for document in settings]
    for document in documents:
        document.get("platforms", {}).pop(PLATFORM, None)
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
    components = spec["components"]
    for component in (spec["root"], *components.values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            if components[task["componentRef"]["name"]].get("executorLabel") in labels:
                yield task


def retried(spec: Mapping[str, Any], graph: Graph, least: int) -> dict[str, Any]:
    """The pipeline with at least `least` retries for the task of every launcher, so that one that
    was killed comes back to its job; a policy of the author's that allows more stays."""
    made = copy.deepcopy(dict(spec))
    for task in tasks_of(made, distributed(made, graph)):
        policy = task.setdefault("retryPolicy", {"backoffDuration": "30s", "backoffFactor": 2.0})
        policy["maxRetryCount"] = max(int(policy.get("maxRetryCount", 0)), least)
    return made


def prefixed(spec: Mapping[str, Any], image: str | None, words: Sequence[str]) -> dict[str, Any]:
    """The pipeline with `words` in front of the command of every container of this image."""
    made = copy.deepcopy(dict(spec))
    for executor in made["deploymentSpec"]["executors"].values():
        container = executor.get("container", {})
        if image and container.get("image") == image and container.get("command"):
            container["command"] = [*words, *container["command"]]
    return made
