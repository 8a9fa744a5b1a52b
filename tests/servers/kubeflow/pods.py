"""The pod that Trainer makes of a node: its runtime's template with the TrainJob's patches in it, and
what the kubelet does before the container starts: variables, volumes.

Patches are merged as a strategic merge patch (lists by their key where Kubernetes has one, replaced
whole where not); the result has to be a pod. Nothing is mounted on this machine: a volume is a folder
under `POD_ROOT`, where the container would see it under `/`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as models

from tests.servers.kubeflow.schema import unknown_fields

KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}


class Unstartable(Exception):
    """Why a container is never started, as an event of the pod says it."""


def template_of(runtime: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """The template of the pods of `node`."""
    (made,) = [
        copy.deepcopy(one["template"]["spec"]["template"])
        for one in runtime["spec"]["template"]["spec"]["replicatedJobs"]
        if one["name"] == "node"
    ]
    for patch in patches_of(job):
        made = _merged(made, patch)
    trainer = job["spec"].get("trainer", {})
    (node,) = [one for one in made["spec"]["containers"] if one["name"] == "node"]
    node["image"] = trainer.get("image", node["image"])
    node["resources"] = trainer.get("resourcesPerNode", {})
    node["env"] = _by_key(node.get("env", []), trainer.get("env", []), "name")
    return made


def patches_of(job: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Patches of the template of `node`'s pods."""
    for patch in job["spec"].get("runtimePatches", []):
        for one in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            yield one["template"]["spec"]["template"]


def problems(template: Mapping[str, Any]) -> Iterator[str]:
    """What the API server would say of a pod of this template."""
    yield from unknown_fields(models.IoK8sApiCoreV1PodTemplateSpec, template, "pod")
    spec = template["spec"]
    names = [volume["name"] for volume in spec.get("volumes", [])]
    for volume in spec.get("volumes", []):
        if len(volume) != 2:
            yield f"volume {volume['name']}: must specify exactly one volume type"
    for container in spec["containers"]:
        paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        yield from (f"{path}: must be unique" for path in {p for p in paths if paths.count(p) > 1})
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in names:
                yield f"volumeMounts: {mount['name']!r} not found"
        variables = [one["name"] for one in container.get("env", [])]
        yield from (f"env {v}: twice" for v in {v for v in variables if variables.count(v) > 1})
    if len(names) != len(set(names)):
        yield f"volumes: duplicate value in {names}"


def variable(
    one: Mapping[str, Any], pod: Mapping[str, Any], store: Mapping[Any, str]
) -> str | None:
    """The value of a variable; None if it is optional and not there. `store` holds secrets as
    (name, key), config maps as ("configmap", name, key)."""
    if "value" in one:
        return str(one["value"])
    ((kind, source),) = one["valueFrom"].items()
    if kind == "fieldRef":
        return field(pod, source["fieldPath"])
    key = (source["name"], source["key"])
    found = store.get(("configmap", *key) if kind == "configMapKeyRef" else key)
    if found is None and not source.get("optional"):
        raise Unstartable(f"couldn't find key {key[1]} in {kind} {key[0]}")
    return found


def field(pod: Mapping[str, Any], path: str) -> str:
    """As the downward API gives it: `metadata.labels['a']`."""
    path, _, key = path.partition("['")
    found: Any = pod
    for part in path.split("."):
        found = found[part]
    return str(found[key.removesuffix("']")]) if key else str(found)


def mount(pod: Mapping[str, Any], root: Path, claims: Path, store: Mapping[Any, str]) -> None:
    """Make the volumes of a pod under `root`; claims are shared by all pods."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    (node,) = pod["spec"]["containers"]
    for one in node.get("volumeMounts", []):
        place = root / one["mountPath"].strip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        volume = volumes[one["name"]]
        if claim := volume.get("persistentVolumeClaim"):
            inside = claims / claim["claimName"] / one.get("subPath", "")
            inside.mkdir(parents=True, exist_ok=True)
            place.symlink_to(inside)
            continue
        place.mkdir(exist_ok=True)
        for name, content in _files(volume, store):
            (place / name).write_text(content)


def _files(volume: Mapping[str, Any], store: Mapping[Any, str]) -> Iterator[tuple[str, str]]:
    """The files of a secret or config map."""
    secret, config = volume.get("secret"), volume.get("configMap")
    name = (secret or {}).get("secretName") or (config or {}).get("name")
    if name is None:
        return
    before = ("configmap", name) if config else (name,)
    found = {key[-1]: text for key, text in store.items() if key[:-1] == before}
    if not found and not (secret or config or {}).get("optional"):
        raise Unstartable(f"{name} not found")
    yield from found.items()


def _merged(old: Any, new: Any) -> dict[str, Any]:
    made = dict(old)
    for key, value in new.items():
        if key in KEYS and key in made:
            made[key] = _by_key(made[key], value, KEYS[key])
        elif isinstance(value, dict) and isinstance(made.get(key), dict):
            made[key] = _merged(made[key], value)
        else:
            made[key] = value
    return made


def _by_key(old: list[Any], new: list[Any], key: str) -> list[Any]:
    made = {item[key]: item for item in old}
    for item in new:
        made[item[key]] = _merged(made.get(item[key], {}), item)
    return list(made.values())
