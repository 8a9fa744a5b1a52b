"""A distributed step as a TrainJob of Kubeflow Trainer v2: pure functions from a step and the
config's section to the manifest.

`template` holds what the pipeline alone decides and is part of its definition; `manifest` adds what
only the run knows: the name, the owner, and what the nodes are to do. Quantities are strings. Every
node starts one process, rekindle's, whatever `numProcPerNode` says: Trainer only passes that number
on, as PET_NPROC_PER_NODE, from which rendezvous.py takes the ranks of a node. Authority: the API of
trainer.kubeflow.org/v1alpha1 in v2.3 (kubeflow_trainer_api 2.3.0), whose CRD allows 128 arguments
of 65,536 characters. No cluster has run one of these yet.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rekindle.errors import Problem, StepError
from rekindle.ir.graph import Constant, Resources, Setting, Step
from rekindle.spec.places import KubeflowSpec

API_VERSION = "trainer.kubeflow.org/v1alpha1"
GPU = "nvidia.com/gpu"
NODE = "node"  # the replicated job, and the container in its pods, that Trainer looks for
MANAGER = "rekindle.dev/launcher"
RESULT = "rekindle.dev/result"
IDENTITY = "rekindle.dev/identity"
STEP, ATTEMPT = "rekindle.dev/step", "rekindle.dev/attempt"
MACHINE = "node.kubernetes.io/instance-type"
COMMAND = ("python3", "-m", "rekindle.platforms.kubeflow.node")
_MOST_ARGUMENTS, _LONGEST_ARGUMENT = 128, 65_536
# JobSet adds `-node-0-` and Kubernetes an index of up to 4 digits and 5 random letters, 63 in all
_LONGEST_NAME = 44
_CARRIED = ("nodeSelector", "tolerations", "pvcMount", "imagePullSecret")


def template(step: Step, image: str, place: KubeflowSpec) -> dict[str, Any]:
    """The TrainJob of a step without anything of a run in it."""
    wanted = step.distribution
    assert wanted is not None
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": place.runtime,
        },
        "trainer": {
            "image": image,
            "command": list(COMMAND),
            "numNodes": wanted.nodes,
            "numProcPerNode": max(1, wanted.gpus_per_node),
            "resourcesPerNode": _resources(step.container.resources, wanted.gpus_per_node),
            "env": [_secret(env, *found) for env, found in sorted(_secrets(step, place).items())],
        },
        "runtimePatches": [_patch(_pod(step, place))],
    }
    if step.time_limit_seconds is not None:
        spec["activeDeadlineSeconds"] = max(1, round(step.time_limit_seconds))
    labels = {"app.kubernetes.io/managed-by": "rekindle"}
    if place.queue:
        labels["kueue.x-k8s.io/queue-name"] = place.queue
        spec["suspend"] = True  # until Kueue admits it
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": {"labels": labels},
        "spec": spec,
    }


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
) -> dict[str, Any]:
    """The TrainJob to create: `identity` is the step of the run that it is for, `owner` the run's
    Workflow, `result` the URI where node rank 0 leaves what the step gave, `payload` what tells the
    nodes what to do."""
    made = copy.deepcopy(dict(template))
    made["metadata"] |= {
        "name": name,
        "annotations": {RESULT: result, IDENTITY: identity},
        "labels": {
            **template["metadata"]["labels"],
            STEP: digest_of(identity),
            ATTEMPT: str(attempt),
        },
        "ownerReferences": [
            {
                "apiVersion": owner["apiVersion"],
                "kind": owner["kind"],
                "name": owner["name"],
                "uid": owner["uid"],
            }
        ],
    }
    made["spec"]["trainer"]["args"] = list(payload)
    jobs = made["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    pod = jobs["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["serviceAccountName"] = service_account
    return made


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
        raise StepError(
            f"the step's source and inputs are {len(letters):,} bytes, and a TrainJob holds "
            f"{_LONGEST_ARGUMENT * _MOST_ARGUMENTS // 8:,}",
            fix="pass what is large as an artifact",
        )
    return words


def unpacked(words: Sequence[str]) -> dict[str, Any]:
    """What `packed` packed."""
    task: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode("".join(words))))
    return task


def problems(step: Step, place: KubeflowSpec) -> Iterator[Problem]:
    """What keeps a distributed step from becoming a TrainJob."""
    wanted = step.distribution
    assert wanted is not None
    who = f"`{step.path}` runs on several nodes"
    if wanted.spot and not place.spot_nodes:
        yield Problem(
            f"`{step.path}` asks for spot machines, and nothing says which nodes these are",
            "platforms.kubeflow.spot_nodes",
            'name their labels, such as {cloud.google.com/gke-spot: "true"}',
        )
    if wanted.accelerator and wanted.accelerator not in place.accelerator_nodes:
        yield Problem(
            f"`{step.path}` asks for {wanted.accelerator}, and nothing says which nodes have it",
            f"platforms.kubeflow.accelerator_nodes.{wanted.accelerator}",
            "name their labels, such as {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}",
        )
    if step.container.resources.at_run_time:
        yield Problem(f"{who}, whose resources depend on an input", step.where, "write them down")
    if "{{$" in step.container.image:
        yield Problem(f"{who}, whose image depends on an input", step.where, "write it down")
    for secret in step.secrets:
        if not isinstance(secret.name, Constant):
            yield Problem(f"{who}, a secret's name depends on an input", secret.where, "write it")
    for setting in step.settings:
        if setting.name not in _CARRIED or _carried(setting) is None:
            yield Problem(
                f"{who}, and `{setting.name}` is not carried to them",
                setting.where,
                f"take it out; fixed values of {', '.join(_CARRIED)} are carried",
            )


def _resources(asked: Resources, gpus: int) -> dict[str, dict[str, str]]:
    """Limits and requests of a node; GPUs are in both, as Kubernetes wants."""
    limits = {"cpu": asked.cpu_limit, "memory": asked.memory_limit}
    requests = {
        "cpu": asked.cpu_request or asked.cpu_limit,
        "memory": asked.memory_request or asked.memory_limit,
    }
    found = {}
    for name, amounts in (("limits", limits), ("requests", requests)):
        given = {resource: amount for resource, amount in amounts.items() if amount}
        if gpus:
            given[GPU] = str(gpus)
        if given:
            found[name] = given
    return found


def _secrets(step: Step, place: KubeflowSpec) -> dict[str, tuple[str, str]]:
    """Variable -> secret and key; the step's own win over those for all steps."""
    own = {s.env: (str(s.name.value), s.key) for s in step.secrets if isinstance(s.name, Constant)}
    return {**secrets_of(place), **own}


def secrets_of(place: KubeflowSpec) -> dict[str, tuple[str, str]]:
    """Variable -> secret and key, for all steps."""
    pairs = {env: reference.partition("/") for env, reference in place.secrets.items()}
    return {env: (name, key) for env, (name, _, key) in pairs.items()}


def _secret(env: str, name: str, key: str) -> dict[str, Any]:
    return {"name": env, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _pod(step: Step, place: KubeflowSpec) -> dict[str, Any]:
    """Where the pods go, and what is mounted in them."""
    wanted = step.distribution
    assert wanted is not None
    pod: dict[str, Any] = {}
    selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []
    for setting in step.settings:
        carried = _carried(setting) or {}
        selector |= carried.pop("nodeSelector", {})
        tolerations += carried.pop("tolerations", [])
        pod |= carried
    if wanted.machine:
        selector[MACHINE] = wanted.machine
    if wanted.accelerator:
        selector |= place.accelerator_nodes[wanted.accelerator]
    if wanted.spot:
        selector |= place.spot_nodes
        tolerations += [
            {"key": key, "operator": "Equal", "value": value}
            for key, value in sorted(place.spot_nodes.items())
        ]
    if selector:
        pod["nodeSelector"] = selector
    if tolerations:
        pod["tolerations"] = tolerations
    return pod


def _carried(setting: Setting) -> dict[str, Any] | None:
    """A setting of kfp-kubernetes in the words of a pod; None where its value is not written down
    but depends on the run."""
    value = setting.value
    match setting.name:
        case "nodeSelector" if set(value) == {"labels"}:
            return {"nodeSelector": dict(value["labels"])}
        case "tolerations":
            known = {"key", "operator", "value", "effect", "tolerationSeconds"}
            return {"tolerations": list(value)} if all(set(t) <= known for t in value) else None
        case "imagePullSecret":
            names = [_constant(one, "secretName") for one in value]
            return {"imagePullSecrets": [{"name": n} for n in names]} if all(names) else None
        case "pvcMount":
            return _volumes(value)
    return None


def _volumes(mounts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    claims = [_constant(mount, "constant", "pvcName") for mount in mounts]
    if not all(claims):
        return None
    names = [f"claim-{i}" for i in range(len(mounts))]
    found = [
        {"name": name, "mountPath": mount["mountPath"]}
        | ({"subPath": mount["subPath"]} if mount.get("subPath") else {})
        for name, mount in zip(names, mounts, strict=True)
    ]
    return {
        "volumes": [
            {"name": name, "persistentVolumeClaim": {"claimName": claim}}
            for name, claim in zip(names, claims, strict=True)
        ],
        "containers": [{"name": NODE, "volumeMounts": found}],
    }


def _constant(value: Mapping[str, Any], plain: str, parameter: str = "") -> str:
    """A name that kfp-kubernetes writes as a parameter, and for older servers plainly; "" where it
    is no constant."""
    given = value.get(f"{parameter or plain}Parameter")
    if given is not None:
        return str(given.get("runtimeValue", {}).get("constant", ""))
    return str(value.get(plain, ""))


def _patch(pod: Mapping[str, Any]) -> dict[str, Any]:
    job = {"name": NODE, "template": {"spec": {"template": {"spec": dict(pod)}}}}
    spec = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {"manager": MANAGER, "trainingRuntimeSpec": spec}
