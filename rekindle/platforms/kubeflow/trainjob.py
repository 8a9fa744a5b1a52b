"""A distributed step as a TrainJob of Kubeflow Trainer v2: pure functions from a step and the
config's section to the manifest.

`template` holds what the pipeline alone decides and is part of its definition; `manifest` adds what
only the run knows: the name, the owner, and what the nodes are to do. Quantities are strings. Every
node starts one process, rekindle's, whatever `numProcPerNode` says: Trainer only passes that number
on, as PET_NPROC_PER_NODE, from which rendezvous.py takes the ranks of a node. Authority: the API of
trainer.kubeflow.org/v1alpha1 in v2.3 (kubeflow_trainer_api 2.3.0), whose CRD allows 128 arguments
of 65,536 characters. No cluster has run one of these yet."""

import base64
import copy
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rekindle.errors import Problem, StepError
from rekindle.ir.graph import Resources, Step
from rekindle.launch.rendezvous import SECRET
from rekindle.platforms.bundle import image_of
from rekindle.platforms.feature_checks import python_problems
from rekindle.platforms.kubeflow import pods
from rekindle.platforms.kubeflow.pod_patch import NODE, Piece, joined
from rekindle.spec.platforms import KubeflowSpec

API_VERSION = "trainer.kubeflow.org/v1alpha1"
GPU = "nvidia.com/gpu"
MANAGER = "rekindle.dev/launcher"
RESULT = "rekindle.dev/result"
IDENTITY = "rekindle.dev/identity"
STEP, ATTEMPT = "rekindle.dev/step", "rekindle.dev/attempt"
_SECRET_KEY = "secret"  # noqa: S105 - the key within the Secret
COMMAND = ("python3", "-m", "rekindle.platforms.kubeflow.node")
_MOST_ARGUMENTS, _LONGEST_ARGUMENT = 128, 65_536
# JobSet adds `-node-0-` and Kubernetes an index of up to 4 digits and 5 random letters, 63 in all
_LONGEST_NAME = 44


def template(step: Step, place: KubeflowSpec) -> dict[str, Any]:
    """The TrainJob of a step without anything of a run in it."""
    wanted = step.distribution
    assert wanted is not None
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime"}
    trainer = {
        "image": image_of(step, place.image), "command": list(COMMAND), "numNodes": wanted.nodes,
        "numProcPerNode": max(1, wanted.gpus_per_node),
        "resourcesPerNode": _resources(step.container.resources, wanted.gpus_per_node),
    }  # fmt: skip
    spec: dict[str, Any] = {"runtimeRef": {**runtime, "name": place.runtime}, "trainer": trainer}
    if step.time_limit_seconds is not None:
        spec["activeDeadlineSeconds"] = max(1, round(step.time_limit_seconds))
    labels = {"app.kubernetes.io/managed-by": "rekindle"}
    if place.queue:
        labels["kueue.x-k8s.io/queue-name"] = place.queue
        spec["suspend"] = True  # until Kueue admits it
    job = {"apiVersion": API_VERSION, "kind": "TrainJob", "metadata": {"labels": labels}}
    return with_pod({**job, "spec": spec}, pods.put_together(step, place)[0])


def with_pod(job: Mapping[str, Any], pod: Piece) -> dict[str, Any]:
    """The TrainJob with this in the pods of its nodes, besides what it says of them already;
    Clash where the two differ."""
    made = copy.deepcopy(dict(job))
    spec = made["spec"]
    whole = joined({"env": spec["trainer"].get("env", []), **_template_of(spec)}, pod)
    spec["trainer"]["env"] = sorted(whole.pop("env"), key=lambda variable: str(variable["name"]))
    job_patch = {"name": NODE, "template": {"spec": {"template": {"spec": {}, **whole}}}}
    patch = {"template": {"spec": {"replicatedJobs": [job_patch]}}}
    spec["runtimePatches"] = [{"manager": MANAGER, "trainingRuntimeSpec": patch}]
    return made


def _template_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The patch of the pod's template in a TrainJob that has one."""
    if "runtimePatches" not in spec:
        return {}
    jobs = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template: dict[str, Any] = jobs[0]["template"]["spec"]["template"]
    return template


def manifest(
    template: Mapping[str, Any], *, name: str, identity: str, attempt: int,
    owner: Mapping[str, Any], service_account: str, result: str, payload: Sequence[str],
    secret: str,
) -> dict[str, Any]:  # fmt: skip
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
        key = {"secretKeyRef": {"name": secret, "key": _SECRET_KEY}}
        trainer["env"] = [*env, {"name": SECRET, "valueFrom": key}]
    _template_of(made["spec"])["spec"]["serviceAccountName"] = service_account
    return made


def secret_of(job: Mapping[str, Any], value: str) -> dict[str, Any] | None:
    """The Secret that the nodes of a job in the cluster wait for, which goes with the job; None for
    a single node."""
    name = job["metadata"]["name"]
    env = job["spec"]["trainer"].get("env", [])
    named = [one["valueFrom"]["secretKeyRef"]["name"] for one in env if one["name"] == SECRET]
    if not named or not named[0].startswith(f"{name}-"):  # or the config's own
        return None
    owner = {key: job[key] for key in ("apiVersion", "kind")}
    owner |= {key: job["metadata"][key] for key in ("name", "uid")}
    return {
        "apiVersion": "v1", "kind": "Secret", "immutable": True, "stringData": {_SECRET_KEY: value},
        "metadata": {"name": named[0], "ownerReferences": [owner]},
    }  # fmt: skip


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
    yield from python_problems("kubeflow", step, step.container.image)
    if step.container.resources.at_run_time:
        yield Problem(f"{who}, whose resources depend on an input", step.where, "write them down")
    if "{{$" in step.container.image:
        yield Problem(f"{who}, whose image depends on an input", step.where, "write it down")
    if not wanted.accelerator or wanted.accelerator in place.accelerator_nodes:
        yield from pods.problems(step, place)


def _resources(asked: Resources, gpus: int) -> dict[str, dict[str, str]]:
    """Limits and requests of a node; GPUs are in both, as Kubernetes wants."""
    cpu, memory = asked.cpu_limit, asked.memory_limit
    least = {"cpu": asked.cpu_request or cpu, "memory": asked.memory_request or memory}
    wanted = {"limits": {"cpu": cpu, "memory": memory}, "requests": least}
    gpu = {GPU: str(gpus)} if gpus else {}
    found = {name: {k: v for k, v in has.items() if v} | gpu for name, has in wanted.items()}
    return {name: has for name, has in found.items() if has}
