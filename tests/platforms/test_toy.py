"""A platform that rekindle does not know is one folder, one row and one section: a toy is submitted to, followed, resumed,
scheduled and asked by the application as it is."""

import json

import pytest
from kfp import dsl

from rekindle.app import follow, preflight, submit
from rekindle.errors import RequestError
from rekindle.ir.compile import compile_function
from rekindle.platforms.platform import PLATFORMS, Platform
from rekindle.spec.model import Spec
from rekindle.spec.platforms import PlatformsSpec
from rekindle.spec.schedule import ScheduleSpec
from tests.platforms.toy import ToySpec


class Sections(PlatformsSpec):
    toy: ToySpec = ToySpec()


class Config(Spec):
    platforms: Sections = Sections()


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def shout(text: str) -> str:
    return text.upper()


@dsl.pipeline(name="loud")
def loud():
    shout(text="a").set_display_name("first")


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setitem(PLATFORMS, "toy", "tests.platforms.toy")
    monkeypatch.setattr(follow, "PlatformsSpec", Sections)
    (tmp_path / "loud.yaml").write_text(compile_function(loud))
    (tmp_path / "toy").mkdir()
    there = Sections(toy=ToySpec(folder=str(tmp_path / "toy")))
    return Config(name="loud", pipeline=str(tmp_path / "loud.yaml"), platforms=there)


def test_a_run_is_submitted_once_followed_read_and_resumed(spec, tmp_path):
    shown = []
    home = tmp_path / "home"
    record, placed, outline = submit.submit_spec(
        spec, "toy", home, "t", lambda *what: shown.append(what)
    )
    again, _, _ = submit.submit_spec(spec, "toy", home, "t", lambda *_: None)
    assert (record.run_id, placed.anew) == (again.run_id, True)
    assert [step.step for step in outline.steps] == ["shout"]
    assert shown == [(outline, None)]
    record = follow.wait_until_ended(record, home, lambda _: None)
    assert [(step.name, step.status) for step in record.steps] == [("shout", "succeeded")]
    assert "".join(follow.log_of(record, record.steps[0], home)) == "shout was here\n"
    assert (home / "runs" / record.run_id / "card.html").exists()
    resumed, placed = follow.resume_on_platform(record, home)
    assert placed.anew
    assert resumed.submission.resumed == 1


def test_what_a_config_does_not_say_is_refused_before_anything_is_written(spec, tmp_path):
    bare = spec.model_copy(update={"platforms": Sections()})
    with pytest.raises(RequestError) as caught:
        submit.submit_spec(bare, "toy", tmp_path / "home", None, lambda *_: None)
    (problem,) = caught.value.problems
    assert (problem.where, problem.fix) == (
        "platforms.toy.folder",
        "set platforms.toy.folder: /srv/toy",
    )
    assert not (tmp_path / "home").exists()


def test_doctor_asks_it_and_schedules_are_set_listed_and_deleted(spec, tmp_path):
    found = preflight.readiness_on(spec, "toy", tmp_path / "home")
    assert [check.state for check in found.checks] == ["ok"]
    assert not found.errors
    toy = Platform.of("toy", spec.platforms)
    wanted = ScheduleSpec(cron="0 3 * * 1")
    toy.set_schedule(preflight.compile_for("toy", spec), wanted, "loud")
    assert [one.cron for one in toy.list_schedules()] == ["0 3 * * 1"]
    assert (toy.delete_schedule("loud"), toy.delete_schedule("loud")) == (True, False)
    (unit,) = toy.cache_keys(preflight.compile_for("toy", spec).files)
    assert unit.name == "shout"
    assert json.loads(preflight.compile_for("toy", spec).text)["steps"] == {"shout": "python:3.11"}
