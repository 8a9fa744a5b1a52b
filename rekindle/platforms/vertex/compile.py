"""A pipeline for Vertex AI Pipelines: the JSON of a PipelineJob, as its API takes it.

Pure: the same input gives the same bytes. Vertex AI runs KFP's own encoding, one document
of it; what the second one holds is refused by the feature table, but for distributed
steps. Authority: the protos of aiplatform_v1.PipelineJob and CustomJob. Untested against
a real project.

A distributed step becomes the container of its launcher: our image, and everything that
launcher.py has to know in one JSON argument. The user's own image, command and arguments
are inside, lowered as for the shim. What the service fills in stands in arguments of its
own, whole: `{{$}}`, and after it the facts of the run as pairs of name and value. So no
text is escaped into another, and nothing that the user wrote is taken for a placeholder.

Its CustomJob is made as far as it is known when the pipeline is compiled: the machine
(the step's own, or the first of limits.yaml with its GPUs), the worker pools (the
primary alone in pool 0, all other nodes in pool 1), how machines are provisioned, and how
long the job may take. The service never restarts anything (`disableRetries`): the
launcher's count of attempts alone bounds the bill."""

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.catalog.tables import network
from rekindle.errors import Problem
from rekindle.ir.distribution import Distribution
from rekindle.ir.edit import rewrite
from rekindle.ir.graph import Graph, Secret, Step
from rekindle.ir.placeholders import references
from rekindle.ir.values import bind
from rekindle.platforms.bundle import image_of, lowered_container
from rekindle.platforms.feature_checks import (
    beyond,
    known_secrets,
    lacks,
    notices,
    python_problems,
    refusal,
)
from rekindle.platforms.machines import sizes, smallest
from rekindle.platforms.submission import Definition
from rekindle.platforms.vertex import secrets
from rekindle.platforms.vertex.limits import limits
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.protojson import Json

_SECTION = "platforms.vertex"
# A launcher that is killed comes back and finds its job; one that gave up gives up again at once
LAUNCHER_RETRIES = 3
_PAUSES = {"backoffDuration": "30s", "backoffFactor": 2.0}
LAUNCHER = ["python3", "-m", "rekindle.platforms.vertex.launcher"]
# facts of a run, by the names that the service has for them
RUN = "pipeline_job_resource_name"
TASK = "pipeline_task_name"
_STRATEGIES = {"standard": "STANDARD", "spot": "SPOT", "flex-start": "FLEX_START"}
_IMAGE_FIX = (
    "set it to europe-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG, then run rekindle images build "
    "CONFIG and push CONFIG, which writes the digest to rekindle.lock"
)


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: VertexSpec
) -> Definition:
    """One JSON file, named after the pipeline: the body of
    `projects.locations.pipelineJobs.create` for `place.project` and `place.region`.
    RequestError with everything that is wrong."""
    known = known_secrets(graph, place.secrets, lambda step: bool(_asked_secrets(step, place)))
    place_problems = _problems_of_place(graph, place)
    problems = lacks(graph, "vertex", place_problems, known, arguments=arguments)
    problems += _problems_of_graph(graph, place)
    if problems:
        raise refusal(problems)
    # artifacts that only branches read are left out by Google's own pipelines
    parameters = dataclasses.replace(graph.inputs, artifacts={})
    values = bind(dataclasses.replace(graph, inputs=parameters), arguments)
    spec, settings = rewrite.rewritten(ir_text, {}, place.image)
    if place.secrets:
        spec = rewrite.prefixed(spec, dict(_secret_commands(spec, graph, place)))
    # settings that are left say nothing: the feature table refuses every one that does
    spec, _ = rewrite.with_launchers(
        spec, settings, graph, lambda step: launcher(step, graph.name, place)
    )
    labels = rewrite.distributed(spec, graph)
    spec = rewrite.with_retries(spec, labels, lambda own: max(own, LAUNCHER_RETRIES), _PAUSES)
    job = _pipeline_job(graph.name, spec, values, place)
    text = json.dumps(job, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    found_notices = notices(graph, "vertex", arguments)
    return Definition({f"{graph.name}.vertex.json": f"{text}\n".encode()}, found_notices)


def _pipeline_job(name: str, spec: Json, values: Mapping[str, Any], place: VertexSpec) -> Json:
    """The body of a PipelineJob."""
    job: Json = {
        "displayName": name,
        "labels": _labels(place),
        "pipelineSpec": spec,
        "runtimeConfig": {
            "gcsOutputDirectory": f"{place.artifact_root.rstrip('/')}/pipeline",
            "parameterValues": values,
        },
    }
    if place.service_account:
        job["serviceAccount"] = place.service_account
    if place.network:
        job["network"] = place.network
    if place.kms_key:
        job["encryptionSpec"] = {"kmsKeyName": place.kms_key}
    return job


def _labels(place: VertexSpec) -> dict[str, str]:
    return {"rekindle": "true", **place.labels}


def _secret_commands(
    spec: Json, graph: Graph, place: VertexSpec
) -> Iterator[tuple[str, list[str]]]:
    """What stands in front of commands that need secrets, by the executor's label."""
    for step in graph.steps():
        label = rewrite.component_of(spec, step)["executorLabel"]
        if rewrite.executors_of(spec)[label]["container"].get("image") == place.image:
            yield label, secrets.starting(place.secrets, True)
            continue
        references = {s.env: place.secrets[s.env] for s in _asked_secrets(step, place)}
        if references:
            yield label, secrets.starting(references, False)


def _asked_secrets(step: Step, place: VertexSpec) -> list[Secret]:
    """The secrets that a step asks for and that the config names; none where nothing can
    stand in front of its command."""
    if not step.container.source and not step.container.command:
        return []
    return [secret for secret in step.secrets if secret.env in place.secrets]


def _problems_of_place(graph: Graph, place: VertexSpec) -> Iterator[Problem]:
    """What is wrong with the config's section for this pipeline."""
    yield from place.missing("compile")
    if place.artifact_root and not place.artifact_root.startswith("gs://"):
        yield Problem(
            f"`{place.artifact_root}` is out of reach for Vertex AI, "
            "which keeps artifacts in Cloud Storage",
            f"{_SECTION}.artifact_root",
            "name a folder of a bucket: gs://my-bucket/rekindle",
        )
    distributed = [step for step in graph.steps() if step.distribution is not None]
    images = [step.container.image for step in graph.steps()]
    runs_ours = any(image.startswith(rewrite.OWN_IMAGES) for image in images)
    if (runs_ours or distributed) and "@sha256:" not in (place.image or ""):
        who = "the launcher of a distributed step needs"
        if runs_ours:
            who = "rekindle's steps need"
        has = f"`{place.image}` has no digest" if place.image else f"{_SECTION}.image is not set"
        message = f"{has}; on Vertex AI {who} an image with a digest"
        yield Problem(message, f"{_SECTION}.image", _IMAGE_FIX)
    if distributed and not place.service_account:
        yield Problem(
            f"the job of `{distributed[0].path}` needs an account to run as",
            f"{_SECTION}.service_account",
            "name the one that steps run as: steps@my-project.iam.gserviceaccount.com",
        )
    yield from _problems_of_labels(place)


def _problems_of_labels(place: VertexSpec) -> Iterator[Problem]:
    rules = limits()["labels"]
    room = rules["most"] - rules["ours"]
    if len(place.labels) > room:
        message = f"{len(place.labels)} labels are too many; there is room for {room}"
        yield Problem(message, f"{_SECTION}.labels", "drop some")
    for key, value in place.labels.items():
        if not re.fullmatch(rules["key"], key):
            yield _bad_label(key, "key", f"{_SECTION}.labels")
        if not re.fullmatch(rules["value"], value):
            yield _bad_label(value, "value", f"{_SECTION}.labels.{key}")


def _bad_label(text: str, part: str, where: str) -> Problem:
    fix = "use lower-case letters, digits, - and _, at most 63, beginning with a letter"
    return Problem(f"`{text}` is not a {part} of a label", where, fix)


def _problems_of_graph(graph: Graph, place: VertexSpec) -> Iterator[Problem]:
    """Names that the service would not take, and distributed steps that no job can
    run."""
    rules = limits()
    if not re.fullmatch(rules["pipeline_name"], graph.name):
        fix = "use lower-case letters, digits and -, at most 128, beginning with a letter or digit"
        how = f"`{graph.name}` is not a name of a pipeline there"
        yield beyond("vertex", "", "pipelineInfo.name", how, fix)
    accelerators = rules["accelerators"]
    for step in graph.steps():
        if step.distribution is not None:
            yield from _distributed_problems(step, place)
            continue
        if _asked_secrets(step, place):
            yield from python_problems("vertex", step, step.container.image)
        accelerator = step.container.resources.accelerator_type
        is_constant = accelerator and "{{$" not in accelerator
        if is_constant and accelerator not in accelerators:
            how = f"it asks for the accelerator {accelerator}, which there is not"
            fix = f"there is {', '.join(accelerators)}"
            yield beyond("vertex", step.path, step.where, how, fix)


def launcher(step: Step, pipeline: str, place: VertexSpec) -> Json:
    """KFP's container of the step that starts the job and follows it."""
    distribution = step.spread
    container = step.container
    task = lowered_container(step)
    job = custom_job(step, pipeline, place)
    if distribution.nodes > 1:
        machine = job["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]["machineType"]
        task["env"] = {**network(machine), **task["env"]}
    task["secrets"] = dict(place.secrets)
    task["gpus"] = distribution.gpus_per_node
    payload = {
        "project": place.project,
        "region": place.region,
        "job": job,
        "jobs": f"{place.artifact_root.rstrip('/')}/jobs",
        "nodes": distribution.nodes,
        "limit_seconds": limit_seconds(step),
        "spot": provisioning(distribution, place) == "spot",
        "failures": step.retry.count,
        "preemptions": place.max_preemptions,
        "task": task,
    }
    text = json.dumps(payload, sort_keys=True, ensure_ascii=False)
    # the service would fill in what looks like a placeholder in the user's source
    text = text.replace("{{$", r"{\u007b$")
    facts = [RUN, TASK]
    for word in (*container.command, *container.args, *container.env.values()):
        facts += [path[1] for path in references(word) if path[0] == "run"]
    pairs = []
    for fact in dict.fromkeys(facts):
        pairs += [fact, f"{{{{$.{fact}}}}}"]
    return {"image": place.image, "command": LAUNCHER, "args": [text, "{{$}}", *pairs]}


@dataclasses.dataclass(frozen=True)
class VertexMachine:
    """A machine by its name there, and the GPUs in it:
    our `gpu`, the service's `accelerator`."""

    name: str
    gpu: str = ""
    accelerator: str = ""
    gpus: int = 0


def custom_job(step: Step, pipeline: str, place: VertexSpec) -> Json:
    """The body of `customJobs.create`:
    image, machines and labels, for a step without problems."""
    distribution = step.spread
    machine = _machine(distribution, step)
    assert machine is not None, step.path
    image = image_of(step, place.image)
    pools = [_worker_pool(machine, image, 1)]  # the primary alone
    if distribution.nodes > 1:
        pools.append(_worker_pool(machine, image, distribution.nodes - 1))
    how = provisioning(distribution, place)
    scheduling = {
        "timeout": f"{limit_seconds(step)}s",
        "disableRetries": True,
        "strategy": _STRATEGIES[how],
    }
    if how == "flex-start":
        scheduling["maxWaitDuration"] = f"{place.max_wait_hours * 3_600:.0f}s"
    spec: Json = {
        "workerPoolSpecs": pools,
        "scheduling": scheduling,
        "serviceAccount": place.service_account,
    }
    if place.network:
        spec["network"] = place.network
    most_characters = limits()["custom_job"]["display_name_characters"]
    job: Json = {
        "displayName": f"{pipeline}-{step.name}"[:most_characters],
        "labels": _labels(place),
        "jobSpec": spec,
    }
    if place.kms_key:
        job["encryptionSpec"] = {"kmsKeyName": place.kms_key}
    return job


def _worker_pool(machine: VertexMachine, image: str, count: int) -> Json:
    machine_spec: Json = {"machineType": machine.name}
    if machine.accelerator:
        machine_spec["acceleratorType"] = machine.accelerator
    if machine.gpus:
        machine_spec["acceleratorCount"] = machine.gpus
    return {
        "machineSpec": machine_spec,
        "containerSpec": {"imageUri": image},
        "replicaCount": count,
    }


def provisioning(distribution: Distribution, place: VertexSpec) -> str:
    """What the config says; else `spot` for a step that may be taken away, and
    `standard`."""
    return place.provisioning or ("spot" if distribution.spot else "standard")


def limit_seconds(step: Step) -> int:
    """How long all attempts of a step may run together."""
    longest = limits()["custom_job"]["longest_hours"] * 3_600
    return int(min(step.time_limit_seconds or longest, longest))


def _distributed_problems(step: Step, place: VertexSpec) -> Iterator[Problem]:
    """Why no job can run the nodes of a step."""
    distribution = step.spread
    how = provisioning(distribution, place)
    rules = limits()["custom_job"]
    yield from _container_problems(step)
    try:
        machine = _machine(distribution, step)
    except ValueError as error:
        yield Problem(f"`{step.path}` asks for {error}", step.where, "write it as 4 or 16G")
        return
    if machine is None:
        yield _no_machine(step, distribution)
    elif how == "standard" and machine.name in rules["not_on_demand"]:
        yield Problem(
            f"`{step.path}` runs on {machine.name}, which is there as spot or flex-start only",
            step.where,
            "set platforms.vertex.provisioning: flex-start, or take 8 GPUs a node",
        )
    elif how == "flex-start" and machine.gpu not in rules["flex_start"]:
        offered = ", ".join(rules["flex_start"])
        yield Problem(
            f"`{step.path}` runs on {machine.name}, which flex-start does not offer",
            f"{_SECTION}.provisioning",
            f"flex-start is for {offered}; take standard or spot",
        )
    if how == "spot" and not distribution.spot:
        yield Problem(
            f"`{step.path}` is not marked as interruptible",
            f"{_SECTION}.provisioning",
            "distribute(..., spot=True, checkpoint='NAME') in the pipeline, or take standard",
        )
    most_hours = rules["longest_hours"]
    if (step.time_limit_seconds or 0) > most_hours * 3_600:
        yield Problem(
            f"`{step.path}` may run longer than a job does, {most_hours} h",
            step.where,
            f"set max_run_hours to {most_hours} at most",
        )


def _container_problems(step: Step) -> Iterator[Problem]:
    """What a launcher in the step's place would lose."""
    if not step.container.source and not step.container.command:
        yield Problem(
            f"`{step.path}` has no command, and nodes cannot start what its image starts by itself",
            step.where,
            "name the command in the component",
        )
    yield from python_problems("vertex", step, step.container.image)
    if step.container.resources.accelerator_type:
        yield Problem(
            f"`{step.path}` asks for accelerators as a task, but its machines are those of nodes",
            step.where,
            "say it in distribute(): gpus_per_node and accelerator",
        )
    if any(setting.name == "lifecycle" for setting in step.settings):
        yield Problem(
            f"`{step.path}` has a lifecycle hook, which is not for a step on several nodes",
            step.where,
            "take it out",
        )


def _machines() -> list[VertexMachine]:
    return [VertexMachine(*row) for row in limits()["custom_job"]["machines"]]


def _machine(distribution: Distribution, step: Step) -> VertexMachine | None:
    """The first that fits; ValueError for a quantity that cannot be read."""
    if not distribution.gpus_per_node:
        return _cpu_machine(distribution, step)
    if not distribution.machine and not distribution.accelerator:
        return None
    for machine in _machines():
        if (
            machine.gpus == distribution.gpus_per_node
            and distribution.machine in ("", machine.name)
            and distribution.accelerator in ("", machine.gpu, machine.accelerator)
        ):
            return machine
    return None


def _cpu_machine(distribution: Distribution, step: Step) -> VertexMachine | None:
    names = limits()["custom_job"]["cpu_machines"]
    if distribution.machine:
        return VertexMachine(distribution.machine) if distribution.machine in names else None
    name = smallest(step.container.resources, sizes(names))
    return VertexMachine(name) if name else None


def _no_machine(step: Step, distribution: Distribution) -> Problem:
    """A step that asks for a machine that there is not;
    the fix names those that there are."""
    if not distribution.gpus_per_node:
        names = list(limits()["custom_job"]["cpu_machines"])
        request = "that much CPU or memory"
        if distribution.machine:
            request = f"the machine {distribution.machine}"
        near = difflib.get_close_matches(distribution.machine, names, n=1) or names
        return Problem(
            f"`{step.path}` asks for {request} and no GPUs, which no machine here is",
            step.where,
            f"take {', '.join(near)}",
        )
    request = f"{distribution.machine} {distribution.accelerator}".strip() or "a GPU of any kind"
    similar = []
    for machine in _machines():
        has_accelerator = distribution.accelerator in (machine.gpu, machine.accelerator)
        if has_accelerator or distribution.machine == machine.name:
            similar.append(f"{machine.gpus} x {machine.gpu} ({machine.name})")
    offered = similar or [machine.gpu for machine in _machines()]
    return Problem(
        f"`{step.path}` asks for {distribution.gpus_per_node} GPUs a node on {request}, "
        "which no machine has",
        step.where,
        f"there is {', '.join(dict.fromkeys(offered))}",
    )
