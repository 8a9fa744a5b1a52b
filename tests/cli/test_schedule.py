"""`schedule`: what is said before one is asked, and which requests are refused before anything is sent."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import re
import socket

import pytest

from rekindle.cli.main import invoke
from tests.support.cli_compile import PLATFORMS, ROOT, TRACKED
from tests.support.cli_submit import WORKSPACE
from tests.support.cli_submit import home as home

PLACES = {
    "azureml": WORKSPACE,
    "kubeflow": [
        "platforms.kubeflow.host=http://127.0.0.1:9",
        "platforms.kubeflow.timezone=Europe/Berlin",
    ],
    "sagemaker": ["platforms.sagemaker.region=eu-central-1"],
    "vertex": ["platforms.vertex.project=forge", "platforms.vertex.region=europe-west4"],
}
OVERLAP = {
    "azureml": "begins beside the run",
    "kubeflow": "waits until the run has ended",
    "sagemaker": "begins beside the run",
    "vertex": "is left out",
}


def words(platform, schedule, verb="set"):
    """The digits job on a platform, with a schedule."""
    settings = [*PLACES[platform], f"schedule={schedule}"]
    asked = [*PLATFORMS[platform][0], *TRACKED]
    asked += [word for setting in settings for word in ("--set", setting)]
    return ["schedule", verb, str(ROOT / "configs" / "digits.yaml"), "--platform", platform, *asked]


@pytest.fixture(autouse=True)
def sent(monkeypatch):
    """Addresses that anybody here tries to reach: none."""
    tried = []

    def connect(_, address):
        tried.append(address)
        raise ConnectionRefusedError(address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    yield
    assert tried == []


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_a_platform_will_do_is_said_before_one_is_asked(platform, capsys):
    assert invoke(words(platform, "{cron: 30 3 * * mon, timezone: Europe/Berlin}")) == 2
    said = capsys.readouterr().err
    assert "stdin is not a terminal, so this cannot be confirmed; nothing was changed" in said
    starts = re.findall(
        r"(Mon \d{4}-\d\d-\d\d) 03:30 Europe/Berlin = (\d{4}-\d\d-\d\d 0[12]:30) UTC\n", said
    )
    days = [dt.datetime.strptime(day, "%a %Y-%m-%d") for day, _ in starts]
    assert len(days) == 3
    assert {after - before for before, after in itertools.pairwise(days)} == {dt.timedelta(7)}
    assert f"overlap  a start that falls due while a run goes on {OVERLAP[platform]}" in said
    assert "missed   starts that were missed are left out after a pause" in said
    assert said.index("  starts") < said.index("stdin is not a terminal")


@pytest.mark.parametrize(("cron", "said"), [("30 2 * * *", True), ("0 4 * * *", False)])
def test_a_time_that_a_clock_skips_or_repeats_is_said_too(cron, said, capsys):
    assert invoke(words("kubeflow", f"{{cron: {cron}, timezone: Europe/Berlin}}")) == 2
    found = re.search(
        r"clocks +\d{4}-\d\d-\d\d 02:30 (is skipped|comes twice), .*: what is skipped is left out",
        capsys.readouterr().err,
    )
    assert bool(found) == said


BAD = [
    ("seven fields", "{cron: 0 0 3 * * 1 2027}", "has 7 fields", "leave seconds and the year out"),
    ("six fields", "{cron: 0 0 3 * * 1}", "has 6 fields", "leave seconds and the year out"),
    ("a name that is no time", "{cron: '@reboot'}", "1 field, not five", "write five fields"),
    (
        "the first of each month for Azure",
        "{cron: '@monthly'}",
        "ignores days of the month",
        "name days of the week",
    ),
    ("a Sunday called 7", "{cron: 0 3 * * 7}", "7 is not in 0-6", "write 0 for Sunday"),
    ("the last day", "{cron: 0 3 L * *}", "day of the month: l", "not every platform has L, W, #"),
    (
        "a second Friday",
        "{cron: '0 3 * * fri#2'}",
        "neither `*` nor a number",
        "not every platform has L, W, #",
    ),
    (
        "a weekday near a day",
        "{cron: 0 3 15W * *}",
        "neither `*` nor a number",
        "not every platform has L, W, #",
    ),
    (
        "a day that never comes",
        "{cron: 0 3 31 2 *}",
        "never comes",
        "name a day that the month has",
    ),
    (
        "days that crons read in two ways",
        "{cron: 0 3 */2 * 1}",
        "some crons want both",
        "write the days out",
    ),
    (
        "a zone that is none",
        "{cron: 0 3 * * 1, timezone: Berlin}",
        "no time zone `Berlin`",
        "such as Europe/Berlin",
    ),
    (
        "a zone of Windows'",
        "{cron: 0 3 * * 1, timezone: W. Europe Standard Time}",
        "no time zone",
        "such as Europe/Berlin",
    ),
    (
        "an alias without summer time",
        "{cron: 0 3 * * 1, timezone: EST}",
        "without daylight saving time",
        "name America/New_York",
    ),
    (
        "a zone that Windows lacks",
        "{cron: 0 3 * * 1, timezone: America/Vancouver}",
        "no name for the time zone",
        "with the same clock",
    ),
    (
        "a day of the month for Azure",
        "{cron: 0 3 1 * *}",
        "ignores days of the month",
        "name days of the week",
    ),
    ("an overlap nobody knows", "{cron: 0 3 * * 1, overlap: replace}", "schedule.overlap", "queue"),
    (
        "an overlap that Azure cannot do",
        "{cron: 0 3 * * 1, overlap: queue}",
        "submits a job when it is due",
        "overlap: parallel",
    ),
    (
        "catching up on Azure",
        "{cron: 0 3 * * 1, catch_up: true}",
        "makes up for no start",
        "leave it out",
    ),
    ("an unknown field", "{cron: 0 3 * * 1, when_unchanged: run}", "when_unchanged", ""),
    ("not a line", "{timezone: UTC}", "schedule.cron", ""),
    ("an empty name", "{cron: 0 3 * * 1} --set name=", "name", "lower-case letters"),
]


@pytest.mark.parametrize(
    ("schedule", "what", "fix"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_a_schedule_that_cannot_be_is_refused_with_its_fix_and_nothing_is_sent(
    schedule, what, fix, capsys
):
    schedule, _, more = schedule.partition(" --set ")
    asked = words("azureml", schedule) + (["--set", more] if more else [])
    assert invoke([*asked, "--yes", "--json"]) == 2
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert what in " ".join(f"{error['where']} {error['what']}" for error in errors)
    assert fix in " ".join(f"{error['what']} {error['fix']}" for error in errors)


def test_everything_that_is_wrong_with_the_job_and_its_schedule_is_said_at_once(capsys):
    asked = [
        "schedule",
        "set",
        str(ROOT / "configs" / "digits.yaml"),
        "--platform",
        "azureml",
        "--yes",
        "--json",
        "--set",
        "schedule={cron: 0 3 1 * *, catch_up: true}",
    ]
    assert invoke(asked) == 2
    where = [error["where"] for error in json.loads(capsys.readouterr().out)["errors"]]
    assert {"schedule.cron", "schedule.catch_up", "platforms.azureml.workspace"} <= set(where)
    assert len(where) == len(set(where))
