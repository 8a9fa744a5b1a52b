"""A distributed step as a TrainJob of Kubeflow Trainer v2: pure functions from a step and
the config's section to the manifest.

`template` holds what the pipeline alone decides and is part of its definition; `manifest`
adds what only the run knows. Every node starts one process, rekindle's: Trainer only
passes `numProcPerNode` on, as PET_NPROC_PER_NODE, from which node.py takes the ranks of a
node. Authority: the API of trainer.kubeflow.org/v1alpha1 in v2.3 (kubeflow_trainer_api
2.3.0), whose CRD allows 128 arguments of 65,536 characters. No cluster has run one of
these yet.

Its pods are what the step's own settings ask for, and the config's section, together. Two
who ask for different things are an error."""

import base64
import copy
import functools
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from rekindle.errors import Problem, StepError
from rekindle.ir.graph import Resources, Step
from rekindle.launch.rendezvous import SECRET
from rekindle.platforms.bundle import image_of
from rekindle.platforms.feature_checks import python_problems
from rekindle.platforms.kubeflow import settings
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.kubeflow.settings import Misfit, Piece, joined
from rekindle.protojson import Json

MACHINE = "node.kubernetes.io/instance-type"
# What the pod of a launcher has of its step's settings: its image comes from a registry
# as private, and namespaces that demand a user, a label or an annotation demand them of
# every pod. All else is for the nodes: their machines, their volumes, their variables.
LAUNCHERS_TOO = ("imagePullSecret", "podMetadata", "securityContext")

# the place of a wish in the IR or the config, and what builds its piece (or raises
# Misfit)
Wish: TypeAlias = tuple[str, Callable[[], Piece]]
GPU = "nvidia.com/gpu"
RESULT = "rekindle.dev/result"
IDENTITY = "rekindle.dev/identity"
STEP = "rekindle.dev/step"
ATTEMPT = "rekindle.dev/attempt"
# limits of the CRD
_MOST_ARGUMENTS = 128
_LONGEST_ARGUMENT = 65_536
# JobSet adds `-node-0-` and Kubernetes an index of up to 4 digits and 5 random letters,
# 63 in all
_LONGEST_NAME = 44


def _pod_of(step: Step, place: KubeflowSpec) -> tuple[Piece, list[Problem]]:
    """The pod of a node, as far as the wishes for it fit together, and a problem for each
    wish that does not."""
    pod: Piece = {"env": [], "spec": {}}
    problems: list[Problem] = []
    image = image_of(step, place.image)
    wishes = list(_wishes_of_place(step, place))
    for setting in settings.settings_of(step):
        build = functools.partial(settings.piece, setting.name, setting.value, image)
        wishes.append((setting.where, build))
    for where, build_piece in wishes:
        try:
            pod = joined(pod, build_piece())
        except Misfit as misfit:
            message = f"`{step.path}` runs on several nodes, and {misfit}"
            problems.append(Problem(message, where, misfit.fix))
    return pod, problems


def _wishes_of_place(step: Step, place: KubeflowSpec) -> Iterator[Wish]:
    """What the config's section and the step's distribution ask of the pod."""
    spread = step.spread
    yield "platforms.kubeflow.secrets", functools.partial(_secret_variables, place)
    if spread.machine:
        yield step.where, functools.partial(_on_nodes, {MACHINE: spread.machine})
    if spread.accelerator:
        labels = place.accelerator_nodes[spread.accelerator]
        yield "platforms.kubeflow.accelerator_nodes", functools.partial(_on_nodes, labels)
    if spread.spot:
        yield "platforms.kubeflow.spot_nodes", functools.partial(_on_spot_nodes, place)


def _secret_variables(place: KubeflowSpec) -> Piece:
    variables = []
    for env, (name, key) in sorted(secrets_of(place).items()):
        source = {"name": name, "key": key}
        variables.append(settings.variable(env, "secretKeyRef", source))
    return {"env": variables}


def _on_nodes(labels: Mapping[str, str]) -> Piece:
    return {"spec": {"nodeSelector": dict(labels)}}


def _on_spot_nodes(place: KubeflowSpec) -> Piece:
    """Nodes with the labels of spot nodes; taints that repeat these labels are
    tolerated."""
    taints = []
    for key, value in sorted(place.spot_nodes.items()):
        taints.append({"key": key, "operator": "Equal", "value": value})
    return {"spec": {"nodeSelector": dict(place.spot_nodes), "tolerations": taints}}


def secrets_of(place: KubeflowSpec) -> dict[str, tuple[str, str]]:
    """Variable -> secret and key, for all steps."""
    secrets = {}
    for env, reference in place.secrets.items():
        name, _, key = reference.partition("/")
        secrets[env] = (name, key)
    return secrets


def template(step: Step, place: KubeflowSpec) -> Json:
    """The TrainJob of a step without anything of a run in it."""
    spread = step.spread
    pod = dict(_pod_of(step, place)[0])
    env = sorted(pod.pop("env"), key=lambda variable: str(variable["name"]))
    labels = {"app.kubernetes.io/managed-by": "rekindle"}
    replicated_job = {"name": settings.NODE, "template": {"spec": {"template": pod}}}
    patch = {
        "manager": "rekindle.dev/launcher",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated_job]}}},
    }
    spec: Json = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": place.runtime,
        },
        "trainer": {
            "image": image_of(step, place.image),
            "command": ["python3", "-m", "rekindle.platforms.kubeflow.node"],
            "numNodes": spread.nodes,
            "numProcPerNode": max(1, spread.gpus_per_node),
            "resourcesPerNode": _resources(step.container.resources, spread.gpus_per_node),
            "env": env,
        },
        "runtimePatches": [patch],
    }
    if step.time_limit_seconds is not None:
        spec["activeDeadlineSeconds"] = max(1, round(step.time_limit_seconds))
    if place.queue:
        labels["kueue.x-k8s.io/queue-name"] = place.queue
        spec["suspend"] = True  # until Kueue admits it
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"labels": labels},
        "spec": spec,
    }


def _template_of(spec: Json) -> Json:
    """The patch of the pod's template in a TrainJob."""
    patch = spec["runtimePatches"][0]
    replicated_job = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    template: Json = replicated_job["template"]["spec"]["template"]
    return template


def manifest(
    template: Json,
    *,
    name: str,
    identity: str,
    attempt: int,
    owner: Mapping[str, object],
    service_account: str,
    result: str,
    payload: Sequence[str],
    secret: str,
) -> Json:
    """The TrainJob to create: `identity` is the step of the run that it is for, `owner`
    the run's Workflow, `result` the URI where node rank 0 leaves what the step gave,
    `payload` what tells the nodes what to do, `secret` the name of the Secret that
    several nodes wait for."""
    job = copy.deepcopy(dict(template))
    own_labels = {STEP: digest_of(identity), ATTEMPT: str(attempt)}
    job["metadata"] |= {
        "name": name,
        "annotations": {RESULT: result, IDENTITY: identity},
        "labels": job["metadata"]["labels"] | own_labels,
        "ownerReferences": [{key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}],
    }
    trainer = job["spec"]["trainer"]
    trainer["args"] = list(payload)
    env = trainer.get("env", [])
    has_secret = any(variable["name"] == SECRET for variable in env)
    if trainer["numNodes"] > 1 and not has_secret:
        key = {"secretKeyRef": {"name": secret, "key": "secret"}}
        trainer["env"] = [*env, {"name": SECRET, "valueFrom": key}]
    _template_of(job["spec"])["spec"]["serviceAccountName"] = service_account
    return job


def secret_of(job: Json, value: str) -> Json | None:
    """The Secret that a job's nodes wait for, which goes with it; None for a single
    node."""
    job_name = job["metadata"]["name"]
    for variable in job["spec"]["trainer"].get("env", []):
        if variable["name"] == SECRET:
            name = variable["valueFrom"]["secretKeyRef"]["name"]
            break
    else:
        return None
    if not name.startswith(f"{job_name}-"):  # the config's own, which is there already
        return None
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job_name,
        "uid": job["metadata"]["uid"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "immutable": True,
        "stringData": {"secret": value},
        "metadata": {"name": name, "ownerReferences": [owner]},
    }


def job_name(step: str, identity: str, attempt: int) -> str:
    """The name of the n-th TrainJob for a step of a run: the same from whichever pod it
    is asked, `train-3f2a9c41d0` and then `train-3f2a9c41d0-2`."""
    suffix = f"-{digest_of(identity)}"
    if attempt > 1:
        suffix += f"-{attempt}"
    plain = re.sub(r"[^a-z0-9]+", "-", step.lower()).strip("-")
    plain = re.sub(r"^[^a-z]+", "", plain)[: _LONGEST_NAME - len(suffix)].strip("-")
    return f"{plain or 'step'}{suffix}"


def digest_of(identity: str) -> str:
    """The identity of a step of a run, short enough for names and labels."""
    return hashlib.sha256(identity.encode()).hexdigest()[:10]


def packed(task: Json) -> list[str]:
    """A task as arguments of a container. Packed, because Kubernetes would expand
    `$(NAME)` in a component's source; StepError if there is more than a TrainJob can
    hold."""
    text = json.dumps(task, sort_keys=True, separators=(",", ":"))
    letters = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    arguments = []
    for start in range(0, len(letters), _LONGEST_ARGUMENT):
        arguments.append(letters[start : start + _LONGEST_ARGUMENT])
    most_words = _MOST_ARGUMENTS // 8  # etcd takes 1.5 MB, and the TrainJob is kept twice
    if len(arguments) > most_words:
        raise StepError(
            f"the step's source and inputs are {len(letters):,} bytes, "
            f"and a TrainJob holds {_LONGEST_ARGUMENT * most_words:,}",
            fix="pass what is large as an artifact",
        )
    return arguments


def unpacked(words: Sequence[str]) -> Json:
    """The task that `packed` packed."""
    return dict(json.loads(zlib.decompress(base64.b64decode("".join(words)))))


def problems(step: Step, place: KubeflowSpec) -> Iterator[Problem]:
    """What keeps a distributed step from becoming a TrainJob."""
    spread = step.spread
    kind = spread.accelerator
    lacks_nodes = bool(kind) and kind not in place.accelerator_nodes
    several_nodes = f"`{step.path}` runs on several nodes"
    if spread.spot and not place.spot_nodes:
        yield Problem(
            f"`{step.path}` asks for spot machines, and nothing says which nodes these are",
            "platforms.kubeflow.spot_nodes",
            'name their labels, such as {cloud.google.com/gke-spot: "true"}',
        )
    if lacks_nodes:
        yield Problem(
            f"`{step.path}` asks for {kind}, and nothing says which nodes have it",
            f"platforms.kubeflow.accelerator_nodes.{kind}",
            "name their labels, such as {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}",
        )
    yield from python_problems("kubeflow", step, step.container.image)
    if step.container.resources.at_run_time:
        message = f"{several_nodes}, whose resources depend on an input"
        yield Problem(message, step.where, "write them down")
    if "{{$" in step.container.image:
        message = f"{several_nodes}, whose image depends on an input"
        yield Problem(message, step.where, "write it down")
    if lacks_nodes:
        return  # without the labels of its nodes the pod cannot be put together
    yield from _pod_of(step, place)[1]
    by_reference = {*place.secrets, *settings.variables(step)}
    for name in sorted(by_reference & set(step.container.env)):
        yield Problem(
            f"{several_nodes}, and `{name}` is in its environment twice: "
            "as a value and by reference",
            step.where,
            "take it out, or what says the other",
        )


def _resources(resources: Resources, gpus: int) -> dict[str, dict[str, str]]:
    """Limits and requests of a node; GPUs are in both, as Kubernetes wants."""
    limits: dict[str, str] = {}
    requests: dict[str, str] = {}
    if resources.cpu_limit:
        limits["cpu"] = resources.cpu_limit
    if resources.memory_limit:
        limits["memory"] = resources.memory_limit
    cpu_request = resources.cpu_request or resources.cpu_limit
    if cpu_request:
        requests["cpu"] = cpu_request
    memory_request = resources.memory_request or resources.memory_limit
    if memory_request:
        requests["memory"] = memory_request
    if gpus:
        limits[GPU] = str(gpus)
        requests[GPU] = str(gpus)
    both = {"limits": limits, "requests": requests}
    return {name: amounts for name, amounts in both.items() if amounts}
