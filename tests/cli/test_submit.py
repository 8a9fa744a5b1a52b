"""`submit` and `schedule`: what is shown, asked, sent and said; the workspace is played over TLS."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from rekindle.cli.main import invoke
from tests.platforms.azureml.conftest import service as service
from tests.quick import first
from tests.servers.azure.rest import SUBSCRIPTION
from tests.servers.troubles import Fault
from tests.support.cli_compile import PLATFORMS, ROOT, TRACKED
from tests.support.cli_submit import WEEKLY, WORKSPACE
from tests.support.cli_submit import home as home

BEGAN = datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC)


def words(*verb, settings=WORKSPACE):
    """The digits job for Azure ML."""
    asked = [*PLATFORMS["azureml"][0], *TRACKED]
    asked += [word for setting in settings for word in ("--set", setting)]
    return [*verb, str(ROOT / "configs" / "digits.yaml"), "--platform", "azureml", *asked]


def told(capsys):
    return json.loads(capsys.readouterr().out)


def test_a_submission_is_shown_sent_once_and_says_where_to_look(service, capsys):
    assert invoke(words("submit", "--yes", "--json", "--token", "a")) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [document["id"]] == list(service.jobs)
    assert document["url"].startswith(f"https://ml.azure.com/runs/{document['id']}")
    assert (document["schema_version"], document["anew"], document["token"]) == (1, True, "a")
    assert {"step": "finetune", "machine": "Standard_D4s_v5", "machines": 1, "spot": False} in (
        document["steps"]
    )
    assert f"workspace forge of rg ({SUBSCRIPTION}), {len(document['steps'])} steps" in captured.err
    assert re.search(r"finetune +1 x Standard_D4s_v5\n", captured.err)
    assert invoke(words("submit", "--yes", "--token", "a")) == 0
    said = capsys.readouterr().out
    verbs = ("status", "logs -f", "cancel")
    following = "".join(f"next: rekindle {verb} {document['run_id']}\n" for verb in verbs)
    assert said == f"submitted before: {document['id']}\n{document['url']}\n{following}"
    assert invoke(words("submit", "--yes")) == 0
    assert len(service.jobs) == 2


@pytest.mark.slow
def test_machines_are_shown_as_the_config_asks_for_them(service, capsys):
    more = [
        "resources.nodes=2",
        "resources.gpus_per_node=8",
        "resources.accelerator=H100",
        "resources.spot=true",
    ]
    assert invoke(words("submit", "--yes", settings=[*WORKSPACE, *more])) == 0
    assert re.search(r"finetune +2 x Standard_ND96isr_H100_v5 \(spot\)\n", capsys.readouterr().err)
    (job,) = service.jobs.values()
    trained = job["resource"]["properties"]["jobs"]["finetune"]
    assert trained["resources"]["instance_count"] == 2


def test_without_a_terminal_nothing_is_sent_unless_one_says_yes(service, capsys):
    assert invoke(words("submit", "--json")) == 2
    (problem,) = told(capsys)["errors"]
    assert (problem["where"], problem["fix"]) == ("--yes", "pass --yes")
    assert service.calls == {}


@pytest.mark.parametrize(("answer", "code", "jobs"), first(1, [("n", 2, 0), ("y", 0, 1)]))
def test_on_a_terminal_one_is_asked(answer, code, jobs, service):
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "rekindle.cli.main", *words("submit")],
        cwd=ROOT,
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    shown = ""
    while "[y/N]" not in shown:
        shown += os.read(ours, 1 << 12).decode()
    assert "workspace forge" in shown
    assert service.calls == {}
    os.write(ours, f"{answer}\n".encode())
    out, _ = child.communicate(timeout=60)
    with contextlib.suppress(OSError):  # Linux' word for a terminal that nobody has open
        while more := os.read(ours, 1 << 12).decode():
            shown += more
    os.close(ours)
    assert "experimental" not in shown, "what the SDK prints is its own affair"
    assert child.returncode == code
    assert len(service.jobs) == jobs
    assert out.startswith("submitted: ") == (jobs == 1)


def test_everything_that_lacks_is_said_at_once(service, capsys):
    asked = [
        "submit",
        str(ROOT / "configs" / "digits.yaml"),
        "--platform",
        "azureml",
        "--yes",
        "--json",
    ]
    assert invoke(asked) == 2
    where = {problem["where"] for problem in told(capsys)["errors"]}
    section = "platforms.azureml"
    assert {f"{section}.subscription", f"{section}.workspace", f"{section}.image"} <= where
    assert "register.tracking_uri" in where
    assert service.calls == {}


@pytest.mark.parametrize("name", PLATFORMS)
def test_nothing_that_lacks_is_said_twice(name, capsys):
    assert (
        invoke(
            ["submit", str(ROOT / "configs" / "digits.yaml"), "--platform", name, "--yes", "--json"]
        )
        == 2
    )
    said = [(problem["what"], problem["where"]) for problem in told(capsys)["errors"]]
    assert len(said) == len(set(said)) > 1


@pytest.mark.slow
def test_what_the_workspace_refuses_fails_with_a_way_to_say_it_again(service, capsys):
    service.faults = [Fault("PUT jobs", 403)]
    assert invoke(words("submit", "--yes", "--json", "--token", "mine")) == 1
    (problem,) = told(capsys)["errors"]
    assert problem["code"] == "E-PLATFORM"
    assert "`AzureML Data Scientist`" in problem["fix"]
    assert "the same command goes on with this submission" in problem["fix"]


@pytest.mark.slow
def test_a_submission_that_was_cut_off_is_gone_on_with(service, capsys):
    service.faults = [Fault("PUT jobs", 503) for _ in range(20)]
    assert invoke(words("submit", "--yes", "--json")) == 1
    capsys.readouterr()
    assert invoke(["runs", "--json"]) == 0
    (listed,) = told(capsys)["runs"]
    assert listed["status"] == "submitting"
    service.faults = [Fault("PUT jobs", 0, after=True)]
    assert invoke(words("submit", "--yes", "--json")) == 0
    document = told(capsys)
    assert [document["id"]] == list(service.jobs)
    assert document["run_id"] == listed["run_id"]
    assert invoke(words("submit", "--yes", "--json")) == 0
    assert told(capsys)["run_id"] != listed["run_id"], "what arrived is not said again unasked"
    assert len(service.jobs) == 2


def test_a_run_on_a_platform_has_the_status_and_the_steps_that_it_has_there(service, home, capsys):
    assert invoke(words("submit", "--yes", "--json")) == 0
    sent = told(capsys)
    run = service.history.step(sent["id"], "fingerprint", "Running", start_time_utc=BEGAN)
    service.history.printed(run, b"32 files\n")
    assert invoke(["status", "--json"]) == 0
    record = told(capsys)
    assert record["status"] == "running"
    first, *others = record["steps"]
    assert (first["name"], first["status"]) == ("fingerprint", "running")
    assert {step["status"] for step in others} == {"pending"}
    assert invoke(["logs"]) == 0
    assert capsys.readouterr().out == "32 files\n"
    service.history.step(sent["id"], "fingerprint", "Completed", end_time_utc=BEGAN)
    job = service.jobs[sent["id"]]["resource"]["properties"]
    job["status"] = "Completed"
    assert invoke(["status", sent["run_id"], "--json"]) == 0
    record = told(capsys)
    assert (record["status"], record["platform"]) == ("succeeded", "azureml")
    assert [step["status"] for step in record["steps"]] == ["succeeded"] + len(others) * ["skipped"]
    assert record["submission"]["url"] == sent["url"]
    calls = sum(service.calls.values())
    assert invoke(["status"]) == 0
    assert sent["url"] in capsys.readouterr().out
    assert sum(service.calls.values()) == calls, "a run that is over is not asked for again"
    assert invoke(["report", sent["run_id"]]) == 0
    card = (home / "runs" / sent["run_id"] / "card.html").read_text()
    assert "Finished: 1 step done, and no gate in this pipeline." in card


@pytest.mark.slow
def test_a_run_that_goes_on_as_a_new_job_shows_what_that_one_does(service, home, capsys):
    assert invoke(words("submit", "--yes", "--json")) == 0
    sent = told(capsys)
    run = service.history.step(
        sent["id"], "fingerprint", "Failed", "no source", start_time_utc=BEGAN
    )
    service.history.printed(run, b"looking\nno source\n")
    service.jobs[sent["id"]]["resource"]["properties"]["status"] = "Failed"
    assert invoke(["status"]) == 0
    said = capsys.readouterr().out
    assert "step `fingerprint` failed: no source" in said
    assert "  looking\n  no source" in said
    assert invoke(["resume", "--json"]) == 0
    again = told(capsys)
    assert again["run_id"] == sent["run_id"]
    assert list(service.jobs) == [sent["id"], again["id"]]
    assert invoke(["status", "--json"]) == 0
    record = told(capsys)
    assert (record["status"], record["error"]) == ("running", "")
    assert {step["status"] for step in record["steps"]} == {"pending"}, "nothing has begun there"
    assert record["submission"]["id"] == again["id"]
    service.history.step(again["id"], "fingerprint", "Running", start_time_utc=BEGAN)
    assert invoke(["status", "--json"]) == 0
    assert {step["status"] for step in told(capsys)["steps"]} == {"running", "pending"}


@pytest.mark.slow
def test_a_schedule_is_set_listed_paused_and_deleted(service, capsys):
    settings = [*WORKSPACE, WEEKLY]
    assert invoke(words("schedule", "set", "--yes", "--json", settings=settings)) == 0
    expected = {
        "id": "digits",
        "cron": "0 3 * * 1",
        "timezone": "W. Europe Standard Time",
        "enabled": True,
    }
    assert told(capsys)["schedules"] == [expected]
    assert invoke(words("schedule", "pause", settings=settings)) == 0
    capsys.readouterr()
    assert invoke(words("schedule", "list")) == 0
    assert capsys.readouterr().out == "digits  paused  0 3 * * 1  W. Europe Standard Time\n"
    for said in ("deleted\n", "there was none\n"):
        assert invoke(words("schedule", "delete")) == 0
        assert capsys.readouterr().out == said
    assert service.schedules == {}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (WORKSPACE, "the config has no schedule"),
        ([*WORKSPACE, "schedule={cron: 0 3 1 * *}"], "Azure ML ignores days of the month"),
        ([*WORKSPACE, "schedule={cron: 61 3 * * *}"], "minute: 61 is not in 0-59"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_and_nothing_is_sent(settings, says, service, capsys):
    assert invoke(words("schedule", "set", "--yes", settings=settings)) == 2
    assert says in capsys.readouterr().err
    assert service.calls == {}
