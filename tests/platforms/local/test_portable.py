"""Outputs with which a step fails on Kubeflow, and not here, are said when the step has ended."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rekindle.platforms.local.portable import sentences
from tests.platforms.local.runs import run
from tests.support.recorded import arguments_of, graph_of, needs_the_record, run_here


@pytest.mark.parametrize(
    ("value", "has"),
    [
        (float("nan"), "the number nan"),
        ({"a": [1.0, float("-inf")]}, "the number -inf"),
        ("a\x7fb", "the character U+007F"),
        ({"\x7f": 1}, "the character U+007F"),
        (json.loads('"\\ud800"'), "half of a pair of surrogates"),
    ],
)
def test_a_value_that_kfp_cannot_carry_is_named(value: Any, has: str) -> None:
    (sentence,) = sentences({"Output": value}, {})
    assert sentence == f"the output `Output` has {has}: the step fails with it on Kubeflow"


@pytest.mark.parametrize("value", ["a$$b", ["$$"], {"a": {"b": "$$$"}}, {"$$": 1}])
def test_a_value_with_two_dollar_signs_is_named(value: Any) -> None:
    (sentence,) = sentences({"Output": value}, {})
    assert sentence == "the output `Output` has `$$`: a step that reads it on Kubeflow gets `$`"


@pytest.mark.parametrize(
    "value", ["run {{workflow.name}}", ["{{ item }}"], {"{{=1}}": 1}, "{{tasks.a.outputs}}"]
)
def test_a_value_that_argo_fills_in_is_named(value: Any) -> None:
    (sentence,) = sentences({"Output": value}, {})
    assert "on Kubeflow Argo fills it in, or fails at it" in sentence


@pytest.mark.parametrize(
    "value",
    ["{{name}} {{$.x}}", "$5 for $6", 1.5, "x\x1b \U0001f389", None, True, [], {"a": {"b": "é"}}],
)
def test_what_kfp_carries_is_not(value: Any) -> None:
    assert list(sentences({"Output": value}, {})) == []


def test_an_artifact_in_another_store_is_named_and_what_is_no_store_is_not() -> None:
    uris = {"a": "s3://warehouse/table", "b": "projects/1/endpoints/2", "c": "/home/x"}
    (sentence,) = sentences({}, uris)
    assert sentence.startswith("the output `a` lies at s3://warehouse/table: the step fails")


def test_a_run_says_it_on_its_log_and_on_stderr(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        record = run("nan", tmp_path / "home", run_id="r")
    assert "not-a-number: the output `Output` has the number nan" in caplog.text
    log = Path(record.step("not-a-number").log).read_text()
    assert "--- the output `Output` has the number nan: the step fails" in log


@needs_the_record
@pytest.mark.slow
@pytest.mark.parametrize("name", ["b_nan", "b_odd", "v10_nan", "v8_outputs", "s1_uri"])
def test_what_kfp_failed_at_is_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = graph_of(name)
    assert pipeline is not None
    with caplog.at_level(logging.WARNING):
        run_here(pipeline, arguments_of(name, pipeline, tmp_path), tmp_path / "home")
    assert "the step fails with it on Kubeflow" in caplog.text
