"""What an API server would say of an object of Trainer's, by the models of kubeflow_trainer_api: a
field that is not there is an error, and quantities are strings."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any

import kubeflow_trainer_api.models as models
from pydantic import BaseModel, ValidationError

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?")
KINDS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
}


def problems(kind: str, body: Any) -> list[str]:
    """Everything that is wrong with the object."""
    found = list(unknown_fields(KINDS[kind], body, kind))
    try:
        KINDS[kind].model_validate(body)
    except ValidationError as error:
        found += [
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}"
            for e in error.errors()
            if "ResourceQuantity" not in e["msg"]  # which the model has as an object; see below
        ]
    if body.get("kind") != kind or body.get("apiVersion") != "trainer.kubeflow.org/v1alpha1":
        found.append(f"this is no {kind} of trainer.kubeflow.org/v1alpha1")
    found += list(_limits(body)) if kind == "TrainJob" else []
    return found


def unknown_fields(model: type[BaseModel], data: Any, where: str) -> Iterator[str]:
    """Fields that the model has not, and quantities that are none."""
    if not isinstance(data, dict):
        yield f"{where}: is no object"
        return
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, value in data.items():
        if key not in fields:
            yield f'unknown field "{where}.{key}"'
            continue
        yield from _inside(fields[key].annotation, value, f"{where}.{key}")


def _inside(annotation: Any, value: Any, where: str) -> Iterator[str]:
    """A value of an annotation such as Optional[Dict[str, List[Model]]]."""
    inner = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case None:
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from _object(annotation, value, where)
        case kind if kind is list:
            for i, item in enumerate(value if isinstance(value, list) else []):
                yield from _inside(inner[0], item, f"{where}[{i}]")
        case kind if kind is dict:
            for key, item in value.items() if isinstance(value, dict) else []:
                yield from _inside(inner[1], item, f"{where}.{key}")
        case _:  # Optional
            for one in inner:
                yield from _inside(one, value, where)


def _object(model: type[BaseModel], value: Any, where: str) -> Iterator[str]:
    if model is models.IoK8sApimachineryPkgApiResourceQuantity:
        if not isinstance(value, str) or not QUANTITY.fullmatch(value):
            yield f"{where}: {value!r} is no quantity"
    elif model is not models.IoK8sApimachineryPkgUtilIntstrIntOrString:
        yield from unknown_fields(model, value, where)


def _limits(job: Any) -> Iterator[str]:
    """What the CRD and Trainer's webhook check beyond types."""
    name, spec = job["metadata"].get("name", ""), job.get("spec", {})
    if not NAME.fullmatch(name) or len(name) > 63:
        yield f"metadata.name: {name!r} must match RFC 1035 DNS label format"
    if len(f"{name}-node-0-9999-abcde") > 63:
        yield f"metadata.name: {name!r} leaves no room for the names of pods"
    if not spec.get("runtimeRef", {}).get("name"):
        yield "spec.runtimeRef: required"
    trainer = spec.get("trainer", {})
    for field in ("command", "args"):
        words = trainer.get(field, [])
        if len(words) > 128 or any(len(word) > 65_536 for word in words):
            yield f"spec.trainer.{field}: too long"
    if any(one["name"].startswith("PET_") for one in trainer.get("env", [])):
        yield "spec.trainer.env: must not have reserved envs"
    yield from _patches(spec)
    if spec.get("activeDeadlineSeconds", 1) < 1:
        yield "spec.activeDeadlineSeconds: must be positive"
    for label in {**job["metadata"].get("labels", {})}.values():
        if not re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", label):
            yield f"metadata.labels: {label!r} is no value of a label"


def _patches(spec: Any) -> Iterator[str]:
    """What Trainer's webhook refuses in patches (pkg/runtime/framework/plugins/jobset)."""
    for patch in spec.get("runtimePatches", []):
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            template = job["template"]["spec"]["template"]
            if job["name"] != "node":
                yield f"runtimePatches: the runtime has no job {job['name']}"
            if not set(template.get("metadata", {})) <= {"labels", "annotations"}:
                yield "runtimePatches.metadata: only labels and annotations are allowed"
            for container in template.get("spec", {}).get("containers", []):
                if container["name"] != "node":
                    yield f"runtimePatches: the runtime has no container {container['name']}"
                if container.get("env"):
                    yield "runtimePatches: must not have envs for the node containers"
