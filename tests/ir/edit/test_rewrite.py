"""Launchers in place of distributed steps: their tasks are not cached, nothing else changes."""

from typing import Any

import pytest
import yaml
from kfp import dsl, kubernetes

import rekindle
from rekindle.ir.compile import compile_function
from rekindle.ir.edit.rewrite import asked_of, rewritten, with_launchers, with_retries
from rekindle.ir.graph import Step
from rekindle.ir.read.pipeline import read


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def alone(n: int) -> int:
    return n


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def together(n: int) -> int:
    return n


@dsl.pipeline(name="inner")
def inner(n: int):
    rekindle.distribute(together(n=n).set_gpu_limit(8).set_cpu_limit("4"), nodes=3)


@dsl.pipeline(name="outer")
def outer(n: int = 1):
    inner(n=alone(n=n).output)


@dsl.pipeline(name="outer")
def outer_with_settings(n: int = 1):
    inner(n=kubernetes.set_timeout(alone(n=n), 60).output)


def lowered(step: Step) -> dict[str, Any]:
    assert step.distribution is not None
    return {"image": "launcher", "args": [step.name, str(step.distribution.nodes)]}


@pytest.mark.parametrize(("pipeline", "documents"), [(outer, 0), (outer_with_settings, 1)])
def test_a_launcher_stands_where_a_distributed_step_was(pipeline, documents) -> None:
    text = compile_function(pipeline)
    before = rewritten(text, {}, None)
    spec, settings = with_launchers(*before, read(text), lowered)
    executors = spec["deploymentSpec"]["executors"]
    assert executors["exec-together"] == {"container": lowered(_together(text))}
    assert executors["exec-alone"] == before[0]["deploymentSpec"]["executors"]["exec-alone"]
    assert spec["components"]["comp-inner"]["dag"]["tasks"]["together"]["cachingOptions"] == {}
    assert spec["root"]["dag"]["tasks"]["alone"]["cachingOptions"] == {"enableCache": True}
    assert len(settings) == documents
    assert "rekindle" not in yaml.safe_dump(settings)
    assert before == rewritten(text, {}, None), "the arguments are left alone"
    again = read(yaml.safe_dump_all([spec, *settings]))
    assert [step.distribution for step in again.steps()] == [None, None]


def _together(text: str) -> Step:
    return next(step for step in read(text).steps() if step.name == "together")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"maxRetryCount": 3, "backoffDuration": "9s", "backoffMaxDuration": "5s"}),
        (
            {"maxRetryCount": 4.0, "backoffDuration": "1s", "backoffMaxDuration": "1s"},
            {"maxRetryCount": 7, "backoffDuration": "1s", "backoffMaxDuration": "5s"},
        ),
    ],
)
def test_a_launcher_is_retried_as_the_author_says_and_as_it_needs(own, expected) -> None:
    spec, _ = rewritten(compile_function(outer), {}, None)
    task = spec["components"]["comp-inner"]["dag"]["tasks"]["together"]
    task["retryPolicy"] = own
    made = with_retries(
        spec,
        {"exec-together"},
        lambda count: count + 3,
        {"backoffDuration": "9s"},
        {"backoffMaxDuration": "5s"},
    )
    assert made["components"]["comp-inner"]["dag"]["tasks"]["together"]["retryPolicy"] == expected
    assert "retryPolicy" not in made["root"]["dag"]["tasks"]["alone"]
    assert task["retryPolicy"] == own, "the argument is left alone"


BROKEN = {
    "a component that is null": {"components": {"c": None}},
    "a list of tasks": {"components": {"c": {"dag": {"tasks": []}}}},
    "a task that is none": {"components": {"c": {"dag": {"tasks": {"t": "x"}}}}},
    "a task that is no component": {"components": {"c": {"dag": {"tasks": {"t": {}}}}}},
    "an output without a type": {
        "components": {"c": {"outputDefinitions": {"artifacts": {"a": []}}}}
    },
    "an executor that is null": {"deploymentSpec": {"executors": {"e": None}}},
    "an image that is no text": {
        "deploymentSpec": {"executors": {"e": {"container": {"image": 3}}}}
    },
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_nothing_refers_to_is_left_out_since_a_platform_parses_it(case: str) -> None:
    spec = yaml.safe_load(compile_function(outer).split("\n---")[0])
    for key, value in BROKEN[case].items():
        for kind, more in value.items():
            spec[key][kind] = {**spec[key][kind], **more} if key == "deploymentSpec" else more
    text = yaml.safe_dump(spec)
    read(text)  # which follows references, and so does not see it
    assert rewritten(text, {}, None)[0] == rewritten(compile_function(outer), {}, None)[0]


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({}, ""),
        ({"resourceCpuLimit": "4", "resourceMemoryLimit": "16G"}, "4 CPUs, 16G"),
        ({"accelerator": {"resourceType": "NVIDIA_L4", "resourceCount": "2"}}, "2 x NVIDIA_L4"),
        # as older versions of KFP compiled it
        (
            {
                "accelerator": {"type": "NVIDIA_L4", "count": "2"},
                "cpuLimit": 4.0,
                "memoryLimit": 16.0,
            },
            "2 x NVIDIA_L4, 4 CPUs, 16G",
        ),
    ],
)
def test_what_a_container_asks_for_in_words(resources, words):
    assert asked_of({"resources": resources}) == words
