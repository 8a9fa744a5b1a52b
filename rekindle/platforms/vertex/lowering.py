"""A distributed step -> the container of its launcher: our image, and everything that launcher.py
has to know in one JSON argument.

The user's own image, command and arguments are inside, lowered as for the shim, which fills in the
placeholders on the node from the ExecutorInput. What the service fills in stands in arguments of
its own, whole: `{{$}}`, and after it the facts of the run as pairs of name and value. So no text is
escaped into another, and nothing that the user wrote is taken for a placeholder."""

from __future__ import annotations

import json
from typing import Any

from rekindle.catalog.tables import network
from rekindle.ir.graph import Step
from rekindle.ir.placeholders import references
from rekindle.platforms.bundle import image_of, lowered_container
from rekindle.platforms.vertex.customjob import custom_job, limit_seconds, provisioning
from rekindle.spec.platforms import VertexSpec

LAUNCHER = ["python3", "-m", "rekindle.platforms.vertex.launcher"]
RUN, TASK = "pipeline_job_resource_name", "pipeline_task_name"


def launcher(step: Step, pipeline: str, place: VertexSpec) -> dict[str, Any]:
    """KFP's container of the step that starts the job and follows it."""
    text = json.dumps(_payload(step, pipeline, place), sort_keys=True, ensure_ascii=False)
    container = step.container
    words = (*container.command, *container.args, *container.env.values())
    asked = [path[1] for word in words for path in references(word) if path[0] == "run"]
    facts = dict.fromkeys([RUN, TASK, *asked])
    pairs = [word for fact in facts for word in (fact, f"{{{{$.{fact}}}}}")]
    return {
        "image": place.image,
        "command": LAUNCHER,
        # the service would fill in what looks like a placeholder in the user's source
        "args": [text.replace("{{$", r"{\u007b$"), "{{$}}", *pairs],
    }


def _payload(step: Step, pipeline: str, place: VertexSpec) -> dict[str, Any]:
    assert step.distribution is not None, step.path
    job = custom_job(step, pipeline, image_of(step, place.image), place)
    machine = job["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]["machineType"]
    return {
        "project": place.project, "region": place.region,
        "job": job, "jobs": f"{place.artifact_root.rstrip('/')}/jobs",
        "nodes": step.distribution.nodes, "limit_seconds": limit_seconds(step),
        "spot": provisioning(step.distribution, place) == "spot",
        "failures": step.retry.count, "preemptions": place.max_preemptions,
        "task": _task(step, place, machine),
    }  # fmt: skip


def _task(step: Step, place: VertexSpec, machine: str) -> dict[str, Any]:
    """What every node on a machine of this name is told, before the run adds its ExecutorInput."""
    assert step.distribution is not None, step.path
    task = lowered_container(step)
    known = network(machine) if step.distribution.nodes > 1 else {}
    task["env"] = {**known, **task["env"]}
    return {**task, "secrets": dict(place.secrets), "gpus": step.distribution.gpus_per_node}
