"""Objects of a deployment in the cluster, as pure functions: the Deployment of a version,
what the state of its pods means, and the counters that its server shows.

Authority: apps/v1 and v1; the exposition format of Prometheus."""

import copy
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.kubeflow.trainjob import GPU, MACHINE, secrets_of
from rekindle.protojson import Json
from rekindle.serve.messages import ABOUT_ROUTES, BOUNDS_MS, is_refusal
from rekindle.spec.deploy import DeploySpec
from rekindle.tables import rows

if TYPE_CHECKING:  # imported where a server's answer is read
    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Sample

LABEL = "rekindle"
VERSION = "rekindle.dev/version"
READY_SECONDS = 1_800.0  # as the startupProbe in deployment.yaml
_DEPLOYMENT = Path(__file__).with_name("manifests") / "deployment.yaml"
_LONGEST_NAME = 63  # of a label of DNS
_MOST_ENDS = 2  # of a container, after which a version has failed
# reasons of a waiting container that do not pass by themselves
_WAITS = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
}

# status and message of conditions, by their type
Conditions: TypeAlias = dict[str, tuple[str, str]]


def named(model: str, suffix: str = "") -> str:
    """A name that Services may have: `named("my_model", "-v3")` is `my-model-v3`."""
    plain = re.sub(r"[^a-z0-9]+", "-", model).strip("-")
    if not plain[0].isalpha():  # the name of a Service begins with a letter
        plain = f"m-{plain}"
    return f"{plain[: _LONGEST_NAME - len(suffix)].strip('-')}{suffix}"


def service(selector: Mapping[str, str]) -> Json:
    """The spec of a Service before pods with these labels."""
    ports = [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}]
    return {"selector": dict(selector), "ports": ports}


def pods(place: KubeflowSpec, deploy: DeploySpec, labels: Mapping[str, str], uri: str) -> Json:
    """The spec of a version's Deployment; its pods wait there for `uri`, or find it
    mounted."""
    spec: Json = copy.deepcopy(rows(_DEPLOYMENT))
    spec["replicas"] = deploy.replicas
    spec["selector"]["matchLabels"] = dict(labels)
    spec["template"]["metadata"]["labels"] = dict(labels)
    pod = spec["template"]["spec"]
    pod["serviceAccountName"] = place.node_account
    (container,) = pod["containers"]
    container["image"] = place.image
    container["env"].append({"name": "REKINDLE_MODEL", "value": uri})
    for variable, (name, key) in sorted(secrets_of(place).items()):
        source = {"secretKeyRef": {"name": name, "key": key}}
        container["env"].append({"name": variable, "valueFrom": source})
    if place.claim and "://" not in place.artifact_root:
        claim = {"claimName": place.claim, "readOnly": True}
        pod["volumes"].append({"name": "models", "persistentVolumeClaim": claim})
        mount = {"name": "models", "mountPath": place.artifact_root, "readOnly": True}
        container["volumeMounts"].append(mount)
    pod["nodeSelector"] = {}
    if deploy.machine in place.accelerator_nodes:
        container["resources"]["limits"] = {GPU: "1"}
        pod["nodeSelector"] = dict(place.accelerator_nodes[deploy.machine])
    elif deploy.machine:
        pod["nodeSelector"] = {MACHINE: deploy.machine}
    return spec


def predictor(deployment: Json) -> Json:
    """The spec of an InferenceService with the pods of this Deployment's spec."""
    pod = deployment["template"]["spec"]
    # KServe takes the container of this name for the one that predicts
    containers = [{**container, "name": "kserve-container"} for container in pod["containers"]]
    return {
        "predictor": {
            **pod,
            "containers": containers,
            "minReplicas": deployment["replicas"],
            "maxReplicas": deployment["replicas"],
        }
    }


def complete(deployment: Json) -> bool:
    """Whether all its pods are of its spec, and ready: as `kubectl rollout status` sees
    it."""
    metadata = deployment["metadata"]
    status = deployment.get("status", {})
    if status.get("observedGeneration", 0) < metadata.get("generation", 0):
        return False  # the status is of a spec before
    if "deletionTimestamp" in metadata:
        return False
    replicas = deployment["spec"]["replicas"]
    kinds = ("replicas", "updatedReplicas", "availableReplicas")
    return all(status.get(kind, 0) == replicas for kind in kinds)


def conditions(status: Json, generation: int = 0) -> Conditions:
    """Status and message by type, of those that are as new as the generation."""
    by_type = {}
    for condition in status.get("conditions", ()):
        if condition.get("observedGeneration", 0) >= generation:
            message = condition.get("message", condition.get("reason", ""))
            by_type[condition["type"]] = (condition["status"], message)
    return by_type


def trouble(version: str, pods: Iterable[Json]) -> tuple[str, bool]:
    """Why pods of this version do not start, "" for no reason, and whether their
    containers ended so often that no more is to be expected."""
    reason = ""
    for pod in pods:
        if pod["metadata"]["labels"].get(VERSION) != version:
            continue
        status = pod.get("status", {})
        for container in status.get("containerStatuses", ()):
            restart_count = container["restartCount"]
            ended = container.get("lastState", {}).get("terminated")
            if ended and restart_count >= _MOST_ENDS and not container.get("ready"):
                message = ended.get("message", "").strip()
                what = (
                    f"its container ended {restart_count} times, "
                    f"with exit code {ended['exitCode']} ({ended.get('reason', 'Error')})"
                )
                return f"{what}\n{message}".rstrip(), True
            waiting = container.get("state", {}).get("waiting", {})
            if waiting.get("reason") in _WAITS:
                reason = f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
        state, message = conditions(status).get("PodScheduled", ("", ""))
        if not reason and state == "False":
            reason = f"no node takes its pod: {message}"
    return reason, False


def restarts(pod: Json) -> int:
    """How often containers of the pod ended by themselves."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return sum(container["restartCount"] for container in statuses)


def counters(text: str) -> Counter[str]:
    """`requests`, `errors` (5xx) and `refused` (see `is_refusal`) of the routes that
    predict, and by the index of the smallest of `BOUNDS_MS` that is certain how many
    others were answered within it."""
    from prometheus_client.parser import text_string_to_metric_families

    counts = Counter[str]()
    below = 0  # buckets are cumulative: what the bucket before held
    for sample in _samples(text_string_to_metric_families(text)):
        status = sample.labels["status"]
        has_failed = status >= "500"
        is_refused = is_refusal(int(status))
        value = int(sample.value)
        if sample.name.endswith("_count"):  # which ends the buckets of a route and status
            counts["requests"] += value
            if has_failed:
                counts["errors"] += value
            if is_refused:
                counts["refused"] += value
            below = 0
        elif sample.name.endswith("_bucket") and not has_failed and not is_refused:
            bound_ms = round(float(sample.labels["le"]) * 1_000, 3)
            counts[str(bisect_left(BOUNDS_MS, bound_ms))] += value - below
            below = value
    return +counts  # without what is 0


def _samples(families: Iterable["Metric"]) -> Iterator["Sample"]:
    """The samples of requests on routes that predict."""
    for family in families:
        if family.name != "rekindle_request_seconds":
            continue
        for sample in family.samples:
            if sample.labels["route"] not in ABOUT_ROUTES:
                yield sample
