"""The definition for Kubeflow: KFP's own YAML, with the run's arguments and our image in it."""

from pathlib import Path

import pytest
import yaml
from kfp import components, dsl

from rekindle.errors import RequestError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.section import KubeflowSpec


@dsl.component(base_image="rekindle/train:0.1.0", install_kfp_package=False)
def ours(n: int, items: list) -> int:
    return n


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def theirs(n: int, text: str):
    print(n)


@dsl.pipeline(name="two-steps")
def pipeline(n: int, text: str = "a", items: list = [1], note: str = None):  # noqa: B006, RUF013
    theirs(n=ours(n=n, items=items).output, text=text)


TEXT = compile_function(pipeline)


def definition(arguments: dict[str, object], image: str | None = None) -> str:
    files = compile(TEXT, read(TEXT), arguments, KubeflowSpec(image=image)).files
    assert list(files) == ["two-steps.yaml"]
    return files["two-steps.yaml"].decode()


def test_arguments_become_defaults_and_kfp_loads_it(tmp_path: Path) -> None:
    text = definition({"n": 3, "items": (1, 2), "text": "line\nbreak: é"})
    component = components.load_component_from_text(text)
    inputs = component.component_spec.inputs
    assert {name: spec.default for name, spec in inputs.items()} == {
        "n": 3,
        "text": "line\nbreak: é",
        "items": [1, 2],
        "note": None,
    }
    again = read(text)
    assert again.inputs.parameters["n"].default == 3
    assert again.dag == read(TEXT).dag


def test_only_our_own_images_are_replaced() -> None:
    spec = yaml.safe_load(definition({"n": 1}, image="example.com/mine@sha256:0"))
    executors = spec["deploymentSpec"]["executors"]
    assert {name: e["container"]["image"] for name, e in executors.items()} == {
        "exec-ours": "example.com/mine@sha256:0",
        "exec-theirs": "python:3.11",
    }


def test_the_same_input_gives_the_same_bytes() -> None:
    assert definition({"n": 1}, "x/y") == definition({"n": 1}, "x/y")


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        definition({"n": "x", "txt": "y"})
    assert {problem.where for problem in caught.value.problems} == {"n", "txt"}


def retried(factor: float) -> str:
    @dsl.pipeline(name="retried")
    def pipeline():
        ours(n=1, items=[1]).set_retry(2, backoff_duration="10s", backoff_factor=factor)

    return compile_function(pipeline)


def test_retries_that_argo_cannot_count_are_refused() -> None:
    text = retried(2.0)
    assert compile(text, read(text), {}, KubeflowSpec()).files
    text = retried(1.5)
    with pytest.raises(RequestError) as caught:
        compile(text, read(text), {}, KubeflowSpec())
    (problem,) = caught.value.problems
    assert "grows its pauses by 1.5" in problem.what
    assert problem.where == "ours"
