"""A distributed step as a TrainJob of Kubeflow Trainer v2: pure functions from a step and the
config's section to the manifest.

`template` holds what the pipeline alone decides and is part of its definition; `manifest` adds what
only the run knows. Every node starts one process, rekindle's: Trainer only passes `numProcPerNode`
on, as PET_NPROC_PER_NODE, from which node.py takes the ranks of a node. Authority: the API of
trainer.kubeflow.org/v1alpha1 in v2.3 (kubeflow_trainer_api 2.3.0), whose CRD allows 128 arguments
of 65,536 characters. No cluster has run one of these yet.

Its pods are what the step's own settings ask for, and the config's section, together. Two who ask
for different things are an error."""

import base64
import copy
import functools
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rekindle.errors import Problem, StepError
from rekindle.ir.graph import Resources, Step
from rekindle.launch.rendezvous import SECRET
from rekindle.platforms.bundle import image_of
from rekindle.platforms.feature_checks import python_problems
from rekindle.platforms.kubeflow import settings
from rekindle.platforms.kubeflow.settings import Misfit, Piece, joined
from rekindle.platforms.submission import problems_in, requests_in
from rekindle.spec.platforms import KubeflowSpec

MACHINE = "node.kubernetes.io/instance-type"
# What the pod of a launcher has of its step's settings: its image comes from a registry as private,
# and namespaces that demand a user, a label or an annotation demand them of every pod. All else is
# for the nodes: their machines, their volumes, their variables.
LAUNCHERS_TOO = ("imagePullSecret", "podMetadata", "securityContext")

Part = tuple[str, Callable[[], Piece]]  # the place of a wish, and what it asks for
GPU = "nvidia.com/gpu"
RESULT = "rekindle.dev/result"
IDENTITY = "rekindle.dev/identity"
STEP, ATTEMPT = "rekindle.dev/step", "rekindle.dev/attempt"
_MOST_ARGUMENTS, _LONGEST_ARGUMENT = 128, 65_536
# JobSet adds `-node-0-` and Kubernetes an index of up to 4 digits and 5 random letters, 63 in all
_LONGEST_NAME = 44
_problem, _request = problems_in(__file__), requests_in(__file__)


def put_together(step: Step, place: KubeflowSpec) -> tuple[Piece, list[Problem]]:
    """What fits together of all that is asked for, and what does not."""
    made: Piece = {"env": [], "spec": {}}
    found: list[Problem] = []
    who = f"`{step.path}` runs on several nodes"
    image = image_of(step, place.image)
    of_step: list[Part] = [
        (one.where, functools.partial(settings.piece, one.name, one.value, image))
        for one in settings.settings_of(step)
    ]
    for where, part in (*_of_place(step, place), *of_step):
        try:
            made = joined(made, part())
        except Misfit as misfit:
            found.append(Problem(f"{who}, and {misfit}", where, misfit.problem.fix))
    return made, found


def _of_place(step: Step, place: KubeflowSpec) -> Iterator[Part]:
    wanted, here = step.spread, "platforms.kubeflow"
    pairs = sorted(secrets_of(place).items())
    secrets = [(env, {"name": name, "key": key}) for env, (name, key) in pairs]
    named = functools.partial(settings.variable, reference="secretKeyRef")
    yield f"{here}.secrets", lambda: {"env": [named(name, source=at) for name, at in secrets]}
    if wanted.machine:
        yield step.where, lambda: {"spec": {"nodeSelector": {MACHINE: wanted.machine}}}
    if wanted.accelerator:
        labels = dict(place.accelerator_nodes[wanted.accelerator])
        yield f"{here}.accelerator_nodes", lambda: {"spec": {"nodeSelector": labels}}
    if wanted.spot:
        wished = sorted(place.spot_nodes.items())
        taints = [{"key": key, "operator": "Equal", "value": value} for key, value in wished]
        spot = {"nodeSelector": dict(place.spot_nodes), "tolerations": taints}
        yield f"{here}.spot_nodes", lambda: {"spec": spot}


def secrets_of(place: KubeflowSpec) -> dict[str, tuple[str, str]]:
    """Variable -> secret and key, for all steps."""
    pairs = {env: reference.partition("/") for env, reference in place.secrets.items()}
    return {env: (name, key) for env, (name, _, key) in pairs.items()}


def template(step: Step, place: KubeflowSpec) -> dict[str, Any]:
    """The TrainJob of a step without anything of a run in it."""
    wanted, limit = step.spread, step.time_limit_seconds
    pod = dict(put_together(step, place)[0])
    return _request(
        "trainjob",
        image=image_of(step, place.image),
        runtime=place.runtime,
        nodes=wanted.nodes,
        ranks=max(1, wanted.gpus_per_node),
        resources=_resources(step.container.resources, wanted.gpus_per_node),
        env=sorted(pod.pop("env"), key=lambda variable: str(variable["name"])),
        pod=pod,
        deadline=None if limit is None else max(1, round(limit)),
        queue=place.queue or None,
        suspended=bool(place.queue) or None,
    )


def _template_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The patch of the pod's template in a TrainJob."""
    jobs = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template: dict[str, Any] = jobs[0]["template"]["spec"]["template"]
    return template


def manifest(
    template: Mapping[str, Any],
    *,
    name: str,
    identity: str,
    attempt: int,
    owner: Mapping[str, Any],
    service_account: str,
    result: str,
    payload: Sequence[str],
    secret: str,
) -> dict[str, Any]:
    """The TrainJob to create: `identity` is the step of the run that it is for, `owner` the run's
    Workflow, `result` the URI where node rank 0 leaves what the step gave, `payload` what tells the
    nodes what to do, `secret` the name of the Secret that several nodes wait for."""
    made = copy.deepcopy(dict(template))
    made["metadata"] |= {
        "name": name,
        "annotations": {RESULT: result, IDENTITY: identity},
        "labels": made["metadata"]["labels"] | {STEP: digest_of(identity), ATTEMPT: str(attempt)},
        "ownerReferences": [{key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}],
    }
    trainer = made["spec"]["trainer"]
    trainer["args"] = list(payload)
    env = trainer.get("env", [])
    if trainer["numNodes"] > 1 and all(one["name"] != SECRET for one in env):
        key = {"secretKeyRef": {"name": secret, "key": "secret"}}
        trainer["env"] = [*env, {"name": SECRET, "valueFrom": key}]
    _template_of(made["spec"])["spec"]["serviceAccountName"] = service_account
    return made


def secret_of(job: Mapping[str, Any], value: str) -> dict[str, Any] | None:
    """The Secret that a job's nodes wait for, which goes with it; None for a single node."""
    name = job["metadata"]["name"]
    env = job["spec"]["trainer"].get("env", [])
    named = [one["valueFrom"]["secretKeyRef"]["name"] for one in env if one["name"] == SECRET]
    if not named or not named[0].startswith(f"{name}-"):  # or the config's own
        return None
    owner = {key: job[key] for key in ("apiVersion", "kind")}
    owner |= {key: job["metadata"][key] for key in ("name", "uid")}
    return _request("secret", name=named[0], owner=owner, value=value)


def job_name(step: str, identity: str, attempt: int) -> str:
    """The name of the n-th TrainJob for a step of a run: the same from whichever pod it is asked,
    `train-3f2a9c41d0` and then `train-3f2a9c41d0-2`."""
    suffix = f"-{digest_of(identity)}" + (f"-{attempt}" if attempt > 1 else "")
    plain = re.sub(r"[^a-z0-9]+", "-", step.lower()).strip("-")
    plain = re.sub(r"^[^a-z]+", "", plain)[: _LONGEST_NAME - len(suffix)].strip("-")
    return f"{plain or 'step'}{suffix}"


def digest_of(identity: str) -> str:
    """The identity of a step of a run, short enough for names and labels."""
    return hashlib.sha256(identity.encode()).hexdigest()[:10]


def packed(task: Mapping[str, Any]) -> list[str]:
    """A task as arguments of a container. Packed, because Kubernetes would expand `$(NAME)` in a
    component's source; StepError if there is more than a TrainJob can hold."""
    text = json.dumps(task, sort_keys=True, separators=(",", ":"))
    letters = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    words = [letters[i : i + _LONGEST_ARGUMENT] for i in range(0, len(letters), _LONGEST_ARGUMENT)]
    if len(words) > _MOST_ARGUMENTS // 8:  # etcd takes 1.5 MB, and the TrainJob is kept twice
        most = _LONGEST_ARGUMENT * _MOST_ARGUMENTS // 8
        raise StepError([_problem("large", size=len(letters), most=most)])
    return words


def unpacked(words: Sequence[str]) -> dict[str, Any]:
    """What `packed` packed."""
    return dict(json.loads(zlib.decompress(base64.b64decode("".join(words)))))


def problems(step: Step, place: KubeflowSpec) -> Iterator[Problem]:
    """What keeps a distributed step from becoming a TrainJob."""
    wanted = step.spread
    if wanted.spot and not place.spot_nodes:
        yield _problem("no_spot", step=step)
    if wanted.accelerator and wanted.accelerator not in place.accelerator_nodes:
        yield _problem("no_accelerator", step=step, kind=wanted.accelerator)
    yield from python_problems("kubeflow", step, step.container.image)
    if step.container.resources.at_run_time:
        yield _problem("resources", step=step)
    if "{{$" in step.container.image:
        yield _problem("image", step=step)
    if not wanted.accelerator or wanted.accelerator in place.accelerator_nodes:
        yield from put_together(step, place)[1]
        for name in sorted(set(step.container.env) & ({*place.secrets} | settings.variables(step))):
            yield _problem("twice", step=step, name=name)


def _resources(asked: Resources, gpus: int) -> dict[str, dict[str, str]]:
    """Limits and requests of a node; GPUs are in both, as Kubernetes wants."""
    cpu, memory = asked.cpu_limit, asked.memory_limit
    least = {"cpu": asked.cpu_request or cpu, "memory": asked.memory_request or memory}
    wanted = {"limits": {"cpu": cpu, "memory": memory}, "requests": least}
    gpu = {GPU: str(gpus)} if gpus else {}
    found = {name: {k: v for k, v in has.items() if v} | gpu for name, has in wanted.items()}
    return {name: has for name, has in found.items() if has}
