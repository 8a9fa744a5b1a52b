"""A webhook is told how runs end, as Slack's would be: it answers `ok`, now and then 503, or not at all."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml

from rekindle.app import notify
from rekindle.app.runs import summary
from rekindle.records import RunRecord
from rekindle.spec.model import NotifySpec
from tests.data.corpora import rows, write_jsonl
from tests.report import homes, runs
from tests.servers.webhook import webhook as listening
from tests.support.cli import rekindle

PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def say(what: str) -> str:
    if what == "fail":
        raise ValueError("it is broken")
    return what

@dsl.pipeline(name="hello")
def hello(what: str = "hi"):
    say(what=what)
"""


@pytest.fixture
def webhook(monkeypatch):
    with listening() as (server, address):
        monkeypatch.setenv("HOOK", address)
        yield server


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(PIPELINE)
    Path("c.yaml").write_text(
        "name: hello\npipeline: p.py:hello\nnotify: {webhook: env:HOOK, on: [success, failure]}\n"
    )


@pytest.mark.slow
def test_a_run_tells_how_it_ended(webhook, job):
    rekindle("run", "c.yaml")
    assert rekindle("run", "c.yaml", "--set", "arguments.what=fail", check=False).returncode == 1
    assert len(webhook.told) == 2
    assert webhook.told[0].startswith("hello: the run succeeded. Run hello-")
    assert webhook.told[1].startswith("hello: the run failed: ")
    assert "it is broken" in webhook.told[1]
    assert set(webhook.paths) == {"/services/s3cr3t-t0ken"}
    rekindle("run", "c.yaml", "--set", "notify.on=[refusal]")
    assert rekindle("run", "c.yaml", "--set", "pipeline=p.py:nobody", check=False).returncode == 2
    assert len(webhook.told) == 2


def test_the_gate_s_word_and_the_reason_for_the_run_are_told(webhook, tmp_path):
    record = runs.refused_reviews(homes.Home(tmp_path))
    spec = {**record.spec, "notify": {"webhook": "env:HOOK", "on": ["refusal"]}}
    found = {"because": "512 new rows (due from 500)", "spec": spec}
    notify.tell_of(record.model_copy(update=found))
    reason = summary(record, tmp_path).gate.reason.rstrip(".")
    assert reason.startswith("The gain in accuracy is not certain: the lower bound")
    why = "It ran because 512 new rows (due from 500)"
    assert webhook.told == [f"reviews: refused: {reason}. {why}. Run {record.run_id}"]
    notify.tell_of(record)
    stopped = RunRecord.model_validate({**dict(record), "spec": spec, "status": "cancelled"})
    notify.tell_of(stopped)
    assert len(webhook.told) == 1


def test_a_run_that_is_suggested_is_told_once(webhook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "r.jsonl", rows(30))
    config = {
        "name": "r",
        "task": "text_classification",
        "data": {"source": "r.jsonl"},
        "model": {"source": {"model_type": "distilbert"}},
        "triggers": {"act": "suggest"},
        "notify": {"webhook": "env:HOOK"},
    }
    Path("c.yaml").write_text(yaml.safe_dump(config))
    for _ in range(3):
        assert rekindle("watch", "c.yaml", "--once", check=False).returncode == 3
    Path("r.jsonl").rename("away.jsonl")
    assert rekindle("watch", "c.yaml", "--once", check=False).returncode == 1
    Path("away.jsonl").rename("r.jsonl")
    assert rekindle("watch", "c.yaml", "--once", check=False).returncode == 3
    suggested, failed = webhook.told
    assert suggested == "r: a run is due: no run was judged before"
    assert failed.startswith("r: it could not be decided: ")


def test_one_that_stumbles_is_told_again_and_one_that_fails_costs_a_warning(
    webhook, monkeypatch, caplog
):
    wanted = NotifySpec(webhook="env:HOOK")
    webhook.statuses = [503]
    notify.tell(wanted, "failure", "x")
    assert (webhook.told, caplog.text) == (["x"], "")
    webhook.statuses = [404]
    notify.tell(wanted, "failure", "y")
    monkeypatch.setattr(notify, "SECONDS", 0)
    webhook.statuses = [500]
    notify.tell(wanted, "failure", "y")
    monkeypatch.setenv("HOOK", "https://127.0.0.1:1/s3cr3t-t0ken")
    notify.tell(wanted, "failure", "y")
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert [line[:29] for line in said] == ["notify.webhook was not told: "] * 3
    assert "404" in said[0]
    assert "s3cr3t-t0ken" not in caplog.text
    assert webhook.told == ["x"]


def test_an_answer_that_drips_in_holds_nothing_up(webhook, monkeypatch, caplog):
    monkeypatch.setattr(notify, "SECONDS", -9.5)
    webhook.pause.clear()
    notify.tell(NotifySpec(webhook="env:HOOK"), "failure", "x")
    webhook.pause.set()
    assert "notify.webhook takes too long to answer" in caplog.text


@pytest.mark.slow
def test_a_turn_that_fails_is_told_once_and_its_run_not_besides(webhook, job):
    write_jsonl(Path("r.jsonl"), rows(30))
    config = (
        Path("c.yaml").read_text().replace("[success, failure]", "[success, failure, suggestion]")
    )
    Path("c.yaml").write_text(
        f"{config}task: text_classification\ndata: {{source: r.jsonl}}\nmodel: {{source: x}}\n"
    )
    for _ in range(2):
        done = rekindle("watch", "c.yaml", "--once", "--set", "arguments.what=fail", check=False)
        assert done.returncode == 1
    (told,) = webhook.told
    assert told.startswith("hello: failed: ")
    assert told.endswith("It ran because no run was judged before")
    rekindle("watch", "c.yaml", "--once")
    assert len(webhook.told) == 2
    assert webhook.told[1].startswith(
        "hello: succeeded. It ran because no run was judged before. Run "
    )


@pytest.mark.parametrize(
    "address", ["https://[x", "", "http://hooks.example.org/a", "file:///etc/passwd", "x"]
)
def test_an_address_that_is_none_is_not_asked(address, monkeypatch, caplog):
    monkeypatch.setenv("HOOK", address)
    notify.tell(NotifySpec(webhook="env:HOOK"), "failure", "x")
    assert "notify.webhook: the variable HOOK holds no https:// address" in caplog.text


def test_an_address_in_the_config_itself_is_refused(webhook, job):
    done = rekindle("run", "c.yaml", "--set", "notify.webhook=https://x.org/t0ken", check=False)
    assert done.returncode == 2
    assert "notify.webhook" in done.stderr
    assert not webhook.told
