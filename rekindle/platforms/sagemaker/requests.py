"""The requests of the two kinds of jobs, as CreateProcessingJob and CreateTrainingJob take them.

A Training job leaves everything under /opt/ml/model, uncompressed. Checkpoints are the step's own
matter: they go to the artifact root and outlive the job, whatever the service does with it.
Debugger has been closed to new customers since 2026-07-30 and Profiler ends in 2027, so neither is
asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.spec.platforms import SageMakerSpec

PROCESSING, TRAINING = "/opt/ml/processing", "/opt/ml/input/data"
_EVENT = r'::rekindle \{"event": "progress".*?"%s": ([0-9.eE+-]+)'  # launch/events.py
_METRICS = [
    {"Name": name, "Regex": _EVENT % name} for name in ("loss", "samples_per_second", "step")
]


def processing(
    place: SageMakerSpec,
    image: str,
    machine: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """A job on one machine; `inputs` and `outputs` are S3 URIs by name."""
    request: dict[str, Any] = {
        "AppSpecification": {
            "ImageUri": image,
            "ContainerEntrypoint": _entry(f"{PROCESSING}/input"),
        },
        "ProcessingInputs": [_input(name, uri) for name, uri in sorted(inputs.items())],
        "ProcessingOutputConfig": {"Outputs": [_output(*output) for output in outputs.items()]},
        "ProcessingResources": {"ClusterConfig": _cluster(place, machine, 1)},
        "StoppingCondition": {"MaxRuntimeInSeconds": round(seconds)},
    }
    if place.kms_key:
        request["ProcessingOutputConfig"]["KmsKeyId"] = place.kms_key
    if place.subnets:
        request["NetworkConfig"] = {"VpcConfig": _vpc(place)}
    return request


def training(
    place: SageMakerSpec,
    image: str,
    machine: str,
    count: int,
    inputs: Mapping[str, Any],
    folder: Any,
    seconds: float,
    wait_seconds: float | None,
) -> dict[str, Any]:
    """A job on `count` machines that leaves its model under `folder`; with `wait_seconds` on spot
    machines, which is how long they may be waited for, the running time included."""
    request: dict[str, Any] = {
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": _entry(TRAINING),
            "MetricDefinitions": _METRICS,
        },
        "InputDataConfig": [_channel(name, uri) for name, uri in sorted(inputs.items())],
        "OutputDataConfig": {"S3OutputPath": folder, "CompressionType": "NONE"},
        "ResourceConfig": _cluster(place, machine, count),
        "StoppingCondition": {"MaxRuntimeInSeconds": round(seconds)},
        "ProfilerConfig": {"DisableProfiler": True},
    }
    if wait_seconds is not None:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = round(wait_seconds)
    if place.kms_key:
        request["OutputDataConfig"]["KmsKeyId"] = place.kms_key
    if place.subnets:
        request["VpcConfig"] = _vpc(place)
    return request


def model_package(place: SageMakerSpec, model: Any) -> dict[str, Any]:
    """A version of `place.model_package_group`, approved; `model` is the URI of its files."""
    files = {"S3Uri": model, "S3DataType": "S3Prefix", "CompressionType": "None"}
    container = {"Image": place.image, "ModelDataSource": {"S3DataSource": files}}
    kinds = ["application/json"]
    return {
        "ModelPackageGroupName": place.model_package_group,
        "ModelApprovalStatus": "Approved",
        "InferenceSpecification": {
            "Containers": [container],
            "SupportedContentTypes": kinds,
            "SupportedResponseMIMETypes": kinds,
        },
    }


def _entry(inputs: str) -> list[str]:
    return ["python3", f"{inputs}/bundle/entry.py"]


def _cluster(place: SageMakerSpec, machine: str, count: int) -> dict[str, Any]:
    cluster = {"InstanceCount": count, "InstanceType": machine, "VolumeSizeInGB": place.volume_gb}
    return cluster | ({"VolumeKmsKeyId": place.kms_key} if place.kms_key else {})


def _vpc(place: SageMakerSpec) -> dict[str, Any]:
    return {"Subnets": list(place.subnets), "SecurityGroupIds": list(place.security_groups)}


def _input(channel: str, uri: Any) -> dict[str, Any]:
    return {
        "InputName": channel,
        "S3Input": {
            "S3Uri": uri,
            "LocalPath": f"{PROCESSING}/input/{channel}",
            "S3DataType": "S3Prefix",
            "S3InputMode": "File",
            "S3DataDistributionType": "FullyReplicated",
            "S3CompressionType": "None",
        },
    }


def _output(name: str, uri: Any) -> dict[str, Any]:
    return {
        "OutputName": name,
        "S3Output": {
            "S3Uri": uri,
            "LocalPath": f"{PROCESSING}/output/{name}",
            "S3UploadMode": "EndOfJob",
        },
    }


def _channel(name: str, uri: Any) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": "File"}
