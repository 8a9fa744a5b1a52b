"""The requests for one job of a step: CreateProcessingJob and CreateTrainingJob, without
the members that the service fills in.

A member without a value is left out. URIs and names may be text that the service puts
together when the pipeline runs. Authority: botocore's model of both requests."""

from collections.abc import Mapping
from typing import TypeAlias

from rekindle.platforms.sagemaker.section import SageMakerSpec

Request: TypeAlias = dict[str, object]
RuntimeText: TypeAlias = str | Request
"""Text, or what the service puts together: `{"Get": ...}`, `{"Std:Join": ...}`."""

# launch/events.py prints these lines
_PROGRESS = r'::rekindle \{"event": "progress".*?'
_NUMBER = "([0-9.eE+-]+)"


def processing_job(
    place: SageMakerSpec,
    image: str,
    machine: str,
    inputs: Mapping[str, RuntimeText],
    outputs: Mapping[str, RuntimeText],
    seconds: float,
) -> Request:
    """A Processing job on one machine; `inputs` and `outputs` are S3 URIs by name."""
    outputs_config: Request = {
        "Outputs": [_processing_output(name, uri) for name, uri in outputs.items()],
    }
    if place.kms_key:
        outputs_config["KmsKeyId"] = place.kms_key
    request: Request = {
        "AppSpecification": {
            "ImageUri": image,
            "ContainerEntrypoint": [
                "python3",
                "/opt/ml/processing/input/bundle/entry.py",
            ],
        },
        "ProcessingInputs": [_processing_input(name, uri) for name, uri in sorted(inputs.items())],
        "ProcessingOutputConfig": outputs_config,
        "ProcessingResources": {"ClusterConfig": _cluster(place, machine, 1)},
        "StoppingCondition": {"MaxRuntimeInSeconds": round(seconds)},
    }
    if place.subnets:
        request["NetworkConfig"] = {"VpcConfig": _vpc(place)}
    return request


def training_job(
    place: SageMakerSpec,
    image: str,
    machine: str,
    count: int,
    inputs: Mapping[str, RuntimeText],
    folder: RuntimeText,
    seconds: float,
    wait_seconds: float | None,
) -> Request:
    """A Training job on `count` machines that writes to `folder`; `inputs` are S3 URIs by
    channel. With `wait_seconds` it runs on spot machines, and waits and runs that long in
    all."""
    output: Request = {"S3OutputPath": folder, "CompressionType": "NONE"}
    if place.kms_key:
        output["KmsKeyId"] = place.kms_key
    stopping: Request = {"MaxRuntimeInSeconds": round(seconds)}
    if wait_seconds is not None:
        stopping["MaxWaitTimeInSeconds"] = round(wait_seconds)
    request: Request = {
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python3", "/opt/ml/input/data/bundle/entry.py"],
            "MetricDefinitions": [
                {"Name": metric, "Regex": f'{_PROGRESS}"{metric}": {_NUMBER}'}
                for metric in ("loss", "samples_per_second", "step")
            ],
        },
        "InputDataConfig": [_channel(name, uri) for name, uri in sorted(inputs.items())],
        "OutputDataConfig": output,
        "ResourceConfig": _cluster(place, machine, count),
        "StoppingCondition": stopping,
        # Profiler ends in 2027
        "ProfilerConfig": {"DisableProfiler": True},
    }
    if wait_seconds is not None:
        request["EnableManagedSpotTraining"] = True
    if place.subnets:
        request["VpcConfig"] = _vpc(place)
    return request


def _processing_input(name: str, uri: RuntimeText) -> Request:
    return {
        "InputName": name,
        "S3Input": {
            "S3Uri": uri,
            "LocalPath": f"/opt/ml/processing/input/{name}",
            "S3InputMode": "File",
            "S3CompressionType": "None",
            "S3DataType": "S3Prefix",
            "S3DataDistributionType": "FullyReplicated",
        },
    }


def _processing_output(name: str, uri: RuntimeText) -> Request:
    return {
        "OutputName": name,
        "S3Output": {
            "S3Uri": uri,
            "LocalPath": f"/opt/ml/processing/output/{name}",
            "S3UploadMode": "EndOfJob",
        },
    }


def _channel(name: str, uri: RuntimeText) -> Request:
    return {
        "ChannelName": name,
        "InputMode": "File",
        "DataSource": {
            "S3DataSource": {
                "S3Uri": uri,
                "S3DataType": "S3Prefix",
                "S3DataDistributionType": "FullyReplicated",
            }
        },
    }


def _cluster(place: SageMakerSpec, machine: str, count: int) -> Request:
    cluster: Request = {
        "InstanceCount": count,
        "InstanceType": machine,
        "VolumeSizeInGB": place.volume_gb,
    }
    if place.kms_key:
        cluster["VolumeKmsKeyId"] = place.kms_key
    return cluster


def _vpc(place: SageMakerSpec) -> Request:
    return {
        "Subnets": list(place.subnets),
        "SecurityGroupIds": list(place.security_groups),
    }
