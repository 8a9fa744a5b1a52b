"""Objects of a deployment in the cluster, as pure functions: the Deployment of a version, what the
state of its pods means, and the counters that its server shows.

Pods are as those of manifests/runtime.yaml: user 10001, no capabilities, no token of the API
server. Authority: apps/v1 and v1; the exposition format of Prometheus."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rekindle.platforms.kubeflow.trainjob import GPU, MACHINE, secrets_of
from rekindle.serve.deployed import BOUNDS_MS
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.platforms import KubeflowSpec

LABEL, VERSION = "rekindle", "rekindle.dev/version"
READY_SECONDS = 1_800.0
_LONGEST_NAME, _MOST_ENDS = 63, 2
_PREDICTS = re.compile(r"/predict|/invocations|/v1/.*|.*/infer")
_WAITS = {
    "CreateContainerConfigError", "CreateContainerError", "ErrImagePull", "ImagePullBackOff",
    "InvalidImageName", "RunContainerError",
}  # fmt: skip


def named(model: str, suffix: str = "") -> str:
    """A name that Services may have: `named("my_model", "-v3")` is `my-model-v3`."""
    plain = re.sub(r"[^a-z0-9]+", "-", model).strip("-")
    plain = plain if plain[0].isalpha() else f"m-{plain}"
    return f"{plain[: _LONGEST_NAME - len(suffix)].strip('-')}{suffix}"


def service(selector: Mapping[str, str]) -> dict[str, Any]:
    """The spec of a Service before pods with these labels."""
    ports = [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}]
    return {"selector": dict(selector), "ports": ports}


def pods(
    place: KubeflowSpec, deploy: DeploySpec, labels: Mapping[str, str], uri: str
) -> dict[str, Any]:
    """The spec of a version's Deployment; its pods wait there for `uri`, or find it mounted."""
    machine = deploy.machine
    work = "/tmp"  # noqa: S108 - a volume of the pod alone
    env: list[Any] = [{"name": "HOME", "value": work}, {"name": "REKINDLE_MODEL", "value": uri}]
    for variable, (name, key) in sorted(secrets_of(place).items()):
        env.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}})
    volumes: list[Any] = [{"name": "work", "emptyDir": {}}]
    mounts: list[Any] = [{"name": "work", "mountPath": work}]
    if place.claim and "://" not in place.artifact_root:
        claim = {"claimName": place.claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
        mounts.append({"name": "models", "mountPath": place.artifact_root, "readOnly": True})
    gpu, nodes = {}, {MACHINE: machine} if machine else {}
    if machine in place.accelerator_nodes:
        gpu, nodes = {"limits": {GPU: "1"}}, place.accelerator_nodes[machine]
    live: dict[str, Any] = {"httpGet": {"path": "/health/live", "port": "http"}, "periodSeconds": 5}
    container = {
        "name": "server", "image": place.image, "args": ["serve"], "env": env,
        "ports": [{"name": "http", "containerPort": 8080}], "volumeMounts": mounts,
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, **gpu},
        "startupProbe": {**live, "failureThreshold": int(READY_SECONDS / 5)},  # it downloads
        "livenessProbe": {**live, "failureThreshold": 6, "timeoutSeconds": 5},
        "readinessProbe": {**live, "httpGet": {**live["httpGet"], "path": "/health/ready"}},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},  # until it gets none
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    spec = {
        "serviceAccountName": place.node_account, "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60, "nodeSelector": dict(nodes),
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container], "volumes": volumes,
    }  # fmt: skip
    template = {"metadata": {"labels": dict(labels)}, "spec": spec}
    selector = {"matchLabels": dict(labels)}
    return {"replicas": deploy.replicas, "selector": selector, "template": template}


def predictor(deployment: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of an InferenceService with the pods of this Deployment."""
    pod, count = deployment["template"]["spec"], deployment["replicas"]
    containers = [{**one, "name": "kserve-container"} for one in pod["containers"]]
    return {"predictor": {**pod, "containers": containers, "minReplicas": count,
                          "maxReplicas": count}}  # fmt: skip


def complete(deployment: Mapping[str, Any]) -> bool:
    """Whether all its pods are of its spec, and ready: as `kubectl rollout status` sees it."""
    meta, status = deployment["metadata"], deployment.get("status", {})
    wanted = deployment["spec"]["replicas"]
    counts = [status.get(f"{kind}eplicas", 0) for kind in ("r", "updatedR", "availableR")]
    seen = status.get("observedGeneration", 0) >= meta.get("generation", 0)
    return seen and "deletionTimestamp" not in meta and counts == [wanted] * 3


def conditions(found: Mapping[str, Any], generation: int = 0) -> dict[str, tuple[str, str]]:
    """Status and message by type, of those that are as new as the generation."""
    return {
        one["type"]: (one["status"], one.get("message", one.get("reason", "")))
        for one in found.get("conditions", ())
        if one.get("observedGeneration", 0) >= generation
    }


def trouble(version: str, pods: Iterable[Mapping[str, Any]]) -> tuple[str, bool]:
    """Why pods of this version do not start, "" for no reason, and whether their containers ended
    so often that no more is to be expected."""
    reason = ""
    for pod in pods:
        if pod["metadata"]["labels"].get(VERSION) != version:
            continue
        status = pod.get("status", {})
        for one in status.get("containerStatuses", ()):
            waiting = one.get("state", {}).get("waiting", {})
            last = one.get("lastState", {}).get("terminated")
            if last and one["restartCount"] >= _MOST_ENDS and not one.get("ready"):
                why, end = last.get("reason", "Error"), last.get("message", "").strip()
                what = f"its container ended {one['restartCount']} times, with exit code"
                return f"{what} {last['exitCode']} ({why})\n{end}".rstrip(), True
            if waiting.get("reason") in _WAITS:
                reason = f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
        state, message = conditions(status).get("PodScheduled", ("", ""))
        reason = reason or (f"no node takes its pod: {message}" if state == "False" else "")
    return reason, False


def restarts(pod: Mapping[str, Any]) -> int:
    """How often containers of the pod ended by themselves."""
    return sum(one["restartCount"] for one in pod.get("status", {}).get("containerStatuses", ()))


def counters(text: str) -> Counter[str]:
    """`requests` and `errors` (5xx) of the routes that predict, and by the index of the smallest of
    `BOUNDS_MS` that is certain how many others were answered within it."""
    from prometheus_client.parser import text_string_to_metric_families

    found, before = Counter[str](), 0
    for name, labels, value in _samples(text_string_to_metric_families(text)):
        failed = labels["status"] >= "500"
        if name.endswith("_count"):
            found["requests"] += value
            found["errors"] += value * failed
            before = 0
        elif name.endswith("_bucket") and not failed:
            at = bisect_left(BOUNDS_MS, round(float(labels["le"]) * 1_000, 3))
            found[str(at)] += value - before
            before = value
    return +found


def _samples(families: Iterable[Any]) -> Iterator[tuple[str, Mapping[str, str], int]]:
    for family in families:
        for one in family.samples if family.name == "rekindle_request_seconds" else ():
            if _PREDICTS.fullmatch(one.labels["route"]):
                yield one.name, one.labels, int(one.value)
