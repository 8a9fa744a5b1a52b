"""A distributed step as a TrainJob of Kubeflow Trainer v2: pure functions from a step and
the config's section to the manifest.

`template` holds what the pipeline alone decides and is part of its definition; `manifest`
adds what only the run knows. Every node starts one process, rekindle's: Trainer only
passes `numProcPerNode` on, as PET_NPROC_PER_NODE, from which node.py takes the ranks of a
node. Authority: the API of trainer.kubeflow.org/v1alpha1 in v2.3 (kubeflow_trainer_api
2.3.0), whose CRD allows 128 arguments of 65,536 characters. No cluster has run one of
these yet.

Its pods have what the step's own settings ask for, and what the config's section asks
for. If the two ask for different values of one thing, that is an error."""

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
from rekindle.platforms.kubeflow import settings, store
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.kubeflow.settings import Misfit, Piece, joined
from rekindle.protojson import Json

# the label of a node that tells its type of machine
MACHINE = "node.kubernetes.io/instance-type"
# The step's settings that the pod of its launcher has, too: it pulls its image from a
# private registry as well, and a namespace that demands a user, a label or an annotation
# demands it of every pod. All others are for the nodes: machines, volumes, variables.
LAUNCHERS_TOO = ("imagePullSecret", "podMetadata", "securityContext")

# Something that the step or the config asks of the pod: its place in the IR or the config,
# and a function that builds its piece of the pod, or raises Misfit
Wish: TypeAlias = tuple[str, Callable[[], Piece]]
# the resource of Kubernetes
GPU = "nvidia.com/gpu"
# annotations and labels of our TrainJobs
RESULT = "rekindle.dev/result"
IDENTITY = "rekindle.dev/identity"
STEP = "rekindle.dev/step"
ATTEMPT = "rekindle.dev/attempt"
# limits of the TrainJob's CRD
_MOST_ARGUMENTS = 128
_LONGEST_ARGUMENT = 65_536
# JobSet adds `-node-0-` and Kubernetes an index of up to 4 digits and 5 random letters,
# 63 in all
_LONGEST_NAME = 44


def _pod_of(step: Step, place: KubeflowSpec) -> tuple[Piece, list[Problem]]:
    """The pod of a node, put together of all wishes that fit, and a problem for each wish
    that does not fit the ones before it."""
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
    for env, (name, key) in sorted(store.secrets(place).items()):
        own_source = {"name": name, "key": key, "optional": True}
        variables.append(settings.variable(env, "secretKeyRef", own_source))
    for env, value in store.variables(place).items():
        variables.append({"name": env, "value": value})
    return {"env": variables}


def _on_nodes(labels: Mapping[str, str]) -> Piece:
    return {"spec": {"nodeSelector": dict(labels)}}


def _on_spot_nodes(place: KubeflowSpec) -> Piece:
    """Have the pod run on nodes with the labels of spot nodes.

    It tolerates taints that repeat these labels, as those of AKS's spot nodes do."""
    taints = []
    for key, value in sorted(place.spot_nodes.items()):
        taints.append({"key": key, "operator": "Equal", "value": value})
    return {"spec": {"nodeSelector": dict(place.spot_nodes), "tolerations": taints}}


def secrets_of(place: KubeflowSpec) -> dict[str, tuple[str, str]]:
    """By the name of a variable, the Secret and the key in it that hold its value, as
    `secrets` of the config has them for all steps."""
    secrets = {}
    for env, reference in place.secrets.items():
        name, _, key = reference.partition("/")
        secrets[env] = (name, key)
    return secrets


def template(step: Step, place: KubeflowSpec) -> Json:
    """The TrainJob of a step, without anything that only a run knows."""
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
    """The TrainJob to create for an attempt of a step.

    `identity` says which step of which run it is for. `owner` is the run's Workflow, with
    which Kubernetes deletes the job. `result` is the URI where node rank 0 leaves the
    outputs of the step, `payload` the packed task for the nodes, `secret` the name of the
    Secret that several nodes wait for."""
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
    """The Secret that a job's nodes wait for, to be created beside it; Kubernetes deletes
    it with the job. None for a single node, and where the config has a Secret for this."""
    job_name = job["metadata"]["name"]
    for variable in job["spec"]["trainer"].get("env", []):
        if variable["name"] == SECRET:
            name = variable["valueFrom"]["secretKeyRef"]["name"]
            break
    else:
        return None
    if not name.startswith(f"{job_name}-"):  # that of the config, which exists already
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
    """The name of a TrainJob for a step of a run: `train-3f2a9c41d0` for attempt 1,
    `train-3f2a9c41d0-2` for attempt 2.

    Every launcher of the step computes the same one, so that two never create two jobs."""
    suffix = f"-{digest_of(identity)}"
    if attempt > 1:
        suffix += f"-{attempt}"
    label = re.sub(r"[^a-z0-9]+", "-", step.lower()).strip("-")
    # names of TrainJobs begin with a letter
    label = re.sub(r"^[^a-z]+", "", label)[: _LONGEST_NAME - len(suffix)].strip("-")
    return f"{label or 'step'}{suffix}"


def digest_of(identity: str) -> str:
    """A hash of the identity of a step of a run, short enough for names and labels."""
    return hashlib.sha256(identity.encode()).hexdigest()[:10]


def packed(task: Json) -> list[str]:
    """A task as arguments of a container; `unpacked` reads them.

    It is compressed to base64, because Kubernetes would expand `$(NAME)` in a component's
    source. StepError if there is more than a TrainJob can hold."""
    plain = json.dumps(task, sort_keys=True, separators=(",", ":"))
    text = base64.b64encode(zlib.compress(plain.encode(), 9)).decode()
    arguments = []
    for start in range(0, len(text), _LONGEST_ARGUMENT):
        arguments.append(text[start : start + _LONGEST_ARGUMENT])
    # fewer than the CRD allows: etcd takes 1.5 MB, and the TrainJob is kept twice
    most_arguments = _MOST_ARGUMENTS // 8
    if len(arguments) > most_arguments:
        raise StepError(
            f"the step's source and inputs are {len(text):,} bytes, "
            f"and a TrainJob holds {_LONGEST_ARGUMENT * most_arguments:,}",
            fix="pass what is large as an artifact",
        )
    return arguments


def unpacked(arguments: Sequence[str]) -> Json:
    """The task that `packed` packed into these arguments."""
    return dict(json.loads(zlib.decompress(base64.b64decode("".join(arguments)))))


def problems(step: Step, place: KubeflowSpec) -> Iterator[Problem]:
    """A problem for everything that keeps a distributed step from becoming a TrainJob."""
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
    """Limits and requests of a node. What is not requested is requested as its limit says,
    and GPUs are in both: Kubernetes takes no other request for them than the limit."""
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
