"""Schedules of an account: lowered, set, listed, paused and taken away through boto3, against moto's
EventBridge Scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.errors import PlatformError, UnsupportedError
from rekindle.platforms.sagemaker import schedule
from rekindle.platforms.sagemaker.schedule import lowered, schedule_id
from rekindle.platforms.submission import Schedule
from rekindle.spec.schedule import ScheduleSpec
from tests.platforms.sagemaker.conftest import KEYS
from tests.platforms.sagemaker.conftest import aws as aws
from tests.platforms.sagemaker.conftest import s3 as s3
from tests.platforms.sagemaker.test_client import PLACE, definition
from tests.platforms.sagemaker.test_client import account as account
from tests.servers.sagemaker_rest import REGION, Account

MONDAYS = ScheduleSpec(cron="0 3 * * mon", timezone="Europe/Berlin")
LOWERED = {
    "0 3 * * mon": "cron(0 3 ? * MON *)",
    "0 3 * * 0": "cron(0 3 ? * SUN *)",
    "*/20 * * * *": "cron(0,20,40 * * * ? *)",
    "5/20 9-17/4 * * 1-5": "cron(5,25,45 9,13,17 ? * MON,TUE,WED,THU,FRI *)",
    "0 0 1,15 jan-mar *": "cron(0 0 1,15 1,2,3 ? *)",
    "0 6 * * */2": "cron(0 6 ? * SUN,TUE,THU,SAT *)",
}


@pytest.fixture
def scheduler(account: Account, aws: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scheduler that this process finds, with nothing in it."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL_SCHEDULER", aws)
    client = boto3.client("scheduler", endpoint_url=aws, **{**KEYS, "region_name": REGION})
    for group in client.list_schedule_groups()["ScheduleGroups"]:
        if group["Name"] != "default":
            client.delete_schedule_group(Name=group["Name"])
    return client


@pytest.mark.parametrize("cron", LOWERED)
def test_a_line_of_cron_is_written_out(cron: str) -> None:
    assert lowered(ScheduleSpec(cron=cron)) == LOWERED[cron]


def test_a_line_that_aws_has_no_words_for_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="AWS takes either") as caught:
        lowered(ScheduleSpec(cron="0 3 1 * mon"))
    assert caught.value.problems[0].where == "schedule.cron"


def test_the_same_schedule_set_twice_is_one_and_another_takes_its_place(
    account: Account, scheduler: Any
) -> None:
    expected = Schedule("digits", "0 3 * * mon", "Europe/Berlin", enabled=True)
    assert schedule.list_(PLACE) == ()
    assert schedule.set_(definition(), PLACE, MONDAYS, "digits") == expected
    assert schedule.set_(definition(), PLACE, MONDAYS, "digits") == expected
    ((name, versions),) = account.pipelines.items()
    assert (name, len(versions)) == ("two-steps-scheduled", 1)
    hourly = ScheduleSpec(cron="0 * * * *")
    changed = schedule.set_(definition(4), PLACE, hourly, "digits")
    assert schedule.list_(PLACE) == (changed,)
    assert len(versions) == 2, "what it starts is the newest"
    kept = scheduler.get_schedule(Name="digits", GroupName="rekindle")
    assert kept["ScheduleExpression"] == "cron(0 * * * ? *)"
    assert kept["Target"]["Arn"].endswith(":pipeline/two-steps-scheduled")
    assert kept["Target"]["RoleArn"] == PLACE.role_arn
    assert account.runs == {}, "setting a schedule starts nothing"
    schedule.set_(definition(), PLACE, MONDAYS, "letters")
    assert [one.id for one in schedule.list_(PLACE)] == ["digits", "letters"]


def test_a_schedule_pauses_goes_on_and_goes_away_as_often_as_one_says_so(
    account: Account, scheduler: Any
) -> None:
    schedule.set_(definition(), PLACE, MONDAYS, "digits")
    for _ in range(2):
        assert schedule.pause(PLACE, "digits").enabled is False
    assert schedule.list_(PLACE)[0].enabled is False
    assert schedule.set_(definition(), PLACE, MONDAYS, "digits").enabled is True
    assert [schedule.delete(PLACE, "digits") for _ in range(2)] == [True, False]
    assert schedule.list_(PLACE) == ()
    with pytest.raises(PlatformError, match="see what there is"):
        schedule.pause(PLACE, "digits")


def test_names_that_differ_stay_different() -> None:
    assert schedule_id("digits") == "digits"
    assert len({schedule_id(name) for name in ("a b", "a-b", "a_b", "a" * 70, "a" * 71)}) == 5
