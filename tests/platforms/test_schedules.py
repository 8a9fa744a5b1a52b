"""Schedules on every platform alike: set, set again, changed, paused, listed and taken away, through
the platform's own client, against the services that tests play; whatever breaks in between."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from rekindle.errors import PlatformError, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms.api import platform_of, schedules_of
from rekindle.platforms.submission import Definition, Lowered
from rekindle.spec.platforms import PlatformsSpec
from rekindle.spec.schedule import ScheduleSpec
from tests.platforms.azureml import test_client as azureml
from tests.platforms.azureml.conftest import service as service
from tests.platforms.kubeflow import test_client as kubeflow
from tests.platforms.sagemaker import test_client as sagemaker
from tests.platforms.vertex import test_client as vertex
from tests.platforms.vertex.project import project as project
from tests.quick import first
from tests.servers.troubles import Fault
from tests.support.kubeflow_client import server as server
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.sagemaker_client import account as account
from tests.support.sagemaker_schedules import scheduler as scheduler

MONDAYS, HOURLY = ScheduleSpec(cron="0 3 * * mon"), ScheduleSpec(cron="0 */2 * * *")


@dataclasses.dataclass
class Stage:
    """A platform as tests play it. `starts` has what would start by itself: by the name of the
    config, expression and definition; `sent` what of overlap and catching up was asked for."""

    name: str
    place: Any
    definition: Callable[[int], Definition]
    starts: Callable[[], dict[str, tuple[str, str]]]
    sent: Callable[[], dict[str, Any]]
    begun: Callable[[], int]
    api: Any
    faults: dict[str, list[Any]]

    def __post_init__(self) -> None:
        self.schedules: Any = importlib.import_module(f"rekindle.platforms.{self.name}.schedule")

    def set(self, number: int, schedule: ScheduleSpec, name: str = "digits") -> Schedule:
        found: Schedule = self.schedules.set_schedule(
            self.definition(number), self.place, schedule, name
        )
        return found


def _kubeflow(request: pytest.FixtureRequest) -> Stage:
    api, place = request.getfixturevalue("server")

    def starts() -> dict[str, tuple[str, str]]:
        on = [one for one in api.recurring.values() if one["status"] == "ENABLED"]
        assert len({one["display_name"] for one in on}) == len(on), "one of a name"
        return {
            one["display_name"]: (
                one["trigger"]["cron_schedule"]["cron"],
                _number(json.dumps(one["pipeline_spec"])),
            )
            for one in on
        }

    def sent() -> dict[str, Any]:
        (one,) = api.recurring.values()
        return {name: one[name] for name in ("max_concurrency", "no_catchup")}

    fault = Fault
    return Stage(
        "kubeflow",
        place,
        lambda n: kubeflow.definition(f"number {n}"),
        starts,
        sent,
        lambda: len(api.runs),
        api,
        {
            "a service that is away": [fault("POST recurringruns", 503) for _ in range(2)],
            "an answer that is lost": [fault("POST recurringruns", 0, after=True)],
            "a deletion whose answer is lost": [fault("DELETE recurringruns", 0, after=True)],
        },
    )


def _vertex(request: pytest.FixtureRequest) -> Stage:
    api = request.getfixturevalue("project")

    def starts() -> dict[str, tuple[str, str]]:
        on = [one for one in api.schedules.values() if one.state.name == "ACTIVE"]
        assert len({one.display_name for one in on}) == len(on), "one of a name"
        return {
            one.display_name: (
                one.cron,
                _number(
                    str(
                        dict(
                            one.create_pipeline_job_request.pipeline_job.runtime_config.parameter_values
                        )
                    )
                ),
            )
            for one in on
        }

    def sent() -> dict[str, Any]:
        (one,) = api.schedules.values()
        names = ("max_concurrent_run_count", "max_concurrent_active_run_count", "allow_queueing")
        return {name: getattr(one, name) for name in names}

    fault = Fault
    return Stage(
        "vertex",
        vertex.PLACE,
        lambda n: vertex.definition(f"number {n}"),
        starts,
        sent,
        lambda: len(api.jobs),
        api,
        {
            "a service that is away": [fault("POST schedules", 503), fault("PATCH schedules", 503)],
            "an answer that is lost": [
                fault("POST schedules", 0, after=True),
                fault("PATCH schedules", 0, after=True),
            ],
            "a gateway that gave up too early": [fault("POST schedules", 504, after=True)],
        },
    )


def _azureml(request: pytest.FixtureRequest) -> Stage:
    api = request.getfixturevalue("service")

    def starts() -> dict[str, tuple[str, str]]:
        on = [one["properties"] for one in api.schedules.values() if one["properties"]["isEnabled"]]
        return {
            one["displayName"]: (
                one["trigger"]["expression"],
                str(one["action"]["jobDefinition"]["inputs"]["n"]["value"]),
            )
            for one in on
        }

    fault = Fault
    return Stage(
        "azureml",
        azureml.PLACE,
        azureml.definition,
        starts,
        dict,
        lambda: len(api.jobs),
        api,
        {
            "a service that is away": [fault("PUT schedules", 503)],
            "an answer that is lost": [fault("PUT schedules", 0, after=True)],
        },
    )


def _sagemaker(request: pytest.FixtureRequest) -> Stage:
    api, scheduler = request.getfixturevalue("account"), request.getfixturevalue("scheduler")

    def starts() -> dict[str, tuple[str, str]]:
        found = {}
        for listed in scheduler.list_schedules()["Schedules"]:
            one = scheduler.get_schedule(Name=listed["Name"], GroupName="rekindle")
            if one["State"] == "ENABLED":
                versions = api.pipelines[one["Target"]["Arn"].rpartition("/")[2]]
                parameters = json.loads(versions[-1]["PipelineDefinition"])["Parameters"]
                (n,) = (p["DefaultValue"] for p in parameters if p["Name"] == "n")
                found[one["Name"]] = one["ScheduleExpression"], str(n)
        return found

    fault = Fault
    return Stage(
        "sagemaker",
        sagemaker.PLACE,
        sagemaker.definition,
        starts,
        dict,
        lambda: len(api.runs),
        api,
        {
            "a service that is away": [fault("CreatePipeline", 503), fault("UpdatePipeline", 503)],
            "an answer that is lost": [
                fault("CreatePipeline", 0, after=True),
                fault("UpdatePipeline", 0, after=True),
            ],
        },
    )


STAGES = {"azureml": _azureml, "kubeflow": _kubeflow, "sagemaker": _sagemaker, "vertex": _vertex}
EXPRESSIONS = {
    "azureml": ("0 3 * * 1", "0 0,2,4,6,8,10,12,14,16,18,20,22 * * *"),
    "kubeflow": ("0 0 3 * * 1", "0 0 0,2,4,6,8,10,12,14,16,18,20,22 * * *"),
    "sagemaker": ("cron(0 3 ? * MON *)", "cron(0 0,2,4,6,8,10,12,14,16,18,20,22 * * ? *)"),
    "vertex": ("TZ=UTC 0 3 * * 1", "TZ=UTC 0 0,2,4,6,8,10,12,14,16,18,20,22 * * *"),
}


def lowered(platform: str, asked: ScheduleSpec) -> Lowered:
    return schedules_of(platform_of(platform, PlatformsSpec())).lowered(asked)


def _number(text: str) -> str:
    return text.partition("number ")[2][:1]


@pytest.fixture(params=first(1, ("vertex", "sagemaker", "kubeflow", "azureml")))
def stage(request: pytest.FixtureRequest) -> Stage:
    return STAGES[request.param](request)


def test_a_schedule_set_twice_is_one_and_starts_what_was_set_last(stage: Stage) -> None:
    weekly, hourly = EXPRESSIONS[stage.name]
    assert stage.schedules.list_schedules(stage.place) == ()
    for _ in range(2):
        made = stage.set(3, MONDAYS)
        assert (made.id, made.timezone, made.enabled) == ("digits", "UTC", True)
        assert stage.starts() == {"digits": (weekly, "3")}
    assert stage.schedules.list_schedules(stage.place) == (made,)
    stage.set(4, MONDAYS)
    assert stage.starts() == {"digits": (weekly, "4")}, "another pipeline at the same time"
    changed = stage.set(4, HOURLY)
    assert stage.starts() == {"digits": (hourly, "4")}, "the same at another time"
    assert stage.schedules.list_schedules(stage.place) == (changed,)
    stage.set(5, MONDAYS, "letters")
    assert stage.starts() == {"digits": (hourly, "4"), "letters": (weekly, "5")}, (
        "another config that runs the same pipeline changes nothing of this one's"
    )
    assert [one.id for one in stage.schedules.list_schedules(stage.place)] == ["digits", "letters"]
    assert stage.begun() == 0, "setting a schedule starts nothing"


def test_a_schedule_pauses_goes_on_and_goes_away_as_often_as_one_says_so(stage: Stage) -> None:
    stage.set(3, MONDAYS)
    for _ in range(2):
        assert stage.schedules.pause_schedule(stage.place, "digits").enabled is False
        assert stage.starts() == {}
    assert [one.enabled for one in stage.schedules.list_schedules(stage.place)] == [False]
    assert stage.set(3, MONDAYS).enabled is True
    stage.schedules.pause_schedule(stage.place, "digits")
    assert stage.set(4, HOURLY).enabled is True, "one that pauses may be changed, too"
    assert stage.starts() == {"digits": (EXPRESSIONS[stage.name][1], "4")}
    assert [stage.schedules.delete_schedule(stage.place, "digits") for _ in range(2)] == [
        True,
        False,
    ]
    assert (stage.starts(), stage.schedules.list_schedules(stage.place)) == ({}, ())
    with pytest.raises(PlatformError) as caught:
        stage.schedules.pause_schedule(stage.place, "digits")
    assert "rekindle schedule list" in caught.value.problems[0].fix


def test_whatever_befalls_a_call_one_schedule_is_left_and_then_none(stage: Stage) -> None:
    for case, faults in stage.faults.items():
        stage.api.faults = list(faults)
        stage.set(3, MONDAYS)
        assert stage.starts() == {"digits": (EXPRESSIONS[stage.name][0], "3")}, case
        stage.set(4, MONDAYS)
        assert stage.starts() == {"digits": (EXPRESSIONS[stage.name][0], "4")}, case
        assert stage.api.faults == [], case
        assert stage.schedules.delete_schedule(stage.place, "digits"), case
        assert stage.starts() == {}, case


ONE = {"max_concurrent_run_count": 1, "max_concurrent_active_run_count": 1}
TEN = {"max_concurrent_run_count": 10, "max_concurrent_active_run_count": 10}
# overlap, catch_up: what is asked of a platform, or why not
POLICIES: list[tuple[str, Any, bool, Any]] = [
    ("kubeflow", None, False, {"max_concurrency": 1, "no_catchup": True}),
    ("kubeflow", "queue", True, {"max_concurrency": 1, "no_catchup": False}),
    ("kubeflow", "parallel", False, {"max_concurrency": 10, "no_catchup": True}),
    ("kubeflow", "skip", False, "skips no start for it"),
    ("vertex", None, False, {**ONE, "allow_queueing": False}),
    ("vertex", "skip", True, {**ONE, "allow_queueing": False}),
    ("vertex", "queue", False, {**ONE, "allow_queueing": True}),
    ("vertex", "parallel", False, {**TEN, "allow_queueing": False}),
    ("sagemaker", None, False, {}),
    ("sagemaker", "parallel", False, {}),
    ("sagemaker", "skip", False, "whether or not the run before it goes on"),
    ("sagemaker", "queue", True, "whether or not the run before it goes on"),
    ("azureml", None, False, {}),
    ("azureml", "parallel", False, {}),
    ("azureml", "skip", False, "whether or not the one before it goes on"),
    ("azureml", "queue", True, "whether or not the one before it goes on"),
]


@pytest.mark.parametrize(
    ("platform", "overlap", "catch_up", "expected"),
    [row for row in POLICIES if isinstance(row[3], dict)],
)
def test_what_becomes_of_late_starts_is_asked_for(
    platform: str, overlap: Any, catch_up: bool, expected: Any, request: pytest.FixtureRequest
) -> None:
    asked = ScheduleSpec(cron="0 3 * * 1", overlap=overlap, catch_up=catch_up)
    assert lowered(platform, asked)
    if expected:
        stage = STAGES[platform](request)
        stage.set(3, asked)
        assert stage.sent() == expected


@pytest.mark.parametrize(
    ("platform", "overlap", "catch_up", "says"),
    [row for row in POLICIES if isinstance(row[3], str)],
)
def test_what_cannot_become_of_late_starts_is_refused_with_a_fix_that_is_taken(
    platform: str, overlap: Any, catch_up: bool, says: str
) -> None:
    asked = ScheduleSpec(cron="0 3 * * 1", overlap=overlap, catch_up=catch_up)
    with pytest.raises(UnsupportedError, match=says) as caught:
        lowered(platform, asked)
    where = {problem.where: problem.fix for problem in caught.value.problems}
    assert where.keys() == {"schedule.overlap", *(["schedule.catch_up"] if catch_up else [])}
    fix = next(word for word in ("queue", "parallel") if word in where["schedule.overlap"])
    assert lowered(platform, asked.model_copy(update={"catch_up": False, "overlap": fix}))


@pytest.mark.parametrize("platform", STAGES)
def test_what_a_platform_does_by_itself_is_said_in_words(platform: str) -> None:
    said = lowered(platform, MONDAYS)
    assert said.expression == EXPRESSIONS[platform][0]
    overlaps = {
        "azureml": "begins beside the run",
        "sagemaker": "begins beside the run",
        "kubeflow": "waits until the run has ended; of several that wait, the last",
        "vertex": "is left out",
    }
    assert said.overlap == overlaps[platform]
    assert said.missed.startswith("left out after a pause")
