"""Executions in an account: boto3 itself, over HTTP, against a strict one that is played here, with
S3 as moto has it."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import pytest

from rekindle.errors import PlatformError, SpecError
from rekindle.outputs import PlannedStep
from rekindle.platforms.sagemaker import client
from rekindle.platforms.sagemaker.client import run_name, submit
from rekindle.platforms.sagemaker.platform import SageMaker
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Definition
from tests.platforms.local.runs import module
from tests.platforms.marks import mark
from tests.quick import only
from tests.servers.aws.rest import REGION, Account
from tests.servers.troubles import Fault
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.sagemaker_client import PLACE, definition
from tests.support.sagemaker_client import account as account
from tests.support.sagemaker_compile import compiled


def test_an_execution_is_there_with_all_that_it_needs_and_once_for_one_submission(
    account: Account, s3: Any
) -> None:
    made = definition()
    placed = submit(made, PLACE, mark("a"))
    assert placed.anew
    run = account.runs[placed.id]
    assert run.name == run_name(made, "a")
    assert REGION in placed.url
    (version,) = account.pipelines[run.pipeline]
    assert version["PipelineDefinition"].encode() == made.files[f"{run.pipeline}.sagemaker.json"]
    for name, content in made.files.items():
        if name.startswith("bundles/"):
            got = s3.get_object(Bucket="lake", Key=f"rekindle/{name}")["Body"].read()
            assert got == content
    again = submit(made, PLACE, mark("a"))
    assert (again.id, again.anew) == (placed.id, False)
    assert account.calls["StartPipelineExecution"] == len(account.runs) == 1
    submit(made, PLACE, mark("b"))
    assert len(account.pipelines[run.pipeline]) == 1, "the same definition is the same version"
    other = submit(definition(4), PLACE, mark("a"))
    assert len(account.runs) == 3
    assert account.runs[other.id].version == 2
    assert [line for line in account.refused if "there is no pipeline" not in line] == []


@pytest.mark.slow
def test_what_is_run_is_the_version_with_the_definition_whatever_others_publish(
    account: Account,
) -> None:
    submit(definition(3), PLACE, mark("a"))
    submit(definition(4), PLACE, mark("a"))
    back = submit(definition(3), PLACE, mark("b"))
    assert account.runs[back.id].version == 3
    (name,) = account.pipelines
    published = json.loads(account.pipelines[name][2]["PipelineDefinition"])
    assert published["Parameters"][0]["DefaultValue"] == 3


# one that is turned away, two whose answer is lost
QUICK = {"too many calls", "an answer that is lost", "a pipeline whose answer is lost"}
FAULTS: dict[str, list[Fault]] = {
    "too many calls": [Fault("StartPipelineExecution", 400, "ThrottlingException")] * 2,
    "a service that is away for a while": [Fault("CreatePipeline", 503) for _ in range(3)],
    "connections that break": [Fault("ListPipelineExecutions", 0), Fault("DescribePipeline", 0)],
    "a pipeline whose answer is lost": [Fault("CreatePipeline", 0, after=True)],
    "an answer that is lost": [Fault("StartPipelineExecution", 0, after=True)],
    "answers that are always lost": [
        Fault("StartPipelineExecution", 0, after=True) for _ in range(4)
    ],
    "a gateway that gave up too early": [Fault("StartPipelineExecution", 504, after=True)],
}


@pytest.mark.parametrize("case", only(QUICK, FAULTS))
def test_whatever_befalls_a_submission_is_one_execution(case: str, account: Account) -> None:
    account.faults = list(FAULTS[case])
    placed = submit(definition(), PLACE, mark("a"))
    assert account.faults == []
    assert list(account.runs) == [placed.id]


@pytest.mark.slow
def test_a_submission_that_was_given_up_is_found_by_the_next(account: Account) -> None:
    account.faults = [Fault("StartPipelineExecution", 500, after=True) for _ in range(5)]
    with pytest.raises(PlatformError, match="retry the command"):
        submit(definition(), PLACE, mark("a"))
    account.tokens.clear()  # the service remembers them for some hours
    placed = submit(definition(), PLACE, mark("a"))
    assert (list(account.runs), placed.anew) == ([placed.id], False)


@pytest.mark.slow
def test_two_that_submit_the_same_at_once_make_one_execution(account: Account) -> None:
    made = definition()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: submit(made, PLACE, mark("a")).id, range(2)))
    assert both == list(account.runs) * 2


REFUSALS: dict[str, tuple[Fault, str]] = {
    "no permission": (
        Fault("StartPipelineExecution", 400, "AccessDeniedException"),
        "rekindle doctor",
    ),
    "a token that expired": (
        Fault("ListPipelineExecutions", 400, "ExpiredTokenException"),
        "aws sso",
    ),
    "a quota": (Fault("CreatePipeline", 400, "ResourceLimitExceeded"), "Service Quotas"),
    "something the service does not like": (
        Fault("StartPipelineExecution", 400, "ValidationException"),
        "bug in rekindle",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_helped_is_said_with_a_way_out(case: str, account: Account) -> None:
    fault, says = REFUSALS[case]
    account.faults = [fault]
    with pytest.raises(PlatformError, match=says) as caught:
        submit(definition(), PLACE, mark("a"))
    assert caught.value.problems[0].where == f"account 123456789012 in {PLACE.region}"
    assert account.runs == {}


def test_a_bucket_that_there_is_not_is_named(account: Account) -> None:
    elsewhere = PLACE.model_copy(update={"artifact_root": "s3://nobodys-bucket/x"})
    with pytest.raises(PlatformError, match=r"make the bucket of platforms\.sagemaker"):
        submit(definition(), elsewhere, mark("a"))
    with pytest.raises(SpecError, match=r"set platforms\.sagemaker\.role_arn: arn:aws:iam"):
        submit(definition(), SageMakerSpec(), mark("a"))
    assert account.pipelines == {}


def test_without_a_login_the_way_to_one_is_said(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nowhere")
    with pytest.raises(PlatformError, match="aws sso login"):
        submit(definition(), PLACE, mark("a"))


def test_what_will_be_made_is_said_before() -> None:
    made = compiled(module("behaviour").gathered, {"folder": "x"})
    planned = SageMaker(PLACE).preview(made, "a")
    assert planned.id == run_name(made, "a")
    assert planned.steps[0] == PlannedStep("gather", "ml.m5.xlarge", 3)
    long = Definition({f"{'x' * 200}.sagemaker.json": b"{}"})
    assert len(client.run_name(long, "a")) <= 82
