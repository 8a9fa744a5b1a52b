"""What is particular about schedules of SageMaker: each starts a pipeline of its own. Through boto3,
against moto's EventBridge Scheduler; tests/platforms/test_schedules.py has what is alike everywhere."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.errors import PlatformError, UnsupportedError
from rekindle.platforms.sagemaker import schedule
from rekindle.platforms.sagemaker.client import submit
from rekindle.platforms.sagemaker.schedule import lowered, schedule_id
from rekindle.spec.schedule import ScheduleSpec
from tests.platforms.marks import mark
from tests.servers.aws.rest import Account
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.sagemaker_client import PLACE, definition
from tests.support.sagemaker_client import account as account
from tests.support.sagemaker_schedules import scheduler as scheduler

MONDAYS = ScheduleSpec(cron="0 3 * * mon", timezone="Europe/Berlin")
LOWERED = {
    "0 3 * * mon": "cron(0 3 ? * MON *)",
    "0 3 * * 0": "cron(0 3 ? * SUN *)",
    "*/20 * * * *": "cron(0,20,40 * * * ? *)",
    "5/20 9-17/4 * * 1-5": "cron(5,25,45 9,13,17 ? * MON,TUE,WED,THU,FRI *)",
    "0 0 1,15 jan-mar *": "cron(0 0 1,15 1-3 ? *)",
    "0 6 * * */2": "cron(0 6 ? * SUN,TUE,THU,SAT *)",
}


@pytest.mark.parametrize("cron", LOWERED)
def test_a_line_of_cron_is_written_out(cron: str) -> None:
    assert lowered(ScheduleSpec(cron=cron), PLACE).expression == LOWERED[cron]


def test_a_line_that_aws_has_no_words_for_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="AWS takes either") as caught:
        lowered(ScheduleSpec(cron="0 3 1 * mon"), PLACE)
    assert caught.value.problems[0].where == "schedule.cron"


@pytest.mark.slow
def test_what_is_set_names_its_role_and_no_submission_changes_what_it_starts(
    account: Account, scheduler: Any
) -> None:
    schedule.set_schedule(definition(), PLACE, MONDAYS, "digits")
    kept = scheduler.get_schedule(Name="digits", GroupName="rekindle")
    assert kept["Target"]["Arn"].endswith(":pipeline/digits-scheduled")
    assert kept["Target"]["RoleArn"] == PLACE.role_arn
    assert kept["ScheduleExpressionTimezone"] == "Europe/Berlin"
    (versions,) = account.pipelines.values()
    schedule.set_schedule(definition(), PLACE, MONDAYS, "digits")
    submit(definition(4), PLACE, mark("a"))
    assert len(versions) == 1
    schedule.set_schedule(definition(4), PLACE, MONDAYS, "digits")
    assert len(versions) == 2, "what it starts is the newest"


@pytest.mark.slow
def test_its_pipeline_goes_with_a_schedule_unless_it_has_runs(
    account: Account, scheduler: Any
) -> None:
    schedule.set_schedule(definition(), PLACE, MONDAYS, "digits")
    assert schedule.delete_schedule(PLACE, "digits")
    assert account.pipelines == {}
    schedule.set_schedule(definition(), PLACE, MONDAYS, "digits")
    started = account.start("digits-scheduled", "t" * 32, 1, "due", "by its schedule")
    assert schedule.delete_schedule(PLACE, "digits")
    assert list(account.pipelines) == ["digits-scheduled"], "the history of its runs"
    assert account.runs[started["PipelineExecutionArn"]].status == "Executing"


@pytest.mark.slow
def test_a_pipeline_that_was_left_without_its_schedule_goes_too(
    account: Account, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_SCHEDULER", "http://127.0.0.1:9")  # nobody answers there
        with pytest.raises(PlatformError):
            schedule.set_schedule(definition(), PLACE, MONDAYS, "digits")
    assert list(account.pipelines) == ["digits-scheduled"]
    assert schedule.delete_schedule(PLACE, "digits") is False
    assert account.pipelines == {}


def test_names_that_differ_stay_different() -> None:
    assert schedule_id("digits") == "digits"
    assert len({schedule_id(name) for name in ("a b", "a-b", "a_b", "a" * 70, "a" * 71)}) == 5
    assert len({schedule.pipeline_of(name) for name in ("a b", "a-b", "a_b", "a.b")}) == 4
