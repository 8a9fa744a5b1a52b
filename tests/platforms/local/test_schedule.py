"""Schedules of this machine. The calendar of timers is held against systemd's own reading of it; a line of crontab is
run as cron runs it: by sh, without this shell's variables. `crontab` and `systemctl --user` are played, since neither
answers where tests run."""

import datetime
import fcntl
import os
import re
import shutil
import subprocess
import sys

import pytest

from rekindle.cli.main import invoke
from rekindle.platforms.local.schedule import on_calendar
from rekindle.spec.cron import next_times, written
from rekindle.spec.schedule import ScheduleSpec
from tests.quick import first

REKINDLE = [sys.executable, "-m", "rekindle.cli.main"]
ANALYZE = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
LINES = (
    "0 3 * * 1",
    "*/20 9-17 * * mon-fri",
    "30 4 1,15 * *",
    "0 0 1 1 *",
    "15 6 13 * 5",
    "0 12 * 2-4 0,6",
    "5 * * * *",
    "59 23 28-31 * *",
    "0 3 29 2 *",
)
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
# what `crontab` says and keeps, after cronie's and Debian's; the file is named by the test
CRONTAB = """#!/bin/sh
case "$*" in
    -l) if [ -f "$CRONTAB" ]; then cat "$CRONTAB"; else echo "no crontab for ada" >&2; exit 1; fi ;;
    -) cat > "$CRONTAB" ;;
    *) echo "usage error: $*" >&2; exit 1 ;;
esac
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
    """A user in a folder with a config, who has a crontab or a systemd."""

    def __init__(self, folder, systemd=False):
        self.folder = folder / "100% ours"
        self.folder.mkdir()
        (self.folder / "p.py").write_text(PIPELINE)
        (self.folder / "c.yaml").write_text(CONFIG)
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (
            ("crontab", CRONTAB),
            ("systemctl", SYSTEMCTL if systemd else "#!/bin/sh\nexit 1\n"),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.crontab, self.asked = folder / "crontab.txt", folder / "asked.txt"
        self.units = folder / "config/systemd/user"
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:/usr/bin:/bin",
            "CRONTAB": str(self.crontab),
            "SYSTEMCTL": str(self.asked),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "TZ": "Europe/Berlin",
        }

    def schedule(self, verb, *words):
        command = [*REKINDLE, "schedule", verb, "c.yaml", "--platform=local", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert "Traceback" not in done.stderr
        return done

    def as_cron(self, line):
        """Start the process of a line of the crontab, as cron does."""
        command = line.split(" ", 5)[5].replace(r"\%", "%")
        environment = {
            "HOME": str(self.folder),
            "PATH": "/usr/bin:/bin",
            "SHELL": "/bin/sh",
            "LOGNAME": "ada",
        }
        paths = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        return subprocess.Popen(["/bin/sh", "-c", command], env={**environment, **paths}, cwd="/")

    def runs(self):
        return sorted(self.folder.glob(".rekindle/runs/*/run.json"))


@pytest.mark.slow
def test_a_line_of_the_crontab_runs_the_config_again_and_again(tmp_path):
    desk = Desk(tmp_path)
    desk.crontab.write_text("MAILTO=ada\n0 1 * * * backup\n")
    shown = desk.schedule("set", "--print")
    assert (shown.returncode, desk.crontab.read_text()) == (0, "MAILTO=ada\n0 1 * * * backup\n")
    unsure = desk.schedule("set")
    assert unsure.returncode == 2
    assert desk.crontab.read_text() == "MAILTO=ada\n0 1 * * * backup\n"

    done = desk.schedule("set", "--yes")
    assert done.returncode == 0, done.stderr
    assert "starts   " in done.stderr
    *others, line = desk.crontab.read_text().splitlines()
    assert others == ["MAILTO=ada", "0 1 * * * backup"]
    assert line.startswith(f"{written('30 4 * * 1-5')} cd ")
    assert line in shown.stdout
    for count in (1, 2):  # the second one finds everything in the cache
        assert desk.as_cron(line).wait(60) == 0, (
            desk.folder / ".rekindle/schedules/hello.log"
        ).read_text()
        assert len(desk.runs()) == count
    with (desk.folder / ".rekindle/schedules/hello.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a run does that goes on
        assert desk.as_cron(line).wait(60) == 0
    assert len(desk.runs()) == 2

    assert "hello  on  30 4 * * 1-5  Europe/Berlin" in desk.schedule("list").stdout
    assert "hello  paused" in desk.schedule("pause").stdout
    assert desk.crontab.read_text().splitlines()[-1].startswith("# paused: 30 4")
    assert "hello  on" in desk.schedule("set", "--yes").stdout
    assert desk.crontab.read_text().splitlines() == [*others, line]
    assert desk.schedule("delete").stdout == "deleted\n"
    assert desk.crontab.read_text().splitlines() == others
    assert desk.schedule("delete").stdout == "there was none\n"
    assert desk.schedule("pause").returncode == 1


@pytest.mark.parametrize(
    ("field", "says"),
    first(
        1,
        [
            ("overlap=parallel", "leaves a start out"),
            ("catch_up=true", "knows no start that it missed"),
            ("timezone=Asia/Tokyo", "not that of Asia/Tokyo"),
        ],
    ),
)
def test_what_cron_cannot_do_is_refused_before_anything_is_written(tmp_path, field, says):
    desk = Desk(tmp_path)
    done = desk.schedule("set", "--yes", "--set", f"schedule.{field}")
    assert (done.returncode, desk.crontab.exists()) == (2, False)
    assert says in done.stderr


@pytest.mark.slow
def test_a_timer_of_systemd_is_set_paused_and_deleted(tmp_path):
    desk = Desk(tmp_path, systemd=True)
    desk.crontab.write_text("0 1 * * * backup\n0 3 * * * x # rekindle hello at 0 3 * * * (UTC)\n")
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
        "daemon-reload",
        "enable rekindle-hello.timer",
        "restart rekindle-hello.timer",
    ]
    assert desk.crontab.read_text() == "0 1 * * * backup\n"  # or both would start it
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


def test_what_is_only_printed_needs_neither_systemd_nor_crontab(tmp_path, monkeypatch, capsys):
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
    assert said.count("there is no systemd of this user here") == 2
    assert "follows this machine's clock" not in said, "there is no crontab to have one"
