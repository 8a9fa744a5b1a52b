"""A pipeline for Kubeflow Pipelines: its own IR with the run's arguments as defaults, our
image in it, and a launcher in place of each step on several nodes.

Pure: the same IR and arguments give the same bytes. KFP is its own platform, so the IR is
not rebuilt from the Graph; the Graph shows that everything in it was understood. A
launcher's first argument says what is to run, its second is KFP's ExecutorInput; the
artifacts that the step reads are strings there (ir/edit/uris.py), so that their files go
to the nodes and not to the launcher."""

import dataclasses
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import yaml

from rekindle.catalog.tables import network
from rekindle.errors import Problem
from rekindle.ir.compile import DUMPER
from rekindle.ir.dataflow import facts_of
from rekindle.ir.edit import backend, rewrite
from rekindle.ir.edit.uris import with_places
from rekindle.ir.graph import Constant, Graph, Step
from rekindle.ir.scripts import packed
from rekindle.ir.values import bind
from rekindle.platforms.bundle import lowered_container, types_of
from rekindle.platforms.feature_checks import lacks, notices, numbers_of, refusal
from rekindle.platforms.kubeflow import store, templates, trainjob
from rekindle.platforms.kubeflow.second_document import refused_fields
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.kubeflow.settings import variables
from rekindle.platforms.submission import Definition
from rekindle.protojson import Json

RESULT_OUTPUT = "rekindle-result"
# A launcher that lost its pod comes back and finds its job, for as long as a job may
# take. Argo starts one that gave up again as well, in vain: a few times at once, so that
# the run fails within a minute. The pauses between attempts of the step are the
# launcher's own. KFP hands `backoffMaxDuration` to Argo as `maxDuration`, which is not
# the longest pause but the time since the first attempt in which there are retries, and
# in which pods may run at all (processNodeRetries in argo-workflows).
RELAUNCHES = 5
RELAUNCHING_SECONDS = 90 * 24 * 3_600
_RELAUNCHING = {
    "backoffDuration": "1s",
    "backoffFactor": 1.0,
    "backoffMaxDuration": f"{RELAUNCHING_SECONDS}s",
}
# above this many bytes what the nodes run is packed: Argo's templates have room for 131,072,
# with everything escaped twice
_LONG_TASK = 32_768
# a dollar sign that Kubernetes takes for an escape or a variable in arguments of pods
_FILLED_BY_KUBERNETES = re.compile(r"\$(?=\$|\([\w.-]+\))")
# KFP opens its database with MySQL's older UTF-8 (backend/src/apiserver/client/sql.go)
_BEYOND_THREE_BYTES = re.compile("[\U00010000-\U0010ffff]")
_FOUR_BYTES = (
    "the pipeline uses a character of four bytes (an emoji, say) in a text or a description: "
    "KFP's server refuses it (HTTP 500) with the database that it installs"
)
_ONLY_IN_PART = (
    "{name} is compiled without a value, and parts of the pipeline do not ask for it any more: "
    "one that is set in KFP's UI would reach only the others; compile with it instead"
)
# the release since which KFP's own settings of Argo retry only pods that vanish
_RETRIES_IN_PODS = (2, 17)
LAUNCHER = ("python3", "-m", "rekindle.platforms.kubeflow.launcher")


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: KubeflowSpec
) -> Definition:
    """One YAML file that `kfp.Client` and the KFP UI take; RequestError with all that is
    wrong."""
    problems = lacks(
        graph,
        "kubeflow",
        _place_problems(graph, place),
        _honoured(graph, place),
        arguments=arguments,
        release=place.version,
    )
    problems += _step_problems(graph, place)
    if problems:
        raise refusal(problems)
    spec, settings = rewrite.rewritten(ir_text, bind(graph, arguments), place.image)
    only_in_part = _avoid_faults(spec, settings, graph, arguments, place)
    labels = rewrite.distributed(spec, graph)
    if labels:
        spec, settings = rewrite.with_launchers(
            spec, settings, graph, lambda step: launcher(step, place)
        )
        for label, step in labels.items():
            # the pod of a launcher does not know all of them
            backend.with_facts_of(spec, label, _filled_facts(step))
        spec = with_places(spec, labels)
        spec = rewrite.with_output(spec, labels, RESULT_OUTPUT)
        spec = rewrite.with_retries(spec, labels, lambda _: RELAUNCHES, {}, _RELAUNCHING)
    launchers_settings = dict.fromkeys(labels, trainjob.LAUNCHERS_TOO)
    secrets = trainjob.secrets_of(place)
    settings = rewrite.with_secrets(spec, settings, secrets, launchers_settings)
    opening = _opening_the_store(spec, labels, place)
    if opening:
        own = (store.variables(place), store.secrets(place))
        settings = rewrite.with_variables(spec, settings, opening, *own)
    problems = [problem for document in settings for problem in refused_fields(document)]
    problems += templates.problems(spec, settings, graph, arguments)
    if problems:
        raise refusal(problems)
    text = yaml.dump_all([spec, *settings], Dumper=DUMPER, sort_keys=True, allow_unicode=True)
    found_notices = notices(graph, "kubeflow", arguments, place.version)
    if _BEYOND_THREE_BYTES.search(json.dumps([spec, *settings], ensure_ascii=False)):
        found_notices += (_FOUR_BYTES,)
    for name in only_in_part:
        found_notices += (_ONLY_IN_PART.format(name=name),)
    return Definition({f"{graph.name}.yaml": text.encode()}, found_notices)


def _opening_the_store(spec: Json, launchers: Container[str], place: KubeflowSpec) -> set[str]:
    """The executors that open KFP's own store themselves."""
    if not store.variables(place) and not store.secrets(place):
        return set()
    labels = {label for label in rewrite.executors_of(spec) if label in launchers}
    if store.keeps_checkpoints(place):
        for label, executor in rewrite.executors_of(spec).items():
            if (executor.get("container") or {}).get("image") == place.image:
                labels.add(label)
    return labels


def _avoid_faults(
    spec: Json,
    settings: Sequence[Json],
    graph: Graph,
    arguments: Mapping[str, Any],
    place: KubeflowSpec,
) -> list[str]:
    """Bring the pipeline into a form that KFP's backend runs as its SDK documents it.

    Returned are the inputs without a value that one given later would reach only in part."""
    only_in_part = backend.without_absent_inputs(spec, graph, arguments)
    if numbers_of(place.version) >= _RETRIES_IN_PODS:
        backend.with_retries_in_pods(spec, settings, graph)
    backend.with_waits_for_producers(spec)
    backend.with_root(spec, place.pipeline_root)
    backend.with_steps_for_texts(spec, settings)
    backend.with_facts_as_inputs(spec)
    backend.with_joined_texts(spec)
    backend.with_defaults_of_arguments(spec)
    backend.with_ends_of_dags(spec)
    backend.with_names_of_importers(spec)
    backend.with_final_status(spec)
    backend.with_packed_sources(spec)
    return only_in_part


def _filled_facts(step: Step) -> list[str]:
    """The facts of the run that a step's container names, and KFP's driver fills in."""
    return [fact for fact in facts_of(step.container) if fact != "pipeline_root"]


def launcher(step: Step, place: KubeflowSpec) -> Json:
    """The container of the launcher of a step."""
    task: Json | str = _task(step)
    task_text = json.dumps(task, sort_keys=True, ensure_ascii=False)
    if len(task_text) > _LONG_TASK:
        task = packed(task_text)
    parts = {
        "task": task,
        "inputs": types_of(step.inputs),
        "account": place.node_account,
        "root": place.pipeline_root,
        "retry": dataclasses.asdict(step.retry),
        "job": trainjob.template(step, place),
    }
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    # two braces would be a placeholder, to KFP or to Argo; JSON can do without them
    definition = text.replace("{{", "{\\u007b")
    definition = _FILLED_BY_KUBERNETES.sub(r"\\u0024", definition)
    # each as KFP writes it: a number (in GB), which it deprecates, and a text
    resources = {
        "cpuRequest": 0.1,
        "resourceCpuRequest": "100m",
        "memoryRequest": 0.268435456,
        "resourceMemoryRequest": "256Mi",
    }
    return {
        "image": place.image,
        "command": list(LAUNCHER),
        "args": [definition, "{{$}}"],
        "resources": resources,
    }


def _task(step: Step) -> Json:
    """What the nodes run, as launch/shim.py takes it, as far as the pipeline says."""
    task = lowered_container(step)
    env = {}
    if step.spread.nodes > 1:
        # a step's own variables win over what the machine is known for
        own_variables = variables(step)
        for name, value in network(step.spread.machine).items():
            if name not in own_variables:
                env[name] = value
    return {**task, "name": step.name, "env": {**env, **task["env"]}}


def _honoured(graph: Graph, place: KubeflowSpec) -> set[tuple[str, str]]:
    """For `admit`: settings that KFP's driver does not read, and that rekindle gives the
    nodes of a TrainJob itself; and the place of artifacts, where the config has it."""
    distributed = [step.path for step in graph.steps() if step.distribution is not None]
    uses = {(name, path) for name in ("podAffinity", "enabledSharedMemory") for path in distributed}
    if place.pipeline_root:
        uses |= {("root_facts", node.path) for node in graph.nodes()}
    return uses


def _place_problems(graph: Graph, place: KubeflowSpec) -> Iterator[Problem]:
    root = graph.pipeline_root
    if root and not place.pipeline_root and not root.startswith(store.ROOTS):
        yield Problem(
            f"the pipeline's own root, {root}, is in a store that KFP cannot open",
            "defaultPipelineRoot",
            "write s3://, gs:// or minio://, or set platforms.kubeflow.pipeline_root",
        )
    steps = [step for step in graph.steps() if step.distribution is not None]
    if steps and not place.image:
        yield Problem(
            f"`{steps[0].path}` runs on several nodes, which a step in rekindle's image launches",
            "platforms.kubeflow.image",
            "name it as REGISTRY/NAME:TAG, then rekindle images build and push CONFIG",
        )


def _step_problems(graph: Graph, place: KubeflowSpec) -> Iterator[Problem]:
    """Steps that no TrainJob or pod can run, retries that Argo cannot count, and variables
    with two secrets."""
    for step in graph.steps():
        if step.distribution is not None:
            yield from trainjob.problems(step, place)
            continue
        # Argo reads the factor as an integer, and a step fails at its first retry
        # (processNodeRetries in argo-workflows 4.0.5); pauses on nodes are the launcher's own
        if step.retry.count and not step.retry.factor.is_integer():
            yield Problem(
                f"`{step.path}` grows its pauses by {step.retry.factor:g}, and Kubeflow can "
                "only retry with a whole number",
                step.path,
                "set_retry(..., backoff_factor=2), or leave it out",
            )
        for secret in step.secrets:
            reference = place.secrets.get(secret.env)
            if not reference:
                continue
            name, _, key = reference.partition("/")
            if (secret.name, secret.key) != (Constant(name), key):
                yield Problem(
                    f"`{step.path}` takes {secret.env} from a secret, and the config from "
                    f"{reference}",
                    secret.where,
                    f"take it out, or platforms.kubeflow.secrets.{secret.env}",
                )
