"""Schedules of a workspace: lowered, set, listed, paused and taken away through azure-ai-ml."""

from __future__ import annotations

import pytest

from rekindle.catalog.zones import azure_zone
from rekindle.errors import PlatformError, UnsupportedError
from rekindle.platforms.azureml import schedule
from rekindle.platforms.azureml.schedule import lowered, schedule_id
from rekindle.platforms.submission import Schedule
from rekindle.spec.schedule import ScheduleSpec
from tests.platforms.azureml.test_client import PLACE, definition
from tests.servers.azure_rest import Fault, Workspace

MONDAYS = ScheduleSpec(cron="0 3 * * mon", timezone="Europe/Berlin")


def test_every_zone_of_the_table_is_one_that_azure_takes() -> None:
    constants = pytest.importorskip("azure.ai.ml.constants")
    import zoneinfo

    taken = {zone.value for zone in constants.TimeZone}
    found = {zone: azure_zone(zone) for zone in zoneinfo.available_timezones()}
    assert {name for name in found.values() if name} <= taken
    assert found["UTC"] == "UTC"
    assert found["Asia/Kolkata"] == "India Standard Time"
    assert sum(name is not None for name in found.values()) > 500


def test_the_same_schedule_set_twice_is_one_and_another_takes_its_place(
    service: Workspace,
) -> None:
    expected = Schedule("digits", "0 3 * * mon", "W. Europe Standard Time", enabled=True)
    assert schedule.set_(definition(), PLACE, MONDAYS, "digits") == expected
    service.faults = [Fault("PUT schedules", 503), Fault("PUT schedules", 0, after=True)]
    assert schedule.set_(definition(), PLACE, MONDAYS, "digits") == expected
    hourly = ScheduleSpec(cron="0 * * * *")
    changed = schedule.set_(definition(4), PLACE, hourly, "digits")
    assert changed == Schedule("digits", "0 * * * *", "UTC", enabled=True)
    assert schedule.list_(PLACE) == (changed,)
    (kept,) = service.schedules.values()
    assert kept["properties"]["trigger"]["timeZone"] == "UTC"
    assert kept["properties"]["tags"] == {"rekindle": "true"}
    job = kept["properties"]["action"]["jobDefinition"]
    assert job["inputs"]["n"]["value"] == "4"
    assert service.jobs == {}, "setting a schedule starts nothing"
    schedule.set_(definition(), PLACE, MONDAYS, "letters")
    assert [one.id for one in schedule.list_(PLACE)] == ["digits", "letters"]


def test_a_schedule_pauses_goes_on_and_goes_away_as_often_as_one_says_so(
    service: Workspace,
) -> None:
    schedule.set_(definition(), PLACE, MONDAYS, "digits")
    for _ in range(2):
        assert schedule.pause(PLACE, "digits").enabled is False
    assert schedule.list_(PLACE)[0].enabled is False
    assert schedule.set_(definition(), PLACE, MONDAYS, "digits").enabled is True
    assert [schedule.delete(PLACE, "digits") for _ in range(2)] == [True, False]
    assert (service.schedules, schedule.list_(PLACE)) == ({}, ())
    with pytest.raises(PlatformError, match="there is no schedule digits"):
        schedule.pause(PLACE, "digits")


def test_what_azure_would_not_heed_is_refused() -> None:
    wrong = ScheduleSpec(cron="0 3 1 * *", timezone="America/Vancouver")
    with pytest.raises(UnsupportedError) as caught:
        lowered(wrong)
    assert [p.where for p in caught.value.problems] == ["schedule.cron", "schedule.timezone"]
    assert "America/Vancouver" in caught.value.problems[1].what


def test_names_that_differ_stay_different() -> None:
    assert schedule_id("digits") == "digits"
    assert len({schedule_id(name) for name in ("a.b", "a-b", "a_b")}) == 3
