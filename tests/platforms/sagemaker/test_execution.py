"""Definitions for SageMaker, executed against its container contract (tests/servers/aws/sagemaker.py): the
same parameters and artifacts as a run here."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.platforms.cache_diff import compare
from rekindle.platforms.sagemaker.client import cache_keys
from tests.platforms.local.runs import FLAT, module
from tests.platforms.sagemaker.conftest import Submit
from tests.quick import first
from tests.servers.aws.container import Failed
from tests.servers.aws.sagemaker import Pipelines
from tests.support.sagemaker_compile import compiled, named_result
from tests.support.sagemaker_execution import what_came_of_it, what_came_of_it_here
from tests.support.two_steps import pipeline as two_steps

SAME, BEHAVIOUR = module("same"), module("behaviour")


@pytest.mark.slow
@pytest.mark.parametrize("case", FLAT)
def test_every_step_leaves_what_it_leaves_here(
    case: str, service: Pipelines, submitted: Submit, tmp_path: Path
) -> None:
    pipeline, arguments, *_ = {**SAME.CASES, **SAME.KNOWN_BUGS}[case]
    execution = service.execute(submitted(pipeline, arguments))
    here = what_came_of_it_here(tmp_path / "home", pipeline, arguments)
    assert what_came_of_it(execution, service.s3) == here


@pytest.mark.parametrize("n", first(1, [3, 1]))
def test_a_condition_on_what_a_step_returned_decides(
    n: int, service: Pipelines, submitted: Submit, tmp_path: Path
) -> None:
    execution = service.execute(submitted(two_steps, {"n": n}))
    assert execution.conditions == {"if-condition-1": n > 1}
    assert len(execution.jobs) == (2 if n > 1 else 1)
    here = what_came_of_it_here(tmp_path / "home", two_steps, {"n": n})
    assert what_came_of_it(execution, service.s3) == here


def test_an_artifact_may_be_called_result(
    service: Pipelines, submitted: Submit, tmp_path: Path
) -> None:
    execution = service.execute(submitted(named_result, {"text": "é"}))
    assert execution.result("read", service.s3)["parameters"] == {"Output": "é"}


@pytest.mark.slow
def test_a_parameter_is_given_to_an_execution(service: Pipelines, submitted: Submit) -> None:
    definition = submitted(SAME.arithmetic, {"a": 3})
    usual, other = service.execute(definition), service.execute(definition, a=4)
    results = [what_came_of_it(execution, service.s3) for execution in (usual, other)]
    assert results[0] != results[1]
    again = service.execute(definition, a=4)
    assert what_came_of_it(again, service.s3) == results[1]
    assert all(job.cached for job in again.jobs.values())


def test_a_step_that_fails_says_why(service: Pipelines, submitted: Submit) -> None:
    definition = submitted(module("behaviour").failing, {"folder": "/tmp"})
    with pytest.raises(Failed, match="ValueError: no"):
        service.execute(definition)


def test_a_step_is_tried_again_in_its_container(
    service: Pipelines, submitted: Submit, tmp_path: Path
) -> None:
    definition = submitted(SAME.retried, {"folder": str(tmp_path)})
    execution = service.execute(definition)
    assert (tmp_path / "tries").read_text() == "xxx"
    (job,) = execution.jobs.values()
    assert "attempt 2 failed" in job.log


@pytest.mark.slow
def test_diff_names_exactly_the_steps_that_run_again(service: Pipelines, submitted: Submit) -> None:
    before, after = ({"n": n, "text": "a"} for n in (3, 4))
    service.execute(submitted(two_steps, before))
    again = service.execute(submitted(two_steps, after))
    ran = {name for name, job in again.jobs.items() if not job.cached}
    old, new = (cache_keys(compiled(two_steps, arguments).files) for arguments in (before, after))
    assert {verdict.step for verdict in compare(old, new) if verdict.again == "yes"} == ran
    assert len(ran) == 2
    pipeline, arguments = SAME.CASES["loop over nested pipelines"]
    service.execute(submitted(pipeline, arguments))
    unchanged = cache_keys(compiled(pipeline, arguments).files)
    assert all(job.cached for job in service.execute(submitted(pipeline, arguments)).jobs.values())
    assert {verdict.again for verdict in compare(unchanged, unchanged)} == {"no"}


@pytest.mark.parametrize("text", first(1, ["bad", "good"]))
def test_an_exit_handler_runs_however_it_ended_for_who_wants_to_try_it(
    text: str, service: Pipelines, submitted: Submit, tmp_path: Path
) -> None:
    definition = submitted(
        BEHAVIOUR.cleaned_up, {"folder": str(tmp_path), "text": text}, unproven=("exit_handlers",)
    )
    last = definition["Steps"][-1]
    assert last["Name"] == "count"
    assert last["DependsOn"][0]["Trigger"] == "Any"
    if text == "bad":
        with pytest.raises(Failed, match="ValueError"):
            service.execute(definition)
    else:
        service.execute(definition)
    assert (tmp_path / "cleaned").exists()
    assert (tmp_path / "second").exists() == (text == "good")


def test_a_condition_on_an_argument_that_nobody_gave_fails_its_step(
    service: Pipelines, submitted: Submit, tmp_path: Path
) -> None:
    definition = submitted(module("behaviour").undecidable, {"folder": str(tmp_path)})
    with pytest.raises(Failed, match="needs `word`, which has no value"):
        service.execute(definition)
