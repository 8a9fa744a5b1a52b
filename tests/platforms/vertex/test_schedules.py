"""What is particular about schedules of Vertex AI: their ids are the service's, and what they hold can
be changed and not taken out. tests/platforms/test_schedules.py has what is alike everywhere."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from google.cloud import aiplatform_v1 as api

from rekindle.errors import UnsupportedError
from rekindle.platforms.vertex import schedule
from rekindle.spec.schedule import ScheduleSpec
from tests.platforms.vertex.project import project as project
from tests.servers.google.rest import PARENT, Project
from tests.support.vertex_client import PLACE, definition

MONDAYS = ScheduleSpec(cron="0 3 * * mon", timezone="Europe/Berlin")
CLEANERS: dict[str, Callable[[], Any]] = {
    "set": lambda: schedule.set_schedule(definition("b"), PLACE, MONDAYS, "digits"),
    "list": lambda: schedule.list_schedules(PLACE),
    "pause": lambda: schedule.pause_schedule(PLACE, "digits"),
    "delete": lambda: schedule.delete_schedule(PLACE, "digits"),
}


@pytest.mark.parametrize("verb", CLEANERS)
def test_of_two_that_were_made_at_once_the_newer_stays(verb: str, project: Project) -> None:
    schedule.set_schedule(definition("a"), PLACE, MONDAYS, "digits")
    (older,) = project.schedules.values()
    newer = api.Schedule(older)
    newer.name = f"{PARENT}/schedules/99"
    newer.create_time = datetime.datetime.now(datetime.UTC)
    project.schedules[newer.name] = newer
    CLEANERS[verb]()
    assert list(project.schedules) == ([] if verb == "delete" else [newer.name])


def test_one_that_queues_no_longer_is_made_anew(project: Project) -> None:
    """The service takes no field out of a schedule, and `false` is none."""
    for overlap, anew in (("queue", True), ("parallel", True), ("queue", False), ("skip", True)):
        before = set(project.schedules)
        asked = ScheduleSpec.model_validate({**MONDAYS.model_dump(), "overlap": overlap})
        schedule.set_schedule(definition(), PLACE, asked, "digits")
        (kept,) = project.schedules.values()
        assert kept.allow_queueing == (overlap == "queue")
        assert ({kept.name} != before) == anew
    assert [line for line in project.refused if "schedules" in line] == []


def test_a_pause_is_made_up_for_only_if_one_says_so(project: Project) -> None:
    for catch_up in (False, True):
        asked = MONDAYS.model_copy(update={"catch_up": catch_up})
        schedule.set_schedule(definition(), PLACE, asked, "digits")
        schedule.pause_schedule(PLACE, "digits")
        assert schedule.set_schedule(definition(), PLACE, asked, "digits").enabled
        (kept,) = project.schedules.values()
        assert kept.catch_up is catch_up


def test_a_line_that_names_days_of_both_kinds_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="days of the month and of the week"):
        schedule.lowered(ScheduleSpec(cron="0 3 1 * mon"), PLACE)
