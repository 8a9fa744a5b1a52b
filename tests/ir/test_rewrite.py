"""Launchers in place of distributed steps: their tasks are not cached, nothing else changes."""

from typing import Any

import pytest
import yaml
from kfp import dsl, kubernetes

import rekindle
from rekindle.ir.compile import compile_function
from rekindle.ir.graph import Step
from rekindle.ir.read import read
from rekindle.ir.rewrite import rewritten, with_launchers


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
