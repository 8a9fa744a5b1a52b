"""Objects of a deployment in the cluster, as pure functions: the Deployment of a version, what the
state of its pods means, and the counters that its server shows.

Authority: apps/v1 and v1; the exposition format of Prometheus."""

import copy
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rekindle.platforms.kubeflow.trainjob import GPU, MACHINE, secrets_of
from rekindle.serve.messages import BOUNDS_MS, is_refusal
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.platforms import KubeflowSpec
from rekindle.tables import rows

LABEL, VERSION = "rekindle", "rekindle.dev/version"
READY_SECONDS = 1_800.0  # as the startupProbe in deployment.yaml
_DEPLOYMENT = Path(__file__).with_name("manifests") / "deployment.yaml"
_LONGEST_NAME, _MOST_ENDS = 63, 2
_PREDICTS = re.compile(r"/predict|/invocations|/v1/.*|.*/infer")
_WAITS = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
}


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
    made: dict[str, Any] = copy.deepcopy(rows(_DEPLOYMENT))
    made["replicas"], made["selector"]["matchLabels"] = deploy.replicas, dict(labels)
    made["template"]["metadata"]["labels"] = dict(labels)
    pod, machine = made["template"]["spec"], deploy.machine
    (container,) = pod["containers"]
    container["image"], pod["serviceAccountName"] = place.image, place.node_account
    container["env"].append({"name": "REKINDLE_MODEL", "value": uri})
    for variable, (name, key) in sorted(secrets_of(place).items()):
        source = {"secretKeyRef": {"name": name, "key": key}}
        container["env"].append({"name": variable, "valueFrom": source})
    if place.claim and "://" not in place.artifact_root:
        claim = {"claimName": place.claim, "readOnly": True}
        pod["volumes"].append({"name": "models", "persistentVolumeClaim": claim})
        mount = {"name": "models", "mountPath": place.artifact_root, "readOnly": True}
        container["volumeMounts"].append(mount)
    pod["nodeSelector"] = {MACHINE: machine} if machine else {}
    if machine in place.accelerator_nodes:
        container["resources"]["limits"] = {GPU: "1"}
        pod["nodeSelector"] = dict(place.accelerator_nodes[machine])
    return made


def predictor(deployment: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of an InferenceService with the pods of this Deployment."""
    pod, count = deployment["template"]["spec"], deployment["replicas"]
    containers = [{**one, "name": "kserve-container"} for one in pod["containers"]]
    return {
        "predictor": {**pod, "containers": containers, "minReplicas": count, "maxReplicas": count}
    }


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
    """`requests`, `errors` (5xx) and `refused` (see `is_refusal`) of the routes that predict, and
    by the index of the smallest of `BOUNDS_MS` that is certain how many others were answered within
    it."""
    from prometheus_client.parser import text_string_to_metric_families

    found, before = Counter[str](), 0
    for name, labels, value in _samples(text_string_to_metric_families(text)):
        failed = labels["status"] >= "500"
        refused = is_refusal(int(labels["status"]))
        if name.endswith("_count"):
            found["requests"] += value
            found["errors"] += value if failed else 0
            found["refused"] += value if refused else 0
            before = 0
        elif name.endswith("_bucket") and not failed and not refused:
            at = bisect_left(BOUNDS_MS, round(float(labels["le"]) * 1_000, 3))
            found[str(at)] += value - before
            before = value
    return +found


def _samples(families: Iterable[Any]) -> Iterator[tuple[str, Mapping[str, str], int]]:
    for family in families:
        for one in family.samples if family.name == "rekindle_request_seconds" else ():
            if _PREDICTS.fullmatch(one.labels["route"]):
                yield one.name, one.labels, int(one.value)
