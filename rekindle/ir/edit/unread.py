"""The shape of what a pipeline holds and nothing refers to.

read.py follows references from the root, so that a component or executor that no task names stays
unread. Who rewrites a pipeline walks all of them, and KFP parses all of them: here they are checked
as far as both need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.ir.read.fields import Fields, Refusals, malformed


def check_all(spec: Mapping[str, Any]) -> None:
    """RequestError, with its place, unless every component, task and executor has its shape; a part
    of one that is null counts as absent."""
    top = Fields(spec, "", Refusals())
    for _, component in _each(top, "components"):
        component.take("executorLabel", str, "")
        for side in ("inputDefinitions", "outputDefinitions"):
            _check_ports(component.fields(side))
        for _, task in _each(component.fields("dag"), "tasks"):
            _check_task(task)
    for _, executor in _each(top.fields("deploymentSpec"), "executors"):
        container = executor.fields("container")
        container.take("image", str, "")
        container.take("command", list, [])


def _each(around: Fields, key: str) -> Iterator[tuple[str, Fields]]:
    """Everything under `key`, none of it null, which is not a value of a map in protobuf."""
    for name, one in around.each(key):
        if around.data[key][name] is None:
            raise malformed(None, "a mapping", one.where)
        yield name, one


def _check_task(task: Fields) -> None:
    reference = task.fields("componentRef")
    if not reference.take("name", str, ""):
        raise malformed(None, "the name of a component", reference.at("name"))
    task.fields("cachingOptions")
    task.fields("retryPolicy")
    _check_ports(task.fields("inputs"))


def _check_ports(ports: Fields) -> None:
    for kind in ("parameters", "artifacts"):
        for name in ports.fields(kind).data:
            Fields(ports.data[kind][name], f"{ports.at(kind)}.{name}", ports.refusals)
