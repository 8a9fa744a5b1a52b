"""Schedules of this machine. The calendar of timers is held against systemd's own reading of it. `systemctl --user` is
played, since none answers where tests run."""

import datetime
import os
import re
import shutil
import subprocess
import sys

import pytest

from rekindle.cli.main import invoke
from rekindle.platforms.local.schedule import on_calendar
from rekindle.spec.cron import next_times
from rekindle.spec.schedule import ScheduleSpec

REKINDLE = [sys.executable, "-m", "rekindle.cli.main"]
ANALYZE = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
LINES = (
    "0 3 * * 1", "*/20 9-17 * * mon-fri", "30 4 1,15 * *", "0 0 1 1 *", "15 6 13 * 5", "0 12 * 2-4 0,6", "5 * * * *",
    "59 23 28-31 * *", "0 3 29 2 *",
)  # fmt: skip
NOW = datetime.datetime(2026, 2, 3, 4, 5, tzinfo=datetime.UTC)
PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def say() -> str:
    return "it ran"

@dsl.pipeline(name="hello")
def hello():
    say()
"""
CONFIG = """
name: hello
pipeline: p.py:hello
schedule: {cron: "30 4 * * 1-5", timezone: Europe/Berlin}
"""
# a systemd of the user that reads units from where systemd does, and links what is enabled
SYSTEMCTL = """#!/bin/sh
units="$XDG_CONFIG_HOME/systemd/user"
[ "$1" = --user ] || exit 1
shift
echo "$*" >> "$SYSTEMCTL"
last=$(eval echo "\\${$#}")
case "$*" in
    show-environment|daemon-reload) ;;
    is-enabled*) [ -e "$units/timers.target.wants/$last" ] ;;
    "enable "*|"restart "*) [ -f "$units/$last" ] || { echo "Unit $last does not exist." >&2; exit 1; }
        mkdir -p "$units/timers.target.wants"; ln -sf "../$last" "$units/timers.target.wants/$last" ;;
    "disable --now "*) rm -f "$units/timers.target.wants/$last" ;;
    *) echo "Unknown command verb $1." >&2; exit 1 ;;
esac
"""


@ANALYZE
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kolkata"])
@pytest.mark.parametrize("line", LINES)
def test_systemd_starts_when_the_line_of_cron_does(line, zone):
    expressions = [*on_calendar(ScheduleSpec(cron=line, timezone=zone))]
    words = [
        "systemd-analyze",
        "calendar",
        "--iterations=12",
        f"--base-time={NOW:%Y-%m-%d %H:%M:%S} UTC",
    ]
    done = subprocess.run(
        [*words, *expressions], env={**os.environ, "TZ": "UTC"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # of a zone other than the machine's, systemd shows the time there first
    found = re.findall(r"(?:Next elapse|Iter\. #\d+|\(in UTC\)): \w{3} (\S+ \S+) UTC", done.stdout)
    theirs = sorted({datetime.datetime.fromisoformat(f"{each}+00:00") for each in found})
    ours = [moment.astimezone(datetime.UTC) for moment in next_times(line, zone, NOW, 12)]
    assert theirs[: len(ours)] == ours[: len(theirs)]
    assert min(len(ours), len(theirs)) > 1


class Desk:
    """A user in a folder with a config, who has a systemd."""

    def __init__(self, folder):
        self.folder = folder / "100% ours"
        self.folder.mkdir()
        (self.folder / "p.py").write_text(PIPELINE)
        (self.folder / "c.yaml").write_text(CONFIG)
        programs = folder / "bin"
        programs.mkdir()
        (programs / "systemctl").write_text(SYSTEMCTL)
        (programs / "systemctl").chmod(0o755)
        self.asked = folder / "asked.txt"
        self.units = folder / "config/systemd/user"
        self.environment = {
            **os.environ, "PATH": f"{programs}:/usr/bin:/bin", "SYSTEMCTL": str(self.asked),
            "XDG_CONFIG_HOME": str(folder / "config"), "TZ": "Europe/Berlin",
        }  # fmt: skip

    def schedule(self, verb, *words):
        command = [*REKINDLE, "schedule", verb, "c.yaml", "--platform=local", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert "Traceback" not in done.stderr
        return done


def test_what_a_timer_cannot_do_is_refused_before_anything_is_written(tmp_path):
    desk = Desk(tmp_path)
    done = desk.schedule("set", "--yes", "--set", "schedule.overlap=parallel")
    assert (done.returncode, desk.units.exists()) == (2, False)
    assert "leaves a start out" in done.stderr


def test_a_timer_of_systemd_is_set_paused_and_deleted(tmp_path):
    desk = Desk(tmp_path)
    unsure = desk.schedule("set")
    assert (unsure.returncode, desk.units.exists()) == (2, False)
    done = desk.schedule(
        "set", "--yes", "--set", "schedule.catch_up=true", "--set", "schedule.timezone=Asia/Tokyo"
    )
    assert done.returncode == 0, done.stderr
    assert "hello  on  30 4 * * 1-5  Asia/Tokyo" in done.stdout
    timer, service = (desk.units / f"rekindle-hello.{end}" for end in ("timer", "service"))
    assert (
        "OnCalendar=Mon,Tue,Wed,Thu,Fri *-*-* 04:30:00 Asia/Tokyo\nPersistent=true"
        in timer.read_text()
    )
    assert "--set=schedule.catch_up=true" in service.read_text()
    assert desk.asked.read_text().splitlines()[-4:-1] == [
        "daemon-reload", "enable rekindle-hello.timer", "restart rekindle-hello.timer",
    ]  # fmt: skip
    if shutil.which("systemd-analyze"):
        words = ["systemd-analyze", "verify", "--man=no", str(service), str(timer)]
        checked = subprocess.run(words, capture_output=True, text=True)
        assert "rekindle" not in checked.stderr, checked.stderr
    assert "hello  paused" in desk.schedule("pause").stdout
    assert "hello  on" in desk.schedule("set", "--yes").stdout
    assert "Persistent=false" in timer.read_text()
    assert desk.schedule("delete").stdout == "deleted\n"
    assert not [*desk.units.glob("*rekindle*")]
    assert desk.schedule("list").stdout == ""
    assert desk.schedule("delete").stdout == "there was none\n"
    assert desk.schedule("pause").returncode == 1


def test_what_is_only_printed_needs_no_systemd(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "p.py").write_text(PIPELINE)
    (tmp_path / "c.yaml").write_text(CONFIG)
    words = ["schedule", "set", "c.yaml", "--platform", "local"]
    assert invoke([*words, "--print"]) == 0
    assert "OnCalendar=Mon,Tue,Wed,Thu,Fri *-*-* 04:30:00 Europe/Berlin" in capsys.readouterr().out
    watched = ["--set", "triggers={new_rows: 50}"]
    assert invoke([*words, "--print", *watched]) == 2  # nothing is there that could be watched
    assert "set data.source" in capsys.readouterr().err
    (tmp_path / "r.jsonl").write_text('{"text": "a", "label": "b"}')
    assert invoke([*words, "--print", *watched, "--set", "data.source=r.jsonl"]) == 0
    said = capsys.readouterr().out
    assert '"watch" "--once"' in said
    assert "SuccessExitStatus=3" in said
    assert invoke([*words, "--yes"]) == 2
    said = capsys.readouterr().err
    assert said.count("there is no systemd of this user here") == 1
