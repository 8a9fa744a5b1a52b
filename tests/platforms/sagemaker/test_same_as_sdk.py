"""The definition of a three-step pipeline, argument by argument against what the SageMaker SDK's own
step classes make of the same intent.

Runs where the SDK is installed (`pip install sagemaker==3.27.0`); it is no dependency of the project.
Every difference is listed in DIFFERENT with its reason, and one that is gone fails too."""

import json
from typing import Any

import pytest
from kfp import dsl

import rekindle
from tests.support.sagemaker_compile import IMAGE, PLACE, compiled, definition
from tests.support.two_steps import component

AWS = {
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "SAGEMAKER_VALIDATE_ROLE": "false",
}
RUNS, RESULT = "s3://lake/rekindle/runs", "rekindle-result"
# where the two differ: step, path -> (ours, theirs, why)
DIFFERENT: dict[tuple[str, str], tuple[Any, Any, str]] = {
    ("train", "Arguments.AlgorithmSpecification.ContainerEntrypoint"): (
        ["python3", "/opt/ml/input/data/bundle/entry.py"],
        None,
        "the SDK sets one only for source code that it uploads itself, under a name with the time in it",
    ),
    ("train", "Arguments.HyperParameters"): (
        None,
        {},
        "empty: the step's arguments are in its bundle",
    ),
    ("train", "Arguments.ProfilerConfig"): (
        {"DisableProfiler": True},
        None,
        "the service would turn on a profiler that ends in 2027",
    ),
    ("", "PipelineExperimentConfig"): (
        None,
        {
            "ExperimentName": {"Get": "Execution.PipelineName"},
            "TrialName": {"Get": "Execution.PipelineExecutionId"},
        },
        "SageMaker Experiments: rekindle tracks in MLflow, and makes no experiment that nobody asked for",
    ),
}


@component
def prepare(n: int, data: dsl.Output[dsl.Dataset]):
    print(n)


@component
def train(data: dsl.Input[dsl.Dataset], save_to: str, model: dsl.Output[dsl.Model]):
    print(data.path, save_to)


@component
def report(model: dsl.Input[dsl.Model]):
    print(model.path)


@dsl.pipeline(name="three-steps")
def three(n: int = 3):
    data = prepare(n=n).outputs["data"]
    trained = train(data=data, save_to="s3://lake/c")
    rekindle.distribute(
        trained,
        nodes=2,
        machine="ml.g5.12xlarge",
        gpus_per_node=4,
        spot=True,
        checkpoint="save_to",
        max_run_hours=10,
    )
    report(model=trained.outputs["model"])


def with_sdk(bundles: dict[str, str]) -> dict[str, Any]:
    """The same three steps, said with the SDK's classes."""
    from sagemaker.core import shapes
    from sagemaker.core.processing import Processor
    from sagemaker.core.training import configs
    from sagemaker.core.workflow.execution_variables import ExecutionVariables
    from sagemaker.core.workflow.functions import Join
    from sagemaker.core.workflow.parameters import ParameterInteger
    from sagemaker.core.workflow.pipeline_context import PipelineSession
    from sagemaker.core.workflow.properties import PropertyFile
    from sagemaker.mlops.workflow.pipeline import Pipeline
    from sagemaker.mlops.workflow.retry import (
        SageMakerJobExceptionTypeEnum,
        SageMakerJobStepRetryPolicy,
    )
    from sagemaker.mlops.workflow.steps import CacheConfig, ProcessingStep, TrainingStep
    from sagemaker.train import ModelTrainer

    session = PipelineSession()
    cache = CacheConfig(enable_caching=True, expire_after="P30D")

    def run(*parts: Any) -> Any:
        return Join(on="/", values=[RUNS, ExecutionVariables.PIPELINE_EXECUTION_ID, *parts])

    def given(channel: str, uri: Any) -> Any:
        source = shapes.ProcessingS3Input(
            s3_uri=uri,
            local_path=f"/opt/ml/processing/input/{channel}",
            s3_data_type="S3Prefix",
            s3_input_mode="File",
            s3_data_distribution_type="FullyReplicated",
            s3_compression_type="None",
        )
        return shapes.ProcessingInput(input_name=channel, s3_input=source)

    def made(step: str, name: str) -> Any:
        target = shapes.ProcessingS3Output(
            s3_uri=run(step, name),
            local_path=f"/opt/ml/processing/output/{name}",
            s3_upload_mode="EndOfJob",
        )
        return shapes.ProcessingOutput(output_name=name, s3_output=target)

    def processing(name: str, inputs: list[Any], outputs: list[str], env: Any = None) -> Any:
        processor = Processor(
            role=PLACE["role_arn"],
            image_uri=IMAGE,
            instance_count=1,
            instance_type="ml.m5.xlarge",
            entrypoint=["python3", "/opt/ml/processing/input/bundle/entry.py"],
            env=env,
            volume_size_in_gb=30,
            max_runtime_in_seconds=86_400,
            sagemaker_session=session,
        )
        arguments = processor.run(inputs=inputs, outputs=[made(name, output) for output in outputs])
        file = PropertyFile(name="result", output_name=RESULT, path="result.json")
        return ProcessingStep(name, step_args=arguments, cache_config=cache, property_files=[file])

    n = ParameterInteger(name="n", default_value=3)
    first = processing(
        "prepare",
        [given("bundle", bundles["prepare"])],
        [RESULT, "data"],
        {"REKINDLE_P0": Join(on="", values=[n])},
    )
    outputs = first.properties.ProcessingOutputConfig.Outputs
    channels = {
        "artifact-0": outputs["data"].S3Output.S3Uri,
        "bundle": bundles["train"],
    }
    trainer = ModelTrainer(
        sagemaker_session=session,
        role=PLACE["role_arn"],
        training_image=IMAGE,
        compute=configs.Compute(
            instance_type="ml.g5.12xlarge",
            instance_count=2,
            volume_size_in_gb=30,
            enable_managed_spot_training=True,
        ),
        stopping_condition=shapes.StoppingCondition(
            max_runtime_in_seconds=36_000, max_wait_time_in_seconds=36_000 + 86_400
        ),
        output_data_config=shapes.OutputDataConfig(
            s3_output_path=run("train"), compression_type="NONE"
        ),
        input_data_config=[
            configs.InputData(channel_name=name, data_source=uri) for name, uri in channels.items()
        ],
    )
    event = r'::rekindle \{"event": "progress".*?"%s": ([0-9.eE+-]+)'
    trainer.with_metric_definitions(
        [
            shapes.MetricDefinition(name=name, regex=event % name)
            for name in ("loss", "samples_per_second", "step")
        ]
    )
    scarce = SageMakerJobStepRetryPolicy(
        exception_types=[
            SageMakerJobExceptionTypeEnum.CAPACITY_ERROR,
            SageMakerJobExceptionTypeEnum.RESOURCE_LIMIT,
        ],
        interval_seconds=600,
        backoff_rate=1.0,
        expire_after_mins=1_440,
    )
    second = TrainingStep(
        "train", step_args=trainer.train(wait=False), cache_config=cache, retry_policies=[scarce]
    )
    folder = second.properties.OutputDataConfig.S3OutputPath
    job = second.properties.TrainingJobName
    third = processing(
        "report",
        [
            given("artifact-0", Join(on="/", values=[folder, job, "output/model", "model"])),
            given("bundle", bundles["report"]),
        ],
        [RESULT],
    )
    made_by_sdk = Pipeline(
        name="three-steps", parameters=[n], steps=[first, second, third], sagemaker_session=session
    )
    found: dict[str, Any] = json.loads(made_by_sdk.definition())
    return found


def differences(ours: Any, theirs: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Every place where the two differ, by its dotted path."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted(ours.keys() | theirs.keys()):
            found |= differences(ours.get(key), theirs.get(key), f"{path}.{key}".lstrip("."))
        return found
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return {k: v for i, two in pairs for k, v in differences(*two, f"{path}[{i}]").items()}
    return {} if ours == theirs else {path: (ours, theirs)}


def test_the_definition_is_the_one_that_the_sdk_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("sagemaker.mlops.workflow", reason="the SageMaker SDK is not installed")
    ours = definition(compiled(three))
    bundles = {}
    for step in ours["Steps"]:
        job = step["Arguments"]
        given = job.get("ProcessingInputs") or job["InputDataConfig"]
        (bundles[step["Name"]],) = (found for i in given if "/bundles/" in str(found := _uri(i)))
    theirs = with_sdk(bundles)
    found = {
        (step["Name"], path): pair
        for step, other in zip(ours["Steps"], theirs["Steps"], strict=True)
        for path, pair in differences(step, other).items()
    }
    found |= {
        ("", key): pair
        for key, pair in differences(
            {k: v for k, v in ours.items() if k != "Steps"},
            {k: v for k, v in theirs.items() if k != "Steps"},
        ).items()
    }
    assert found == {place: pair[:2] for place, pair in DIFFERENT.items()}


def _uri(given: dict[str, Any]) -> Any:
    source = given.get("S3Input") or given["DataSource"]["S3DataSource"]
    return source["S3Uri"]
