"""Pipelines by chance (generated.py), executed here and by the emulators of SageMaker and Azure ML:
every step leaves the same everywhere."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from rekindle.ir.compile import compile_function
from rekindle.ir.graph import Graph
from rekindle.ir.read import read
from rekindle.platforms.azureml.compile import compile as for_azure
from rekindle.platforms.kubeflow.compile import compile as for_kubeflow
from rekindle.platforms.sagemaker.compile import compile as for_sagemaker
from rekindle.platforms.vertex.compile import compile as for_vertex
from rekindle.spec.places import AzureMLSpec, KubeflowSpec, SageMakerSpec
from tests.conformance.generated import source
from tests.conformance.test_conformance import GOOGLE
from tests.platforms.azureml.test_compile import IMAGE
from tests.platforms.azureml.test_compile import stored as stored_for_azure
from tests.platforms.azureml.test_compile import what_came_of_it as left_on_azure
from tests.platforms.local.runs import left_by, run, unnamed
from tests.platforms.sagemaker.conftest import PLACE, stored
from tests.platforms.sagemaker.conftest import aws as aws
from tests.platforms.sagemaker.conftest import s3 as s3
from tests.platforms.sagemaker.conftest import service as service
from tests.platforms.sagemaker.test_execution import what_came_of_it as left_on_sagemaker
from tests.servers.azureml import Workspace
from tests.servers.sagemaker import Pipelines

pytestmark = pytest.mark.slow
# those that kfp compiles and SageMaker takes, as far as they were looked at
SEEDS = [2, 3, 8, 11, 14, 24, 31, 44, 47, 55]


def generated(seed: int, folder: Path) -> str:
    """The IR of the pipeline for a seed."""
    file = folder / f"generated_{seed}.py"
    file.write_text(source(seed))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # KFP asks for the source of its components
    spec.loader.exec_module(module)
    return compile_function(module.generated)


def on_sagemaker(graph: Graph, service: Pipelines) -> list[str]:
    """What each step left."""
    made = for_sagemaker("", graph, {}, SageMakerSpec(**PLACE))
    return unnamed(left_on_sagemaker(service.execute(stored(service, made.files)), service.s3))


def on_azure(graph: Graph, service: Pipelines, folder: Path) -> list[str]:
    """What each step left."""
    made = for_azure("", graph, {}, AzureMLSpec(image=IMAGE))
    (folder / "runs").mkdir()
    done = Workspace(folder / "runs", service.environment).run(stored_for_azure(made, folder))
    return unnamed(left_on_azure(done))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_leaves_the_same_everywhere(
    seed: int, service: Pipelines, tmp_path: Path
) -> None:
    text = generated(seed, tmp_path)
    graph = read(text)
    for_kubeflow(text, graph, {}, KubeflowSpec())
    for_vertex(text, graph, {}, GOOGLE)
    record = run(graph, tmp_path / "home", {})
    assert record.status == "succeeded"
    here = unnamed(left_by(record))
    assert on_sagemaker(graph, service) == here
    assert on_azure(graph, service, tmp_path) == here
