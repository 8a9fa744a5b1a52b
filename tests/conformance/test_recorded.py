"""What a real KFP gave, value by value, kinds included: a run here, SageMaker and Azure ML give the same.

`recorded_values.json` is the core of what was recorded; the whole table, with pipelines that people
brought, lies beside the checkout. What differs on purpose is listed with its reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import RequestError, UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.flatten import flatten
from rekindle.ir.graph import Graph, Step
from rekindle.ir.read.pipeline import read
from rekindle.ir.values import bind
from rekindle.platforms.azureml.compile import compile as for_azure
from rekindle.platforms.azureml.compile import identifiers
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.sagemaker.compile import compile as for_sagemaker
from rekindle.platforms.sagemaker.jobs import names_of
from rekindle.platforms.sagemaker.section import SageMakerSpec
from tests.platforms.local.runs import module
from tests.platforms.sagemaker.conftest import PLACE, stored
from tests.platforms.sagemaker.conftest import service as service
from tests.quick import only
from tests.servers.aws.container import Failed
from tests.servers.aws.sagemaker import Execution, Pipelines
from tests.servers.azure.jobs import Failed as FailedOnAzure
from tests.servers.azure.jobs import Workspace
from tests.support.azureml_compile import IMAGE as ACR
from tests.support.azureml_compile import stored as stored_for_azure
from tests.support.azureml_compile import what_came_of_it as left_on_azure
from tests.support.moto import aws as aws
from tests.support.moto import can_mount
from tests.support.moto import s3 as s3
from tests.support.recorded import (
    CORE,
    EXCEPTIONS,
    NO_MORE,
    REFUSED,
    WITHOUT_SOURCE,
    arguments_of,
    differences,
    left_here,
    needs_the_record,
    recorded,
    run_here,
    source_of,
)
from tests.support.sagemaker_compile import IMAGE as ECR
from tests.support.sagemaker_execution import what_came_of_it as left_on_sagemaker

# of the core, what loops over what a step gives, which no flat platform takes
OVER_OUTPUTS = {"fields_of_a_step_into_kinds", "items_of_many_kinds", "loop_parameter"}
# of the core, what has an argument that can be refused before anything is sent
WRONG = {"wrong_kinds", "flags"}
FLAT = [name for name in CORE if name not in OVER_OUTPUTS | WRONG]
QUICK_HERE = {"fields_into_texts", "wrong_kinds", "numbers", "arguments_of_containers"}
QUICK_THERE = {"conditions_on_items"}


def core(name: str, image: str = "python:3.11") -> Graph:
    """A pipeline of typed.py whose images are where a platform pulls from."""
    text = compile_function(getattr(module("typed"), name))
    return read(re.sub(r"(?m)^( +image: ).*$", rf"\g<1>{image}", text))


@pytest.mark.parametrize("name", only(QUICK_HERE, CORE))
def test_a_run_here_gives_what_kfp_gave(name: str, tmp_path: Path) -> None:
    record = run_here(core(name), {}, tmp_path / "home")
    assert differences(CORE[name], left_here(record)) == []


def test_a_wrong_kind_fails_its_step_with_its_place_and_exit_code_1(tmp_path: Path) -> None:
    graph = core("flags")
    record = run_here(graph, {}, tmp_path / "home")
    turn = record.step("for-loop-1/0/deploy")
    assert turn.status == "failed"
    assert turn.error == (
        "the input `dry_run` of `for-loop-1/0/deploy`: 'false' is not true or false"
    )
    assert record.error is not None
    where = "components.comp-for-loop-1.dag.tasks.deploy.inputs.parameters.dry_run"
    assert where in record.error


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_kind_that_is_known_is_refused_before_anything_is_sent(name: str) -> None:
    for compiled in (
        lambda: for_sagemaker("", core(name, ECR), {}, SageMakerSpec(**PLACE)),
        lambda: for_azure("", core(name, ACR), {}, AzureMLSpec(image=ACR)),
    ):
        with pytest.raises(UnsupportedError, match=r"is not (a whole number|true or false)"):
            compiled()


def on_sagemaker(graph: Graph, arguments: dict[str, Any], service: Pipelines) -> dict[str, Any]:
    """State and outputs by task of an execution that may fail."""
    made = for_sagemaker("", graph, arguments, SageMakerSpec(**PLACE))
    execution = Execution()
    failed = False
    try:
        service.execute(stored(service, made.files), execution)
    except Failed:
        failed = True
    paths = [flat.path for flat in flatten(graph, bind(graph, arguments))]
    names = names_of([*paths, *(f"{path}/result/" for path in paths)])
    return _tasks(left_on_sagemaker(execution, service.s3), paths, names, failed)


def on_azure(
    graph: Graph, arguments: dict[str, Any], folder: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """State and outputs by task of a job; a failure of it is raised."""
    made = for_azure("", graph, arguments, AzureMLSpec(image=ACR))
    (folder / "runs").mkdir()
    done = Workspace(folder / "runs", environment).run(stored_for_azure(made, folder))
    paths = [flat.path for flat in flatten(graph, bind(graph, arguments))]
    return _tasks(left_on_azure(done), paths, identifiers(dict.fromkeys(paths)), failed=False)


def _tasks(
    left: dict[str, Any], paths: list[str], names: dict[str, str], failed: bool
) -> dict[str, Any]:
    """In the record's form; where the whole failed, what left nothing is not compared."""
    tasks: dict[str, Any] = {}
    for path in paths:
        if names[path] in left:
            tasks[path] = {"state": "succeeded", "outputs": left[names[path]][0]}
        elif not failed:
            tasks[path] = {"state": "not run", "outputs": {}}
    return tasks


@pytest.mark.parametrize("name", only(QUICK_THERE, FLAT))
def test_sagemaker_gives_what_kfp_gave(name: str, service: Pipelines) -> None:
    tasks = on_sagemaker(core(name, ECR), {}, service)
    assert tasks.keys() >= {t for t, row in CORE[name].items() if row["state"] == "succeeded"}
    assert differences(CORE[name], tasks) == []


@pytest.fixture
def environment(service: Pipelines) -> dict[str, str]:
    if not can_mount():
        pytest.skip("this machine lets us mount nothing")
    return dict(service.environment)


@pytest.mark.parametrize("name", only(QUICK_THERE, FLAT))
def test_azure_gives_what_kfp_gave(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    tasks = on_azure(core(name, ACR), {}, tmp_path, environment)
    assert tasks.keys() >= {t for t, row in CORE[name].items() if row["state"] == "succeeded"}
    assert differences(CORE[name], tasks) == []


URIS = {
    "show": "projects/1/locations/eu/endpoints/2 s3://warehouse/table 5",
    "look": "beside",
    "look-beside": "abc ABC True",
}


def test_an_artifact_keeps_the_uri_that_its_component_gives(tmp_path: Path) -> None:
    record = run_here(core("uris"), {}, tmp_path / "home")
    assert {name: record.step(name).parameters["Output"] for name in URIS} == URIS


def test_an_artifact_keeps_its_uri_on_sagemaker(service: Pipelines) -> None:
    tasks = on_sagemaker(core("uris", ECR), {}, service)
    assert {name: tasks[name]["outputs"]["Output"] for name in URIS} == URIS


@pytest.mark.slow
def test_an_artifact_keeps_its_uri_on_azure(environment: dict[str, str], tmp_path: Path) -> None:
    tasks = on_azure(core("uris", ACR), {}, tmp_path, environment)
    assert {name: tasks[name]["outputs"]["Output"] for name in URIS} == URIS


# the whole table ---------------------------------------------------------------------------------

KNOWN = [name for name in recorded() if not WITHOUT_SOURCE.fullmatch(name)]
QUICK_RECORDED = {"v11_none", "s4_flag"}


@needs_the_record
@pytest.mark.parametrize("name", only(QUICK_RECORDED, KNOWN))
def test_what_was_recorded_comes_here_too(name: str, tmp_path: Path) -> None:
    text = source_of(name)
    assert text is not None, "its source is not among the inputs"
    if name in REFUSED:
        with pytest.raises(RequestError):
            run_here(read(text), {}, tmp_path / "home")
        return
    (tmp_path / "folder").mkdir()
    graph = read(text)
    record = run_here(graph, arguments_of(name, graph, tmp_path / "folder"), tmp_path / "home")
    found = differences(recorded()[name], left_here(record))
    if name in EXCEPTIONS:
        assert found or NO_MORE in EXCEPTIONS[name] or recorded()[name][""]["state"] != "SUCCEEDED"
    else:
        assert found == []


@needs_the_record
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KNOWN if name not in {*EXCEPTIONS, *REFUSED}])
def test_what_was_recorded_comes_on_sagemaker_and_azure_too(
    name: str, service: Pipelines, environment: dict[str, str], tmp_path: Path
) -> None:
    """Or it is refused there, for what the table of features says."""
    text = source_of(name)
    assert text is not None, "its source is not among the inputs"
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").mkdir()
    images = (rf"\g<1>{image}" for image in (ECR, ACR))
    ecr, acr = (read(re.sub(r"(?m)^( +image: ).*$", image, text)) for image in images)
    given = arguments_of(name, ecr, tmp_path / "folder")
    expected = recorded()[name]
    if expected[""]["state"] == "REFUSED" or not any(isinstance(s, Step) for s in ecr.nodes()):
        pytest.skip("KFP does not take it either")
    try:
        tasks = on_sagemaker(ecr, given, service)
    except RequestError as error:
        tasks = {}
        refused = error
    else:
        refused = None
        assert differences(expected, tasks) == []
    given = arguments_of(name, acr, tmp_path / "other")
    try:
        tasks = on_azure(acr, given, tmp_path, environment)
    except RequestError:
        assert refused is not None or expected[""]["state"] != "SUCCEEDED"
    except FailedOnAzure:
        assert expected[""]["state"] == "FAILED"
    else:
        assert differences(expected, tasks) == []
