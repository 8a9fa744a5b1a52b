"""The containers of a compiled pipeline, by the names of their steps.

With them a caller shows what a definition runs without reading all of it into a Graph."""

import graphlib
from collections.abc import Iterator, Mapping
from typing import Any

Container = Mapping[str, Any]


def executors(spec: Mapping[str, Any]) -> Iterator[tuple[str, Container]]:
    """Path and container of every step, those of nested pipelines too; a step comes after what it
    waits for. Importers have no container."""
    return _inside(spec, spec["root"], "")


def _inside(
    spec: Mapping[str, Any], component: Mapping[str, Any], path: str
) -> Iterator[tuple[str, Container]]:
    known = spec["deploymentSpec"].get("executors", {})
    tasks = component["dag"]["tasks"]
    waits = {name: tasks[name].get("dependentTasks", ()) for name in sorted(tasks)}
    for name in graphlib.TopologicalSorter(waits).static_order():
        inner = spec["components"][tasks[name]["componentRef"]["name"]]
        at = f"{path}/{name}" if path else name
        if "dag" in inner:
            yield from _inside(spec, inner, at)
        elif container := known.get(inner["executorLabel"], {}).get("container"):
            yield at, container


def asked_of(container: Container) -> str:
    """The resources that a container asks for, in words; "" for none."""
    resources = container.get("resources", {})
    accelerator = resources.get("accelerator")
    asked = [
        f"{accelerator['resourceCount']} x {accelerator['resourceType']}" if accelerator else "",
        f"{resources['resourceCpuLimit']} CPUs" if "resourceCpuLimit" in resources else "",
        resources.get("resourceMemoryLimit", ""),
    ]
    return ", ".join(filter(None, asked))
