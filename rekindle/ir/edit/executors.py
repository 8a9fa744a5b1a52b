"""The containers of a compiled pipeline, by the names of their steps.

With them a caller shows what a definition runs without reading all of it into a Graph."""

import graphlib
from collections.abc import Iterator, Mapping
from typing import Any

Container = Mapping[str, Any]


def executors(
    spec: Mapping[str, Any], around: Mapping[str, Any] | None = None, path: str = ""
) -> Iterator[tuple[str, Container]]:
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
