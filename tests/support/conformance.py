"""What tests share with conformance/test_conformance.py."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from azure.ai.ml import load_job
from google.protobuf import json_format
from kfp import components
from kfp.pipeline_spec import pipeline_spec_pb2

from rekindle.catalog.tables import feature_rows
from rekindle.errors import Problem
from rekindle.ir.features import uses
from rekindle.ir.graph import Graph
from rekindle.ir.read.pipeline import read
from rekindle.platforms.azureml import compile as azureml
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.feature_checks import admit
from rekindle.platforms.kubeflow import compile as kubeflow
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.sagemaker import compile as sagemaker
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Definition
from rekindle.platforms.vertex import compile as vertex
from rekindle.platforms.vertex.section import VertexSpec
from tests.support.azureml_compile import stored
from tests.support.values import arguments

PLATFORMS = ("local", "kubeflow", "vertex", "sagemaker", "azureml")


AMAZON = SageMakerSpec(
    region="eu-central-1",
    role_arn="arn:aws:iam::123456789012:role/me",
    artifact_root="s3://b/r",
    image="123456789012.dkr.ecr.eu-central-1.amazonaws.com/i@sha256:0",
)


AZURE = "lake.azurecr.io/train@sha256:" + "0" * 64


GOOGLE = VertexSpec(project="p", region="europe-west4", artifact_root="gs://b/r")


# features that are compiled into another form for Kubeflow, which means the same
ANOTHER_FORM = {
    "facts_in_texts",
    "texts_for_nested",
    "absent_inputs",
    "concatenations",
    "defaults_in_arguments",
    "final_status",
    "machines_of_outputs",
    "one_of",
    "retries",
}


def on(platform: str, text: str, graph: Graph) -> None:
    """Compile for `platform`, and have its format looked at by others' code."""
    if platform == "local":
        admit(graph, "local", arguments=arguments(graph))
    elif platform == "kubeflow":
        made = kubeflow.compile(text, graph, arguments(graph), KubeflowSpec())
        (content,) = made.files.values()
        components.load_component_from_text(content.decode())
        if not ANOTHER_FORM.intersection(use.feature for use in uses(graph, arguments(graph))):
            assert read(content.decode()).dag == graph.dag
    elif platform == "sagemaker":  # checks its requests against botocore's shapes itself
        sagemaker.compile(text, graph, arguments(graph), AMAZON)
    elif platform == "azureml":
        validated(azureml.compile(text, graph, arguments(graph), AzureMLSpec(image=AZURE)))
    else:
        made = vertex.compile(text, graph, arguments(graph), GOOGLE)
        (content,) = made.files.values()
        job = json.loads(content)
        json_format.ParseDict(job["pipelineSpec"], pipeline_spec_pb2.PipelineSpec())
        assert read(json.dumps(job["pipelineSpec"])).dag == graph.dag


def validated(made: Definition) -> None:
    """Have azure-ai-ml load and check a job."""
    with tempfile.TemporaryDirectory() as folder:
        file = stored(made, Path(folder))
        job = load_job(str(file))
        assert job._validate().passed, job._validate().error_messages


def feature_of(problem: Problem, platform: str) -> str:
    """The feature that a refusal names in the words of the table, with its place and a way out."""
    assert problem.where, problem
    assert problem.fix, problem
    _, found, rest = problem.what.partition(" uses ")
    assert found, problem
    what, found, _ = rest.partition(f", which {platform} refuses")
    assert found, problem
    return next(feature.name for feature in feature_rows().values() if feature.what == what)
