"""Pipelines by chance (generated.py), executed here, by kfp.local and by the emulators of SageMaker
and Azure ML: every step leaves the same everywhere. What a platform refuses is what the feature table
says, and all that it takes is compiled for it and checked by others' code."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.catalog.tables import feature_rows
from rekindle.errors import RequestError, UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.features import uses
from rekindle.ir.graph import Graph
from rekindle.ir.read.pipeline import read
from rekindle.platforms.azureml.compile import compile as for_azure
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.sagemaker.compile import compile as for_sagemaker
from rekindle.platforms.sagemaker.section import SageMakerSpec
from tests.conformance.generated import source
from tests.platforms.local.runs import PIPELINES, left_by, plain, run, unnamed
from tests.platforms.sagemaker.conftest import PLACE, stored
from tests.platforms.sagemaker.conftest import service as service
from tests.servers.aws.sagemaker import Pipelines
from tests.servers.azure.jobs import Workspace
from tests.support.azureml_compile import IMAGE
from tests.support.azureml_compile import stored as stored_for_azure
from tests.support.azureml_compile import what_came_of_it as left_on_azure
from tests.support.conformance import PLATFORMS, feature_of, on
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.results import outputs
from tests.support.sagemaker_execution import what_came_of_it as left_on_sagemaker

pytestmark = pytest.mark.slow
# all that kfp compiles, and reads again, of the first ones
PLAIN = [0, 1, 2, 4, 6, 8, 9, 12, 14, 15, 18, 19]
WITH_CONTAINERS = [1, 2, 6, 7, 9, 10, 11, 13]
ON_KUBERNETES = [0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22]
TOOLS = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/tools@sha256:" + "0" * 64
# kfp.local hands lists over as text, and knows no loop in a loop
NOT_IN_KFP_LOCAL = "finished with status"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The seeds above, or those of `--seeds FIRST:END`, each with containers and without."""
    first, _, end = metafunc.config.getoption("seeds").partition(":")
    others = range(int(first), int(end)) if end else ()
    if "image" in metafunc.fixturenames:
        known = [*((s, "") for s in PLAIN), *((s, TOOLS) for s in WITH_CONTAINERS)]
        wanted = [(seed, image) for seed in others for image in ("", TOOLS)]
        metafunc.parametrize(("seed", "image"), wanted or known)
    elif "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", others or ON_KUBERNETES)


def generated(seed: int, folder: Path, image: str = "", on_kubernetes: bool = False) -> str:
    """The IR of the pipeline for a seed."""
    file = folder / f"generated_{seed}.py"
    file.write_text(source(seed, image, on_kubernetes))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # KFP asks for the source of its components
    try:
        spec.loader.exec_module(module)
        text = compile_function(module.generated)
    except Exception as error:
        if seed in (*PLAIN, *WITH_CONTAINERS, *ON_KUBERNETES):
            raise
        pytest.skip(f"KFP does not compile it: {error}")
    if lost := dangling(text):
        with pytest.raises(RequestError, match="its compiler went wrong here"):
            read(text)
        pytest.skip(f"KFP lost the output {lost[0]}")
    return text


def dangling(text: str) -> list[str]:
    """Outputs that tasks read and the component of the task that they name does not have: KFP 2.17
    forgets a OneOf that only conditions read."""
    ir = next(yaml.safe_load_all(text))
    components, lost = ir["components"], []
    for dag in (one["dag"]["tasks"] for one in [ir["root"], *components.values()] if "dag" in one):
        inputs = [
            i
            for task in dag.values()
            for i in task.get("inputs", {}).get("parameters", {}).values()
        ]
        for read_from in (i["taskOutputParameter"] for i in inputs if "taskOutputParameter" in i):
            made_by = components[dag[read_from["producerTask"]]["componentRef"]["name"]]
            key = read_from["outputParameterKey"]
            if key not in made_by.get("outputDefinitions", {}).get("parameters", {}):
                lost.append(f"{read_from['producerTask']}.{key}")
    return lost


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


def in_kfp_local(text: str, folder: Path) -> Any:
    """The pipeline's output, or what kfp.local says."""
    file = folder / "pipeline.yaml"
    file.write_text(text)
    command = [sys.executable, str(PIPELINES / "run_corpus.py"), str(folder), f"{file}={{}}"]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout.splitlines()[-1]).values()
    return answer


def taken_as_the_table_says(text: str, graph: Graph) -> set[str]:
    """The platforms that take the pipeline; each refuses the features that the table says, and no
    others."""
    features, taken = {use.feature for use in uses(graph)}, set()
    for platform in PLATFORMS:
        listed = {f for f in features if feature_rows()[f].on[platform].verdict == "refused"}
        try:
            on(platform, text, graph)
            refused = set()
            taken.add(platform)
        except UnsupportedError as error:
            refused = {feature_of(problem, platform) for problem in error.problems}
        assert refused == listed, platform
    return taken


def test_every_step_leaves_the_same_everywhere(
    seed: int, image: str, service: Pipelines, tmp_path: Path
) -> None:
    text = generated(seed, tmp_path, image)
    graph = read(text)
    taken = taken_as_the_table_says(text, graph)
    if "local" not in taken:
        assert seed not in (*PLAIN, *WITH_CONTAINERS)
        return
    record = run(graph, tmp_path / "home", {})
    assert record.status == "succeeded"
    here = unnamed(left_by(record))
    if "sagemaker" in taken:
        assert on_sagemaker(graph, service) == here
    if "azureml" in taken:
        assert on_azure(graph, service, tmp_path) == here
    if not image:
        theirs = in_kfp_local(text, tmp_path)
        ours = {name: plain(value) for name, value in outputs(graph, record).items()}
        assert theirs == ours or NOT_IN_KFP_LOCAL in theirs


def test_settings_and_importers_are_taken_or_refused_as_the_table_says(
    seed: int, tmp_path: Path
) -> None:
    text = generated(seed, tmp_path, TOOLS, on_kubernetes=True)
    graph = read(text)
    if "local" in taken_as_the_table_says(text, graph):
        assert run(graph, tmp_path / "home", {}).status == "succeeded"
