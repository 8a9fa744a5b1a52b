"""A pipeline for Vertex AI Pipelines: the JSON of a PipelineJob, as its API takes it.

Pure: the same input gives the same bytes. Vertex AI runs KFP's own encoding, one document of it;
what the second one holds is refused by the feature table, but for distributed steps. Authority: the
protos of aiplatform_v1.PipelineJob and CustomJob. Untested against a real project.

A distributed step becomes the container of its launcher: our image, and everything that launcher.py
has to know in one JSON argument. The user's own image, command and arguments are inside, lowered as
for the shim. What the service fills in stands in arguments of its own, whole: `{{$}}`, and after it
the facts of the run as pairs of name and value. So no text is escaped into another, and nothing
that the user wrote is taken for a placeholder.

Its CustomJob is made as far as it is known when the pipeline is compiled: the machine (the step's
own, or the first of catalog/vertex.yaml with its GPUs), the worker pools (the primary alone in pool
0, all other nodes in pool 1), how machines are provisioned, and how long the job may take. The
service never restarts anything (`disableRetries`): the launcher's count of attempts alone bounds
the bill."""

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.catalog.tables import limits, network
from rekindle.errors import Problem
from rekindle.ir.distribution import Distribution
from rekindle.ir.edit import rewrite
from rekindle.ir.graph import Graph, Secret, Step
from rekindle.ir.placeholders import references
from rekindle.ir.values import bind
from rekindle.platforms.bundle import image_of, lowered_container
from rekindle.platforms.feature_checks import beyond, known_secrets, lacks, python_problems, refusal
from rekindle.platforms.machines import sizes, smallest
from rekindle.platforms.submission import Definition, problems_in, requests_in
from rekindle.platforms.vertex import secrets
from rekindle.spec.platforms import VertexSpec

_SECTION = "platforms.vertex"
# A launcher that is killed comes back and finds its job; one that gave up gives up again at once
LAUNCHER_RETRIES = 3
_PAUSES = {"backoffDuration": "30s", "backoffFactor": 2.0}
LAUNCHER = ["python3", "-m", "rekindle.platforms.vertex.launcher"]
RUN, TASK = "pipeline_job_resource_name", "pipeline_task_name"
_STRATEGIES = {"standard": "STANDARD", "spot": "SPOT", "flex-start": "FLEX_START"}
_problem, _request = problems_in(__file__), requests_in(__file__)


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: VertexSpec
) -> Definition:
    """One JSON file, named after the pipeline: the body of `projects.locations.pipelineJobs.create`
    for `place.project` and `place.region`. RequestError with everything that is wrong."""
    known = known_secrets(graph, place.secrets, lambda step: bool(_asked(step, place)))
    wrong = lacks(graph, "vertex", _of_place(graph, place), known, arguments=arguments)
    if found := [*wrong, *_of_graph(graph, place)]:
        raise refusal(found)
    values = bind(graph, arguments)
    spec, settings = rewrite.rewritten(ir_text, {}, place.image)
    if place.secrets:
        spec = rewrite.prefixed(spec, dict(_secrets(spec, graph, place)))
    # settings that are left say nothing: the feature table refuses every one that does
    spec, _ = rewrite.with_launchers(
        spec, settings, graph, lambda step: launcher(step, graph.name, place)
    )
    labels = rewrite.distributed(spec, graph)
    spec = rewrite.with_retries(spec, labels, lambda own: max(own, LAUNCHER_RETRIES), _PAUSES)
    folder = f"{place.artifact_root.rstrip('/')}/pipeline"
    about = {**_around(place), "account": place.service_account or None}
    job = _request("pipeline", name=graph.name, spec=spec, folder=folder, values=values, **about)
    text = json.dumps(job, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return Definition({f"{graph.name}.vertex.json": f"{text}\n".encode()})


def _secrets(
    spec: Mapping[str, Any], graph: Graph, place: VertexSpec
) -> Iterator[tuple[str, list[str]]]:
    """What stands in front of commands that need secrets, by the executor's label."""
    for step in graph.steps():
        label = rewrite.component_of(spec, step)["executorLabel"]
        if rewrite.executors_of(spec)[label]["container"].get("image") == place.image:
            yield label, secrets.starting(place.secrets, True)
        elif asked := {secret.env: place.secrets[secret.env] for secret in _asked(step, place)}:
            yield label, secrets.starting(asked, False)


def _asked(step: Step, place: VertexSpec) -> list[Secret]:
    """The secrets that a step asks for and that the config names; none where nothing can stand in
    front of its command."""
    started = step.container.source or step.container.command
    return [s for s in step.secrets if s.env in place.secrets] if started else []


def _of_place(graph: Graph, place: VertexSpec) -> Iterator[Problem]:
    yield from place.missing("compile")
    if place.artifact_root and not place.artifact_root.startswith("gs://"):
        yield _problem("out_of_reach", place=place)
    distributed = [step for step in graph.steps() if step.distribution is not None]
    ours = any(step.container.image.startswith(rewrite.OWN_IMAGES) for step in graph.steps())
    if (ours or distributed) and "@sha256:" not in (place.image or ""):
        who = "rekindle's steps need" if ours else "the launcher of a distributed step needs"
        has = f"`{place.image}` has no digest" if place.image else f"{_SECTION}.image is not set"
        yield _problem("no_digest", has=has, who=who)
    if distributed and not place.service_account:
        yield _problem("no_account", step=distributed[0])
    rules = limits("vertex")["labels"]
    room = rules["most"] - rules["ours"]
    if len(place.labels) > room:
        yield _problem("many_labels", count=len(place.labels), room=room)
    for key, value in place.labels.items():
        if not re.fullmatch(rules["key"], key):
            yield _problem("label", where=f"{_SECTION}.labels", text=key, part="key")
        if not re.fullmatch(rules["value"], value):
            yield _problem("label", where=f"{_SECTION}.labels.{key}", text=value, part="value")


def _of_graph(graph: Graph, place: VertexSpec) -> Iterator[Problem]:
    """Names that the service would not take, and distributed steps that no job can run."""
    rules = limits("vertex")
    if not re.fullmatch(rules["pipeline_name"], graph.name):
        fix = "use lower-case letters, digits and -, at most 128, beginning with a letter or digit"
        how = f"`{graph.name}` is not a name of a pipeline there"
        yield beyond("vertex", "", "pipelineInfo.name", how, fix)
    for step in graph.steps():
        if step.distribution is not None:
            yield from _distributed_problems(step, place)
            continue
        if _asked(step, place):
            yield from python_problems("vertex", step, step.container.image)
        asked = step.container.resources.accelerator_type
        known = rules["accelerators"]
        if asked and "{{$" not in asked and asked not in known:
            how = f"it asks for the accelerator {asked}, which there is not"
            yield beyond("vertex", step.path, step.where, how, f"there is {', '.join(known)}")


def launcher(step: Step, pipeline: str, place: VertexSpec) -> dict[str, Any]:
    """KFP's container of the step that starts the job and follows it."""
    wanted, task, container = step.spread, lowered_container(step), step.container
    job = custom_job(step, pipeline, place)
    if wanted.nodes > 1:
        machine = job["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]["machineType"]
        task["env"] = {**network(machine), **task["env"]}
    payload = {
        "project": place.project,
        "region": place.region,
        "job": job,
        "jobs": f"{place.artifact_root.rstrip('/')}/jobs",
        "nodes": wanted.nodes,
        "limit_seconds": limit_seconds(step),
        "spot": provisioning(wanted, place) == "spot",
        "failures": step.retry.count,
        "preemptions": place.max_preemptions,
        "task": {**task, "secrets": dict(place.secrets), "gpus": wanted.gpus_per_node},
    }
    text = json.dumps(payload, sort_keys=True, ensure_ascii=False)
    words = (*container.command, *container.args, *container.env.values())
    asked = [path[1] for word in words for path in references(word) if path[0] == "run"]
    facts = dict.fromkeys([RUN, TASK, *asked])
    pairs = [word for fact in facts for word in (fact, f"{{{{$.{fact}}}}}")]
    # the service would fill in what looks like a placeholder in the user's source
    arguments = [text.replace("{{$", r"{\u007b$"), "{{$}}", *pairs]
    return {"image": place.image, "command": LAUNCHER, "args": arguments}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine by its name there, and the GPUs in it: our `gpu`, the service's `accelerator`."""

    name: str
    gpu: str = ""
    accelerator: str = ""
    gpus: int = 0


def custom_job(step: Step, pipeline: str, place: VertexSpec) -> dict[str, Any]:
    """The body of `customJobs.create`: image, machines and labels, for a step without problems."""
    wanted = step.spread
    machine = _machine(wanted, step)
    assert machine is not None, step.path
    about = {"machine": machine.name, "image": image_of(step, place.image)}
    gpus = {"accelerator": machine.accelerator or None, "gpus": machine.gpus or None}
    counts = [count for count in (1, wanted.nodes - 1) if count]
    how = provisioning(wanted, place)
    return _request(
        "job",
        pools=[_request("pool", count=count, **about, **gpus) for count in counts],
        name=f"{pipeline}-{step.name}"[: limits("vertex")["custom_job"]["display_name_characters"]],
        timeout=f"{limit_seconds(step)}s",
        strategy=_STRATEGIES[how],
        wait=f"{place.max_wait_hours * 3_600:.0f}s" if how == "flex-start" else None,
        account=place.service_account,
        **_around(place),
    )


def _around(place: VertexSpec) -> dict[str, Any]:
    """What the config says of all jobs."""
    labels = {"rekindle": "true", **place.labels}
    return {"labels": labels, "network": place.network or None, "key": place.kms_key or None}


def provisioning(wanted: Distribution, place: VertexSpec) -> str:
    """What the config says; else `spot` for a step that may be taken away, and `standard`."""
    return place.provisioning or ("spot" if wanted.spot else "standard")


def limit_seconds(step: Step) -> int:
    """How long all attempts of a step may run together."""
    longest = limits("vertex")["custom_job"]["longest_hours"] * 3_600
    return int(min(step.time_limit_seconds or longest, longest))


def _distributed_problems(step: Step, place: VertexSpec) -> Iterator[Problem]:
    wanted = step.spread
    how = provisioning(wanted, place)
    rules = limits("vertex")["custom_job"]
    yield from _of_container(step)
    try:
        machine = _machine(wanted, step)
    except ValueError as error:
        yield _problem("quantity", step=step, error=error)
        return
    if machine is None:
        yield _no_machine(step, wanted)
    elif how == "standard" and machine.name in rules["not_on_demand"]:
        yield _problem("not_on_demand", step=step, machine=machine)
    elif how == "flex-start" and machine.gpu not in rules["flex_start"]:
        offered = ", ".join(rules["flex_start"])
        yield _problem("no_flex_start", step=step, machine=machine, offered=offered)
    if how == "spot" and not wanted.spot:
        yield _problem("not_interruptible", step=step)
    if (step.time_limit_seconds or 0) > rules["longest_hours"] * 3_600:
        yield _problem("long", step=step, most=rules["longest_hours"])


def _of_container(step: Step) -> Iterator[Problem]:
    """What a launcher in its place would lose."""
    if not step.container.source and not step.container.command:
        yield _problem("no_command", step=step)
    yield from python_problems("vertex", step, step.container.image)
    if step.container.resources.accelerator_type:
        yield _problem("accelerators", step=step)
    if any(setting.name == "lifecycle" for setting in step.settings):
        yield _problem("lifecycle", step=step)


def _machines() -> list[Machine]:
    return [Machine(*row) for row in limits("vertex")["custom_job"]["machines"]]


def _machine(wanted: Distribution, step: Step) -> Machine | None:
    """The first that fits; ValueError for a quantity that cannot be read."""
    if not wanted.gpus_per_node:
        known = limits("vertex")["custom_job"]["cpu_machines"]
        if wanted.machine:
            return Machine(wanted.machine) if wanted.machine in known else None
        name = smallest(step.container.resources, sizes(known))
        return Machine(name) if name else None
    if not wanted.machine and not wanted.accelerator:
        return None
    fitting = (
        machine
        for machine in _machines()
        if machine.gpus == wanted.gpus_per_node
        and wanted.machine in ("", machine.name)
        and wanted.accelerator in ("", machine.gpu, machine.accelerator)
    )
    return next(fitting, None)


def _no_machine(step: Step, wanted: Distribution) -> Problem:
    """What there is instead of a machine that there is not."""
    rules = limits("vertex")["custom_job"]
    if not wanted.gpus_per_node:
        known = list(rules["cpu_machines"])
        asked = f"the machine {wanted.machine}" if wanted.machine else "that much CPU or memory"
        near = difflib.get_close_matches(wanted.machine, known, n=1) or known
        return _problem("no_cpu_machine", step=step, asked=asked, near=", ".join(near))
    asked = " ".join(filter(None, [wanted.machine, wanted.accelerator])) or "a GPU of any kind"
    offered, kind = _machines(), wanted.accelerator
    same = [m for m in offered if kind in (m.gpu, m.accelerator) or wanted.machine == m.name]
    there = [f"{m.gpus} x {m.gpu} ({m.name})" for m in same] or [m.gpu for m in _machines()]
    found = {"gpus": wanted.gpus_per_node, "there": ", ".join(dict.fromkeys(there))}
    return _problem("no_gpu_machine", step=step, asked=asked, **found)
