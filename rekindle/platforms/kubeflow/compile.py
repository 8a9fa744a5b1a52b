"""A pipeline for Kubeflow Pipelines: its own IR with the run's arguments as defaults, our image in
it, and a launcher in place of each step on several nodes.

Pure: the same IR and arguments give the same bytes. KFP is its own platform, so the IR is not
rebuilt from the Graph; the Graph shows that everything in it was understood. A launcher's first
argument says what is to run, its second is KFP's ExecutorInput; the artifacts that the step reads
are strings there (ir/edit/uris.py), so that their files go to the nodes and not to the launcher."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rekindle.catalog.tables import network
from rekindle.errors import Problem
from rekindle.ir.compile import DUMPER
from rekindle.ir.edit import rewrite
from rekindle.ir.edit.uris import with_places
from rekindle.ir.graph import Constant, Graph, Step
from rekindle.ir.values import bind
from rekindle.platforms.bundle import lowered_container, types_of
from rekindle.platforms.feature_checks import lacks, refusal
from rekindle.platforms.kubeflow import trainjob
from rekindle.platforms.kubeflow.settings import variables
from rekindle.platforms.submission import Definition, problems_in, requests_in
from rekindle.spec.platforms import KubeflowSpec

RESULT_OUTPUT = "rekindle-result"
# A launcher that lost its pod comes back and finds its job, for as long as a job may take. Argo
# starts one that gave up again as well, in vain: a few times at once, so that the run fails within
# a minute. The pauses between attempts of the step are the launcher's own.
# KFP hands `backoffMaxDuration` to Argo as `maxDuration`, which is not the longest pause but the
# time since the first attempt in which there are retries, and in which pods may run at all
# (processNodeRetries in argo-workflows).
RELAUNCHES, RELAUNCHING_SECONDS = 5, 90 * 24 * 3_600
_RELAUNCHING = {
    "backoffDuration": "1s",
    "backoffFactor": 1.0,
    "backoffMaxDuration": f"{RELAUNCHING_SECONDS}s",
}
LAUNCHER = ("python3", "-m", "rekindle.platforms.kubeflow.launcher")
_problem, _request = problems_in(__file__), requests_in(__file__)


def compile(
    ir_text: str, graph: Graph, arguments: Mapping[str, Any], place: KubeflowSpec
) -> Definition:
    """One YAML file that `kfp.Client` and the KFP UI take; RequestError with all that is wrong."""
    wrong = lacks(graph, "kubeflow", _of_place(graph, place), arguments=arguments)
    if problems := [*wrong, *_of_steps(graph, place)]:
        raise refusal(problems)
    spec, settings = rewrite.rewritten(ir_text, bind(graph, arguments), place.image)
    if labels := rewrite.distributed(spec, graph):
        spec, settings = rewrite.with_launchers(
            spec, settings, graph, lambda step: launcher(step, place)
        )
        spec = with_places(spec, labels)
        spec = rewrite.with_output(spec, labels, RESULT_OUTPUT)
        spec = rewrite.with_retries(spec, labels, lambda _: RELAUNCHES, {}, _RELAUNCHING)
    kept = dict.fromkeys(labels, trainjob.LAUNCHERS_TOO)
    settings = rewrite.with_secrets(spec, settings, trainjob.secrets_of(place), kept)
    text = yaml.dump_all([spec, *settings], Dumper=DUMPER, sort_keys=True, allow_unicode=True)
    return Definition({f"{graph.name}.yaml": text.encode()})


def launcher(step: Step, place: KubeflowSpec) -> dict[str, Any]:
    """The container of the launcher of a step."""
    wanted: dict[str, Any] = {
        "task": _task(step),
        "inputs": types_of(step.inputs),
        "account": place.node_account,
        "retry": dataclasses.asdict(step.retry),
        "job": trainjob.template(step, place),
    }
    text = json.dumps(wanted, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    # two braces would be a placeholder, to KFP or to Argo; JSON can do without them
    definition = text.replace("{{", "{\\u007b")
    return _request("launcher", image=place.image, command=list(LAUNCHER), definition=definition)


def _task(step: Step) -> dict[str, Any]:
    """What the nodes run, as launch/shim.py takes it, as far as the pipeline says."""
    wanted, task = step.spread, lowered_container(step)
    found = network(wanted.machine) if wanted.nodes > 1 else {}
    # a step's own win over what the machine is known for
    found = {name: found[name] for name in found.keys() - variables(step)}
    return {**task, "name": step.name, "env": {**found, **task["env"]}}


def _of_place(graph: Graph, place: KubeflowSpec) -> Iterator[Problem]:
    steps = [step for step in graph.steps() if step.distribution is not None]
    if steps and not place.image:
        yield _problem("no_image", step=steps[0])


def _of_steps(graph: Graph, place: KubeflowSpec) -> Iterator[Problem]:
    """Steps that no TrainJob or pod can run, and variables with two secrets."""
    for step in graph.steps():
        if step.distribution is not None:
            yield from trainjob.problems(step, place)
            continue
        for secret in step.secrets:
            said = place.secrets.get(secret.env)
            name, _, key = (said or "").partition("/")
            if said and (secret.name, secret.key) != (Constant(name), key):
                yield _problem("two_secrets", step=step, secret=secret, said=said)
