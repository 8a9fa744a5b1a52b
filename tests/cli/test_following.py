"""`submit --wait`, `status`, `logs`, `cancel`, `resume`, `diff` and the notebook's
run: what is submitted really runs, behind an API server that is played."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import rekindle
from tests.servers.troubles import Fault
from tests.support.cli_following import Here
from tests.support.cli_following import here as here

MOST_SECONDS = 60


Out = pytest.CaptureFixture[str]


def told(capsys: Out) -> Any:
    return json.loads(capsys.readouterr().out)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + MOST_SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_is_followed_to_its_end_mended_and_stopped(here: Here, capsys: Out) -> None:
    here.stay.touch()
    assert here.submit("--wait") == 1
    captured = capsys.readouterr()
    assert "failed" in captured.out
    assert "next: rekindle logs watched-" in captured.err

    assert here.say("status") == 0
    shown = capsys.readouterr().out
    assert "failed on kubeflow" in shown
    assert "the end of what `count` printed:" in shown
    assert "ValueError: there is no flag" in shown
    calls = sum(here.server.calls.values())
    assert here.say("status", "--json") == 0
    record = told(capsys)
    assert sum(here.server.calls.values()) == calls, "what is over is not asked for again"
    statuses = {step["name"]: step["status"] for step in record["steps"]}
    assert statuses == {"count": "failed", "tell": "skipped", "condition-1/never": "skipped"}
    assert here.say("logs") == 0
    assert "there is no flag" in capsys.readouterr().out

    (failed,) = rekindle.runs(here.home)
    assert "ValueError: there is no flag" in failed.logs()
    page = failed._repr_html_()
    assert f'<a href="{record["submission"]["url"]}"' in page
    assert "step `count` failed" in page
    assert "a step before it failed, or a condition" in page
    here.flag.touch()
    assert here.say("resume", "--json") == 0
    assert told(capsys)["id"] == record["submission"]["id"]
    assert here.say("resume") == 2
    assert "runs" in capsys.readouterr().err
    run = rekindle.runs(here.home)[0]

    def tells() -> bool:
        return run.refreshed().record.step("tell").status == "running"

    until(tells)
    following = threading.Timer(0.5, here.stay.unlink)
    following.start()
    assert here.say("logs", "-f", "--step", "tell") == 0
    text = capsys.readouterr().out
    assert text.count("line 6\n") == 1
    here.server.faults = [Fault("GET runs", 503) for _ in range(9)]  # two questions and a bit
    done = run.wait()
    assert here.server.faults == []
    assert (done.status, done.record.step("count").status) == ("succeeded", "succeeded")
    assert "line 3" in done.logs("tell")
    assert here.say("resume") == 2
    assert "nothing is left to do" in capsys.readouterr().err
    assert here.say("cancel") == 0
    assert capsys.readouterr().out == f"{run.id}  succeeded: already over, nothing changed\n"
    assert len(here.server.runs) == 1


@pytest.mark.slow
def test_a_run_is_stopped_from_here_and_says_what_will_run_again(here: Here, capsys: Out) -> None:
    here.flag.touch()
    here.stay.touch()
    run = rekindle.submit(here.config, platform="kubeflow", home=here.home, token="mine")
    assert (
        rekindle.submit(here.config, platform="kubeflow", home=here.home, token="mine").id == run.id
    )
    until(lambda: run.refreshed().record.step("tell").status == "running")
    diff = ["diff", str(here.config), "--platform", "kubeflow", "--json"]
    assert here.say(*diff) == 0
    assert {step["again"] for step in told(capsys)["steps"]} <= {"no", "yes"}
    assert here.say(*diff, "--set", "arguments.flag=other") == 0
    again = {step["step"]: step["again"] for step in told(capsys)["steps"]}
    assert again["count"] == "yes"
    code = (
        f"import sys; from rekindle.cli.main import invoke; invoke(['status', '--home', {str(here.home)!r}]);"
        "print({'boto3', 'google.cloud.aiplatform_v1', 'azure.ai.ml', 'torch', 'mlflow'} & {*sys.modules})"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "running on kubeflow" in child.stdout
    assert child.stdout.endswith("\nset()\n"), "SDKs of others are not imported"
    assert here.say("cancel", "--json") == 0
    capsys.readouterr()
    assert run.wait().status == "cancelled"
    assert len(here.server.runs) == 1
    assert here.say("status", "nothing") == 2


@pytest.mark.slow
def test_what_cannot_be_followed_is_said(here: Here, capsys: Out) -> None:
    here.server.faults = [Fault("POST runs", 400)]
    assert here.submit() == 1
    capsys.readouterr()
    for verb in ("logs", "cancel", "resume"):
        assert here.say(verb) == 2
        error = capsys.readouterr().err
        assert "was interrupted before" in error or "has no log" in error
    assert here.submit("--token", "No Token") == 2
    assert "a-z, 0-9" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_here_is_followed_stopped_and_gone_on_with(here: Here, capsys: Out) -> None:
    here.flag.touch()
    here.stay.touch()
    words = ["run", str(here.config), "--home", str(here.home)]
    with subprocess.Popen([sys.executable, "-m", "rekindle.cli.main", *words]) as child:
        until(lambda: bool(rekindle.runs(here.home)))
        run = rekindle.runs(here.home)[0]
        until(lambda: run.refreshed().record.step("tell").status == "running")
        assert here.say("resume") == 2
        assert "runs" in capsys.readouterr().err
        following = threading.Timer(0.5, run.cancel)
        following.start()
        assert here.say("logs", "-f", "--step", "tell") == 0
        assert capsys.readouterr().out.count("line 6\n") == 1
        assert child.wait(MOST_SECONDS) == 130
    assert run.refreshed().status == "cancelled"
    assert here.say("cancel") == 0
    assert capsys.readouterr().out == f"{run.id}  cancelled: already over, nothing changed\n"
    here.stay.unlink()
    assert here.say("resume", run.id, "--json") == 0
    again = told(capsys)
    assert {step["name"]: step["cached"] for step in again["steps"]}["count"] is True
    assert again["status"] == "succeeded"
