"""KFP's own samples, executed: here, by kfp.local where it can, and by the emulators of SageMaker and
Azure ML. The same parameters, the same artifacts, and nothing installed on the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.ir.read.pipeline import read
from rekindle.platforms.azureml.compile import compile as for_azure
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.sagemaker.compile import compile as for_sagemaker
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.records import ArtifactRecord, RunRecord
from tests.platforms.local.runs import PIPELINES, left_by, plain, run, unnamed
from tests.platforms.sagemaker.conftest import PLACE, stored
from tests.platforms.sagemaker.conftest import service as service
from tests.servers.aws.sagemaker import Pipelines
from tests.servers.azure.jobs import Workspace
from tests.support.azureml_compile import IMAGE as ACR
from tests.support.azureml_compile import stored as stored_for_azure
from tests.support.azureml_compile import what_came_of_it as left_on_azure
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.results import outputs
from tests.support.sagemaker_compile import IMAGE as ECR
from tests.support.sagemaker_execution import what_came_of_it as left_on_sagemaker
from tests.support.samples import SAMPLES, needs_these_samples
from tests.support.values import arguments

pytestmark = [pytest.mark.slow, needs_these_samples]

# conditions, nested pipelines, loops, lists, artifacts, OneOf; what needs a network or pip is left out
EVERYWHERE = [
    "artifacts_simple.yaml",
    "cross_loop_after_topology.yaml",
    "identity.yaml",
    "local_execution/pipeline_with_caching.yaml",
    "local_execution/pipeline_with_collected_artifacts.yaml",
    "nested_return.yaml",
    "nested_with_parameters.yaml",
    "parallel_and_nested/nested_pipeline_opt_input_child_level_compiled.yaml",
    "parallel_and_nested/nested_pipeline_opt_inputs_nil_compiled.yaml",
    "parallel_and_nested/nested_pipeline_opt_inputs_parent_level_compiled.yaml",
    "parallel_and_nested/pipeline_in_pipeline.yaml",
    "parallel_and_nested/pipeline_in_pipeline_complex.yaml",
    "parameters_complex.yaml",
    "pipeline_producer_consumer.yaml",
    "pipeline_with_utils.yaml",
    "preprocess.yaml",
    "pythonic_artifacts_with_multiple_returns.yaml",
    "pipeline_with_nested_loops.yaml",
    "pythonic_artifacts_with_list_of_artifacts.yaml",
]
BRANCHES = [
    "if_elif_else_with_oneof_parameters.yaml",
    "if_else_with_oneof_artifacts.yaml",
    "if_else_with_oneof_parameters.yaml",
    "conditional_producer_and_consumers.yaml",
    "local_execution/local_execution_pipeline_with_oneof.yaml",
    "artifacts_complex.yaml",
    "collected_artifacts.yaml",
    "pipeline_with_loops_and_conditions.yaml",
]
RANDOM = {"if_elif_else_with_oneof_parameters.yaml", "if_else_with_oneof_parameters.yaml"}
# what kfp.local cannot do, in its own words
CANNOT = {
    "artifacts_simple.yaml": "list index out of range",
    "nested_with_parameters.yaml": "FAILURE",  # whole numbers in lists become floats
    "parallel_and_nested/nested_pipeline_opt_inputs_nil_compiled.yaml": "Unknown value type",
    "parallel_and_nested/pipeline_in_pipeline.yaml": "only supports running Lightweight",
    "parallel_and_nested/pipeline_in_pipeline_complex.yaml": "FAILURE",
    "parameters_complex.yaml": "FAILURE",
    "pipeline_producer_consumer.yaml": "FAILURE",
    "pythonic_artifacts_with_multiple_returns.yaml": "argument 'in_dataset' not found",
    "if_else_with_oneof_artifacts.yaml": "Expected 1 artifact in ArtifactSelectorSpec",
    "conditional_producer_and_consumers.yaml": "FAILURE",
    "artifacts_complex.yaml": "FAILURE",
    "collected_artifacts.yaml": "'list' object has no attribute 'name'",
    "pipeline_with_nested_loops.yaml": "FAILURE",
}


@pytest.fixture(scope="module")
def installed() -> Any:
    """Nothing is installed or removed by any test here."""

    def freeze() -> str:
        command = [sys.executable, "-m", "pip", "freeze"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    before = freeze()
    yield
    assert freeze() == before


def ask_kfp_local(name: str, root: Path) -> Any:
    """The outputs that kfp.local gives, or what it says; its `pip` installs nothing. A process each:
    loops leave its printing broken."""
    (root / "pip").mkdir()
    (root / "pip" / "__init__.py").write_text("")  # without it the real one would win
    (root / "pip" / "__main__.py").write_text("")
    word = f"{SAMPLES / name}={json.dumps(arguments(graph_of(name)))}"
    done = subprocess.run(
        [sys.executable, str(PIPELINES / "run_corpus.py"), str(root), word],
        cwd=root,
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout.splitlines()[-1]).values()
    return answer


def graph_of(name: str) -> Any:
    return read((SAMPLES / name).read_text())


def copied(name: str, image: str) -> Any:
    """The same with the images that it names copied to where the platform pulls from."""
    return read(re.sub(r"(?m)^( +image: ).*$", rf"\g<1>{image}", (SAMPLES / name).read_text()))


def run_here(name: str, home: Path) -> RunRecord:
    graph = graph_of(name)
    return run(graph, home, arguments(graph), env={"PATH": os.environ["PATH"]})


def shown(value: Any) -> Any:
    """An output as the oracle prints it, lists of artifacts as lists."""
    if isinstance(value, list) and value and isinstance(value[0], ArtifactRecord):
        return [plain(item) for item in value]
    return plain(value)


@pytest.mark.parametrize("name", [*EVERYWHERE, *BRANCHES])
def test_its_outputs_are_those_of_kfp_local(name: str, installed: Any, tmp_path: Path) -> None:
    record = run_here(name, tmp_path / "home")
    assert record.status == "succeeded"
    (tmp_path / "oracle").mkdir()
    answer = ask_kfp_local(name, tmp_path / "oracle")
    if name in CANNOT:
        assert CANNOT[name] in answer
    elif name not in RANDOM:
        here = {key: shown(value) for key, value in outputs(graph_of(name), record).items()}
        assert here == answer


@pytest.mark.parametrize("name", EVERYWHERE)
def test_every_step_leaves_on_sagemaker_what_it_leaves_here(
    name: str, service: Pipelines, tmp_path: Path, installed: Any
) -> None:
    graph = copied(name, ECR)
    made = for_sagemaker("", graph, arguments(graph), SageMakerSpec(**PLACE))
    execution = service.execute(stored(service, made.files))
    here = left_by(run_here(name, tmp_path / "home"))
    assert unnamed(left_on_sagemaker(execution, service.s3)) == unnamed(here)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_every_step_leaves_on_azure_what_it_leaves_here(
    name: str, service: Pipelines, tmp_path: Path, installed: Any
) -> None:
    graph = copied(name, ACR)
    made = for_azure("", graph, arguments(graph), AzureMLSpec(image=ACR))
    (tmp_path / "runs").mkdir()
    workspace = Workspace(tmp_path / "runs", service.environment)
    done = workspace.run(stored_for_azure(made, tmp_path))
    here = left_by(run_here(name, tmp_path / "home"))
    assert unnamed(left_on_azure(done)) == unnamed(here)
