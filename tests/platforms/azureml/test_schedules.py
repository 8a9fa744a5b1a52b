"""What is particular about schedules of Azure ML: its zones, and what it does not heed.
tests/platforms/test_schedules.py has what is alike everywhere."""

from __future__ import annotations

import pytest

from rekindle.errors import UnsupportedError
from rekindle.platforms.azureml import schedule
from rekindle.platforms.azureml.schedule import azure_zone, lowered, schedule_id
from rekindle.spec.schedule import ScheduleSpec
from tests.servers.azure.rest import Workspace
from tests.support.azureml_client import PLACE, definition

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


def test_a_schedule_has_the_zone_in_azures_words_and_holds_its_job(service: Workspace) -> None:
    schedule.set_schedule(definition(), PLACE, MONDAYS, "digits")
    (kept,) = service.schedules.values()
    assert kept["properties"]["trigger"]["timeZone"] == "W. Europe Standard Time"
    assert kept["properties"]["tags"] == {"rekindle": "true"}
    assert schedule.list_schedules(PLACE)[0].timezone == "W. Europe Standard Time"


def test_what_azure_would_not_heed_is_refused() -> None:
    wrong = ScheduleSpec(cron="0 3 1 * *", timezone="America/Vancouver")
    with pytest.raises(UnsupportedError) as caught:
        lowered(wrong, PLACE)
    assert [p.where for p in caught.value.problems] == ["schedule.cron", "schedule.timezone"]
    assert "America/Vancouver" in caught.value.problems[1].what


def test_names_that_differ_stay_different() -> None:
    assert schedule_id("digits") == "digits"
    assert len({schedule_id(name) for name in ("a.b", "a-b", "a_b")}) == 3
