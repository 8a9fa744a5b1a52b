"""Pipelines that people bring: what older tools wrote, and what KFP's compiler loses, is named with
what to do."""

import json
from pathlib import Path
from typing import Optional

import pytest
from kfp import dsl

from rekindle.errors import RequestError, SpecError, UnsupportedError
from rekindle.ir.compile import compile_function, compile_pipeline
from rekindle.ir.features import uses
from rekindle.ir.read.pipeline import read
from rekindle.platforms.feature_checks import admit
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.spec.load import load_target

component = dsl.component(base_image="python:3.11", install_kfp_package=False)


@component
def text(v: str) -> str:
    return v


@dsl.pipeline(name="given")
def given(v: str, n: int = 3):
    text(v=f"{v} {n}")


@dsl.pipeline(name="items")
def of_items(rows: list = [{"n": 1}]):  # noqa: B006
    with dsl.ParallelFor(rows) as row:
        text(v=f"model-{row.n}")


@dsl.container_component
def shows(name: str = "", more: str = None):  # noqa: RUF013
    return dsl.ContainerSpec(image="python:3.11", command=["echo"], args=[name, more])


@dsl.pipeline(name="absent")
def absent():
    shows(name="a")


@dsl.container_component
def told(v: str):
    escape = "{{$.inputs.parameters['v'].json_escape[0]}}"
    return dsl.ContainerSpec(image="python:3.11", command=["echo"], args=[escape, v])


@dsl.pipeline(name="escaped")
def escaped(v: str = "a"):
    told(v=v)


@dsl.pipeline(name="times")
def times():
    text(v=dsl.PIPELINE_JOB_CREATE_TIME_UTC_PLACEHOLDER)
    text(v=f"{dsl.PIPELINE_TASK_NAME_PLACEHOLDER}!")


def test_a_pipeline_job_is_read_with_its_parameters(tmp_path: Path) -> None:
    from google.protobuf.json_format import MessageToDict

    spec = MessageToDict(given.pipeline_spec)
    job = {"displayName": "x", "pipelineSpec": spec}
    job["runtimeConfig"] = {"gcsOutputDirectory": "gs://b", "parameterValues": {"v": "a", "n": 4}}
    file = tmp_path / "job.json"
    file.write_text(json.dumps(job))
    ir_text = compile_pipeline(str(file))
    graph = read(ir_text)
    assert {name: p.default for name, p in graph.inputs.parameters.items()} == {"v": "a", "n": 4}
    definition = compile(ir_text, graph, {}, KubeflowSpec())
    assert read(definition.text.decode()).dag == graph.dag


def test_a_workflow_of_argo_is_named(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("apiVersion: argoproj.io/v1alpha1\nkind: Workflow\nspec: {}\n")
    with pytest.raises(SpecError, match="is a Workflow of Argo, which KFP 1 compiles") as refused:
        load_target(file)
    assert "kfp 2.x" in refused.value.problems[0].fix


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("dsl.ContainerOp(name='a', image='b')", "this is a pipeline of KFP 1"),
        ("import no_such_module", "install it here: pip install no-such-module"),
    ],
)
def test_what_others_files_need_is_said(source: str, fix: str, tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(f"from kfp import dsl\n\n\n@dsl.pipeline(name='p')\ndef p():\n    {source}\n")
    with pytest.raises(RequestError) as refused:
        compile_pipeline(f"{file}:p")
    assert fix in refused.value.problems[0].fix


def test_an_f_string_with_an_item_in_it_is_named() -> None:
    with pytest.raises(
        RequestError, match="an f-string holds `n` of an item of the loop over"
    ) as e:
        read(compile_function(of_items))
    assert e.value.problems[0].fix == "give the item to the component, and join the text there"


@pytest.mark.parametrize("platform", ["local", "kubeflow", "sagemaker", "azureml"])
def test_an_argument_without_a_value_is_refused_when_it_is_compiled(platform: str) -> None:
    graph = read(compile_function(absent))
    with pytest.raises(UnsupportedError, match="an optional input without a value in an argument"):
        admit(graph, platform, arguments={})


def test_escapes_of_inputs_are_a_placeholder_of_vertex() -> None:
    graph = read(compile_function(escaped))
    assert "vertex_facts" in {use.feature for use in uses(graph)}
    admit(graph, "vertex", arguments={})
    with pytest.raises(UnsupportedError, match="placeholders that only Vertex AI fills in"):
        admit(graph, "kubeflow", arguments={})


@pytest.mark.parametrize("platform", ["sagemaker", "azureml"])
def test_times_of_a_run_are_refused_where_jobs_know_none(platform: str) -> None:
    graph = read(compile_function(times))
    with pytest.raises(UnsupportedError, match="the time of the run") as refused:
        admit(graph, platform, arguments={})
    assert len(refused.value.problems) == 1
    admit(graph, "local", arguments={})


@dsl.pipeline(name="needs")
def needs(v: Optional[str] = None, go: bool = False):  # noqa: UP045 - KFP reads no other
    text(v=v)
    with dsl.If(go == True):  # noqa: E712 - a condition of KFP
        text(v=v)


@pytest.mark.parametrize("platform", ["local", "kubeflow", "vertex", "sagemaker", "azureml"])
def test_a_component_that_needs_a_value_is_not_called_without_one(platform: str) -> None:
    graph = read(compile_function(needs))
    with pytest.raises(UnsupportedError, match="where a component needs one") as refused:
        admit(graph, platform, arguments={})
    places = [p.where for p in refused.value.problems if "needs one" in p.what]
    assert places == ["root.dag.tasks.text.inputs.parameters.v"], "the branch may not be taken"
    if platform in ("local", "kubeflow", "vertex"):
        admit(graph, platform, arguments={"v": "a"})
