"""The requests of the two kinds of jobs, as CreateProcessingJob and CreateTrainingJob take them.

A Training job leaves everything under /opt/ml/model, uncompressed. Checkpoints are the step's own
matter: they go to the artifact root and outlive the job, whatever the service does with it.
Debugger has been closed to new customers since 2026-07-30 and Profiler ends in 2027, so neither is
asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.spec.platforms import SageMakerSpec

_INPUTS, _OUTPUTS = "/opt/ml/processing/input", "/opt/ml/processing/output"
_CHANNELS = "/opt/ml/input/data"  # of a Training job
_WHOLE = {"S3DataType": "S3Prefix", "S3DataDistributionType": "FullyReplicated"}
_EVENT = r'::rekindle \{"event": "progress".*?"%s": ([0-9.eE+-]+)'  # launch/events.py
_METRICS = [
    {"Name": name, "Regex": _EVENT % name} for name in ("loss", "samples_per_second", "step")
]


def processing(
    place: SageMakerSpec, image: str, machine: str, inputs: Mapping[str, Any],
    outputs: Mapping[str, Any], seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """A job on one machine; `inputs` and `outputs` are S3 URIs by name."""
    request: dict[str, Any] = {
        "AppSpecification": {"ImageUri": image, "ContainerEntrypoint": _entry(_INPUTS)},
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
    place: SageMakerSpec, image: str, machine: str, count: int, inputs: Mapping[str, Any],
    folder: Any, seconds: float, wait_seconds: float | None,
) -> dict[str, Any]:  # fmt: skip
    """A job on `count` machines that leaves its model under `folder`; with `wait_seconds` on spot
    machines, which is how long they may be waited for, the running time included."""
    request: dict[str, Any] = {
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": _entry(_CHANNELS),
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
    plain = ["application/json"]
    kinds = {"SupportedContentTypes": plain, "SupportedResponseMIMETypes": plain}
    return {
        "ModelPackageGroupName": place.model_package_group,
        "ModelApprovalStatus": "Approved",
        "InferenceSpecification": {"Containers": [container], **kinds},
    }


def _entry(inputs: str) -> list[str]:
    return ["python3", f"{inputs}/bundle/entry.py"]


def _cluster(place: SageMakerSpec, machine: str, count: int) -> dict[str, Any]:
    cluster = {"InstanceCount": count, "InstanceType": machine, "VolumeSizeInGB": place.volume_gb}
    return cluster | ({"VolumeKmsKeyId": place.kms_key} if place.kms_key else {})


def _vpc(place: SageMakerSpec) -> dict[str, Any]:
    return {"Subnets": list(place.subnets), "SecurityGroupIds": list(place.security_groups)}


def _input(channel: str, uri: Any) -> dict[str, Any]:
    source = {"S3Uri": uri, "LocalPath": f"{_INPUTS}/{channel}", **_WHOLE}
    how = {"S3InputMode": "File", "S3CompressionType": "None"}
    return {"InputName": channel, "S3Input": {**source, **how}}


def _output(name: str, uri: Any) -> dict[str, Any]:
    target = {"S3Uri": uri, "LocalPath": f"{_OUTPUTS}/{name}", "S3UploadMode": "EndOfJob"}
    return {"OutputName": name, "S3Output": target}


def _channel(name: str, uri: Any) -> dict[str, Any]:
    source = {"S3DataSource": {"S3Uri": uri, **_WHOLE}}
    return {"ChannelName": name, "DataSource": source, "InputMode": "File"}
