"""Pipelines by chance (generated.py), executed here and by the emulators of SageMaker and Azure ML:
every step leaves the same everywhere."""

from __future__ import annotations

import importlib.util
import json
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
from tests.conformance.test_execution import of_steps
from tests.platforms.azureml.test_compile import IMAGE, what_came_of_it
from tests.platforms.azureml.test_compile import stored as stored_for_azure
from tests.platforms.local.runs import run
from tests.platforms.sagemaker.conftest import PLACE, stored
from tests.platforms.sagemaker.conftest import aws as aws
from tests.platforms.sagemaker.conftest import s3 as s3
from tests.platforms.sagemaker.conftest import service as service
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
    """What each step left, as `of_steps` has it."""
    made = for_sagemaker("", graph, {}, SageMakerSpec(**PLACE))
    execution = service.execute(stored(service, made.files))
    results = [execution.result(job, service.s3) for job in execution.jobs]
    return sorted(
        json.dumps([
            r["parameters"], {n: [a["schema_title"], a["metadata"]] for n, a in r["artifacts"].items()},
        ], sort_keys=True)
        for r in results if "skipped" not in r
    )  # fmt: skip


def on_azure(graph: Graph, service: Pipelines, folder: Path) -> list[str]:
    """What each step left, as `of_steps` has it."""
    made = for_azure("", graph, {}, AzureMLSpec(image=IMAGE))
    (folder / "runs").mkdir()
    done = Workspace(folder / "runs", service.environment).run(stored_for_azure(made, folder))
    return sorted(json.dumps(left, sort_keys=True) for left in what_came_of_it(done).values())


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
    assert on_sagemaker(graph, service) == of_steps(record)
    assert on_azure(graph, service, tmp_path) == of_steps(record)
