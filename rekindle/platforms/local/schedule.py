"""Schedules of this machine: timers of the user's systemd.

A timer runs `rekindle run CONFIG` in the folder where the schedule was set, and leaves a start out
while the run before it goes on. What is written names what it was written for, and is found by
that. Authority: systemd.timer(5), systemd.time(7), systemd.service(5)."""

import dataclasses
import getpass
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rekindle.errors import PlatformError, Problem, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms.failures import no_schedule
from rekindle.platforms.submission import Lowered
from rekindle.records import write_atomically
from rekindle.spec import cron
from rekindle.spec.schedule import ScheduleSpec

_DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_NOTE = re.compile(r"# rekindle (?P<name>\S+) at (?P<cron>[^()]+) \((?P<zone>\S+)\)")
_SYSTEMCTL = ("systemctl", "--user")
_SERVICE = """[Unit]
Description=rekindle run {name}

[Service]
Type=oneshot
WorkingDirectory={folder}
ExecStart={command}
SuccessExitStatus=3
"""
_TIMER = """{note}
[Unit]
Description=starts rekindle run {name}

[Timer]
{calendar}
Persistent={persistent}

[Install]
WantedBy=timers.target
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """What starts: the config's name, a command, and the folder it runs in."""

    name: str
    command: tuple[str, ...]
    folder: Path


class Here:
    """This machine's schedules, with the names that a `Platform` has for its own. What is only
    `printed` may be for another machine, so it needs no systemd here."""

    def __init__(self, printed: bool = False) -> None:
        is_there = shutil.which("systemctl") is not None
        self.answers = is_there and _ended(*_SYSTEMCTL, "show-environment").returncode == 0
        self.printed = printed

    def lowered(self, schedule: ScheduleSpec) -> Lowered:
        """The schedule in words of systemd; UnsupportedError with what is not heeded."""
        if problems := list(self._problems(schedule)):
            raise UnsupportedError(problems)
        once = "made up for by one run, once the machine is up"
        missed = once if schedule.catch_up else "left out"
        expression = "\n".join(on_calendar(schedule))
        return Lowered(expression, schedule.timezone, "is left out", missed)

    def files(self, job: Job, schedule: ScheduleSpec) -> dict[str, str]:
        """What is written: systemd's files by their paths."""
        note = f"# rekindle {job.name} at {cron.written(schedule.cron)} ({schedule.timezone})"
        values = {
            "name": job.name, "note": note, "persistent": str(schedule.catch_up).lower(),
            "folder": str(job.folder).replace("%", "%%"),
            "command": " ".join(map(_quoted, job.command)),
            "calendar": "\n".join(f"OnCalendar={each}" for each in on_calendar(schedule)),
        }  # fmt: skip
        texts = {"service": _SERVICE, "timer": _TIMER}
        return {str(_unit(job.name, end)): text.format(**values) for end, text in texts.items()}

    def remarks(self) -> Iterator[str]:
        """What people miss who expect the shell that they are in."""
        where = "~/.config/environment.d"
        yield f"  shell    its variables, such as HF_TOKEN, reach no run; set them in {where}"
        user = getpass.getuser()
        linger = ("loginctl", "show-user", user, "--property=Linger", "--value")
        if shutil.which("loginctl") and _ended(*linger).stdout.strip() != "yes":
            yield f"  login    it starts while {user} is logged in; always: loginctl enable-linger"

    def set_schedule(self, job: Job, schedule: ScheduleSpec) -> Schedule:
        """Write the schedule of the config, or change it to this; one that is paused goes on."""
        self.lowered(schedule)
        for path, text in self.files(job, schedule).items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(Path(path), text)
        _run("daemon-reload")
        _run("enable", f"rekindle-{job.name}.timer")
        _run("restart", f"rekindle-{job.name}.timer")
        return next(each for each in self.list_schedules() if each.id == job.name)

    def list_schedules(self) -> tuple[Schedule, ...]:
        """All that rekindle set for this user, by name."""
        found = []
        for timer in _unit("", "timer").parent.glob("rekindle-*.timer"):
            if match := _NOTE.match(timer.read_text(encoding="utf-8")):
                asked = (*_SYSTEMCTL, "is-enabled", timer.name)
                enabled = self.answers and _ended(*asked).returncode == 0
                found.append(Schedule(match["name"], match["cron"], match["zone"], enabled))
        return tuple(sorted(found, key=lambda each: each.id))

    def pause_schedule(self, name: str) -> Schedule:
        """Start nothing until it is set again; PlatformError where there is none."""
        if not _unit(name, "timer").exists():
            raise no_schedule(name)
        _run("disable", "--now", f"rekindle-{name}.timer")
        return next(each for each in self.list_schedules() if each.id == name)

    def delete_schedule(self, name: str) -> bool:
        """Whether there was one; a run that it started goes on."""
        there = _unit(name, "timer").exists()
        if there and self.answers:
            _run("disable", "--now", f"rekindle-{name}.timer")
        for end in ("timer", "service"):
            _unit(name, end).unlink(missing_ok=True)
        if there and self.answers:
            _run("daemon-reload")
        return there

    def _problems(self, schedule: ScheduleSpec) -> Iterator[Problem]:
        if schedule.overlap in ("queue", "parallel"):
            what = "this machine leaves a start out while the run before it goes on"
            yield Problem(what, "schedule.overlap", "write schedule.overlap: skip")
        if not (self.answers or self.printed):
            fix = "log in where systemd runs, or have what starts jobs here run "
            fix += "`rekindle watch CONFIG --once`"
            yield Problem("there is no systemd of this user here", "", fix)


def on_calendar(schedule: ScheduleSpec) -> Iterator[str]:
    """The line of cron as systemd has it: two where it names days of the month and of the week, of
    which either fits. `0 3 * * 1` is ``Mon *-*-* 03:00:00 UTC``."""
    minutes, hours, days, months, weekdays = (
        "*" if field is None else ",".join(f"{number:02}" for number in field)
        for field in cron.values(schedule.cron)
    )
    time = f"{hours}:{minutes}:00 {schedule.timezone}"
    if weekdays != "*":
        yield f"{','.join(_DAYS[int(day)] for day in weekdays.split(','))} *-{months}-* {time}"
    if days != "*" or weekdays == "*":
        yield f"*-{months}-{days} {time}"


def _quoted(word: str) -> str:
    """A word of ExecStart."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"'


def _unit(name: str, end: str) -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config, "systemd", "user", f"rekindle-{name}.{end}")


def _run(*words: str) -> None:
    done = _ended(*_SYSTEMCTL, *words)
    if done.returncode:
        what = f"{shlex.join((*_SYSTEMCTL, *words))}: {(done.stderr or done.stdout).strip()}"
        raise PlatformError(what, fix="correct it, and run the command again")


def _ended(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)
