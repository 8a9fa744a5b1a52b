"""What is particular about schedules of Kubeflow: nothing can be changed in place, and the controller
starts what fell due when it may. tests/platforms/test_schedules.py has what is alike everywhere."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import PlatformError, UnsupportedError
from rekindle.platforms.kubeflow import client, schedule
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.submission import Definition
from rekindle.spec.schedule import ScheduleSpec
from tests.servers.troubles import Fault
from tests.support.kubeflow_client import Served, definition
from tests.support.kubeflow_client import server as server

ROOT = Path(__file__).parents[3]
MONDAYS = ScheduleSpec(cron="0 3 * * mon")


def test_runs_go_on_when_what_started_them_is_changed_or_taken_away(server: Served) -> None:
    api, place = server
    for change in (
        lambda: schedule.set_schedule(definition("b"), place, MONDAYS, "digits"),
        lambda: schedule.delete_schedule(place, "digits"),
    ):
        (one,) = api.recurring or [schedule.set_schedule(definition(), place, MONDAYS, "digits").id]
        run = api.start(one)
        change()
        assert api.runs[run]["state"] == "RUNNING"
        assert one not in api.recurring


CLEANERS: dict[str, Callable[[KubeflowSpec], Any]] = {
    "set": lambda place: schedule.set_schedule(definition("b"), place, MONDAYS, "digits"),
    "set to something else": lambda place: schedule.set_schedule(
        definition("c"), place, MONDAYS, "digits"
    ),
    "set to what it was": lambda place: schedule.set_schedule(
        definition("a"), place, MONDAYS, "digits"
    ),
    "list": schedule.list_schedules,
    "pause": lambda place: schedule.pause_schedule(place, "digits"),
    "delete": lambda place: schedule.delete_schedule(place, "digits"),
}


@pytest.mark.parametrize("verb", CLEANERS)
def test_what_a_set_that_was_cut_off_has_left_goes_with_the_next_command(
    verb: str, server: Served
) -> None:
    api, place = server
    schedule.set_schedule(definition("a"), place, MONDAYS, "digits")
    api.faults = [Fault("DELETE recurringruns", 403)]
    with pytest.raises(PlatformError):
        schedule.set_schedule(definition("b"), place, MONDAYS, "digits")
    assert len(api.recurring) == 2
    newest = list(api.recurring)[-1]
    CLEANERS[verb](place)
    if verb == "delete":
        assert api.recurring == {}
    elif verb in ("list", "pause", "set"):
        assert list(api.recurring) == [newest]
    else:
        (kept,) = api.recurring.values()
        word = {"set to what it was": "a", "set to something else": "c"}[verb]
        wanted = schedule.set_schedule(definition(word), place, MONDAYS, "digits")
        assert list(api.recurring) == [kept["recurring_run_id"]], "it is that one already"
        assert wanted.enabled


@pytest.mark.slow
def test_a_set_that_is_killed_between_the_new_one_and_the_old_leaves_nothing_that_starts_twice(
    server: Served, tmp_path: Path
) -> None:
    api, place = server
    settings = {
        "schedule": "{cron: 0 3 * * 1}",
        "platforms.kubeflow.host": place.host,
        "platforms.kubeflow.token": "env:KFP_TOKEN",
        "platforms.kubeflow.artifact_root": "/mnt/r",
        "register.tracking_uri": "https://mlflow.example.com",
    }

    def say(*verb: str, **more: str) -> subprocess.Popen[str]:
        words = [f"--set={key}={value}" for key, value in {**settings, **more}.items()]
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rekindle.cli.main",
                "schedule",
                *verb,
                str(ROOT / "configs" / "digits.yaml"),
                "--platform",
                "kubeflow",
                *words,
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )

    assert say("set", "--yes").wait(60) == 0
    api.hold = "DELETE recurringruns"
    with say("set", "--yes", **{"train.seed": "7"}) as killed:
        assert api.held.wait(60)
        killed.kill()
    api.hold = ""
    api.let_go.set()
    assert len(api.recurring) == 2
    newest = list(api.recurring)[-1]
    with say("list") as listing:
        assert listing.communicate(timeout=60)[0] == "digits  on  0 3 * * 1  UTC\n"
    assert list(api.recurring) == [newest]


def test_a_pause_is_made_up_for_only_if_one_says_so(server: Served) -> None:
    """The controller starts what a recurring run that is switched on again has missed, so another
    one takes its place, which has missed nothing."""
    api, place = server
    for catch_up in (False, True):
        asked = MONDAYS.model_copy(update={"catch_up": catch_up})
        schedule.set_schedule(definition(), place, asked, "digits")
        (before,) = api.recurring
        schedule.pause_schedule(place, "digits")
        assert schedule.set_schedule(definition(), place, asked, "digits").enabled
        (after,) = api.recurring
        assert (after == before) == catch_up


def test_two_that_set_at_once_leave_one(server: Served) -> None:
    api, place = server
    both = definition("x"), definition("y")

    def say(made: Definition) -> bool:
        return schedule.set_schedule(made, place, MONDAYS, "digits").enabled

    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(say, both))
        assert len(api.recurring) == 1
        schedule.delete_schedule(place, "digits")


def test_what_is_set_twice_in_a_second_is_what_was_set_last(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, place = server
    api.in_seconds = True
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.5)
    for word in "abc":
        schedule.set_schedule(definition(word), place, MONDAYS, "digits")
        made = api.calls["POST recurringruns"]
        schedule.set_schedule(definition(word), place, MONDAYS, "digits")
        assert api.calls["POST recurringruns"] == made, "it is that one already"
        assert len(api.recurring) == 1


def test_what_others_made_is_left_alone(server: Served) -> None:
    api, place = server
    schedule.set_schedule(definition(), place, MONDAYS, "digits")
    (ours,) = api.recurring
    api.recurring["theirs"] = {
        **api.recurring[ours],
        "recurring_run_id": "theirs",
        "description": "by hand",
    }
    assert [one.id for one in schedule.list_schedules(place)] == ["digits"]
    assert schedule.delete_schedule(place, "digits")
    assert list(api.recurring) == ["theirs"]


def test_another_clock_than_the_clusters_is_refused() -> None:
    berlin = ScheduleSpec(cron="0 3 * * mon", timezone="Europe/Berlin")
    with pytest.raises(UnsupportedError, match="follow the clock of UTC"):
        schedule.lowered(berlin, KubeflowSpec())
    there = schedule.lowered(berlin, KubeflowSpec(timezone="Europe/Berlin"))
    assert (there.expression, there.timezone) == ("0 0 3 * * 1", "Europe/Berlin")


def test_scheduled_runs_keep_their_artifacts_where_submitted_ones_do(server: Served) -> None:
    api, place = server
    rooted = place.model_copy(update={"pipeline_root": "s3://team/root"})
    schedule.set_schedule(definition(), place, MONDAYS, "digits")
    schedule.set_schedule(definition(), rooted, MONDAYS, "digits")
    (recurring_run,) = api.recurring.values()
    assert recurring_run["runtime_config"]["pipeline_root"] == "s3://team/root"
    as_other = rooted.model_copy(update={"service_account": "other"})
    schedule.set_schedule(definition(), as_other, MONDAYS, "digits")
    (recurring_run,) = api.recurring.values()
    assert recurring_run["service_account"] == "other"
