"""Schedules of this machine: a timer of the user's systemd or, where that does not answer, a line
of the user's crontab.

Both run `rekindle run CONFIG` in the folder where the schedule was set, and leave a start out while
the run before it goes on. What is written names what it was written for, and is found by that.
Authority: systemd.timer(5), systemd.time(7), systemd.service(5), crontab(5), flock(1)."""

import dataclasses
import datetime
import getpass
import os
import re
import shlex
import shutil
import subprocess
import zoneinfo
from collections.abc import Callable, Iterator
from pathlib import Path

from rekindle.errors import PlatformError, Problem, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms.submission import Lowered, no_schedule, problems_in
from rekindle.records import write_atomically
from rekindle.spec import cron
from rekindle.spec.schedule import ScheduleSpec

_DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_NOTE = re.compile(r"# rekindle (?P<name>\S+) at (?P<cron>[^()]+) \((?P<zone>\S+)\)")
_PAUSED = "# paused: "
_SYSTEMCTL = ("systemctl", "--user")
_UNITS = Path(__file__).parent  # templates of what systemd starts, and when
_problem = problems_in(__file__)


@dataclasses.dataclass(frozen=True)
class Job:
    """What starts: the config's name, a command, the folder it runs in, and the home."""

    name: str
    command: tuple[str, ...]
    folder: Path
    home: Path


class Here:
    """This machine's schedules, with the names that a `Platform` has for its own. What is only
    `printed` may be for another machine: where this one has neither, systemd's files."""

    def __init__(self, printed: bool = False) -> None:
        is_there, asked = shutil.which("systemctl") is not None, (*_SYSTEMCTL, "show-environment")
        self.systemd = is_there and _ended(*asked).returncode == 0
        self.lacking = [each for each in ("crontab", "flock") if shutil.which(each) is None]
        self.systemd = self.systemd or (printed and bool(self.lacking))

    def lowered(self, schedule: ScheduleSpec) -> Lowered:
        """The schedule in words of systemd or cron; UnsupportedError with what is not heeded."""
        if problems := list(self._problems(schedule)):
            raise UnsupportedError(problems)
        lines = on_calendar(schedule) if self.systemd else [cron.written(schedule.cron)]
        missed = "left out"
        if self.systemd and schedule.catch_up:
            missed = "made up for by one run, once the machine is up"
        return Lowered("\n".join(lines), schedule.timezone, "is left out", missed)

    def files(self, job: Job, schedule: ScheduleSpec) -> dict[str, str]:
        """What is written: systemd's files by their paths, or the line of crontab."""
        note = f"# rekindle {job.name} at {cron.written(schedule.cron)} ({schedule.timezone})"
        if not self.systemd:
            log, lock = (job.home / "schedules" / f"{job.name}.{end}" for end in ("log", "lock"))
            words = shlex.join(("flock", "-n", "-E", "0", str(lock), *job.command))
            run = f"cd {shlex.quote(str(job.folder))} && {words} >> {shlex.quote(str(log))} 2>&1"
            # cron takes % for the end of a line
            escaped = run.replace("%", r"\%")
            return {"crontab": f"{cron.written(schedule.cron)} {escaped} {note}"}
        values = {
            "name": job.name,
            "note": note,
            "persistent": str(schedule.catch_up).lower(),
            "folder": str(job.folder).replace("%", "%%"),
            "command": " ".join(map(_quoted, job.command)),
            "calendar": "\n".join(f"OnCalendar={each}" for each in on_calendar(schedule)),
        }
        texts = {end: _UNITS / f"rekindle.{end}" for end in ("service", "timer")}
        return {
            str(_unit(job.name, end)): text.read_text(encoding="utf-8").format(**values)
            for end, text in texts.items()
        }

    def remarks(self) -> Iterator[str]:
        """What people miss who expect the shell that they are in."""
        where = "~/.config/environment.d" if self.systemd else "the crontab"
        yield f"  shell    its variables, such as HF_TOKEN, reach no run; set them in {where}"
        user = getpass.getuser()
        linger = ("loginctl", "show-user", user, "--property=Linger", "--value")
        if self.systemd and shutil.which("loginctl") and _ended(*linger).stdout.strip() != "yes":
            yield f"  login    it starts while {user} is logged in; always: loginctl enable-linger"

    def set_schedule(self, job: Job, schedule: ScheduleSpec) -> Schedule:
        """Write the schedule of the config, or change it to this; one that is paused goes on."""
        self.lowered(schedule)
        files = self.files(job, schedule)
        if self.systemd:
            for path, text in files.items():
                write_atomically(path, text)
            _run(*_SYSTEMCTL, "daemon-reload")
            _run(*_SYSTEMCTL, "enable", f"rekindle-{job.name}.timer")
            _run(*_SYSTEMCTL, "restart", f"rekindle-{job.name}.timer")
            _rewrite(job.name, lambda _: None)  # of a time when systemd did not answer
        else:
            (job.home / "schedules").mkdir(parents=True, exist_ok=True)
            _rewrite(job.name, lambda _: None, files["crontab"])
        return next(each for each in self.list_schedules() if each.id == job.name)

    def list_schedules(self) -> tuple[Schedule, ...]:
        """All that rekindle set for this user, timers and lines, by name."""
        found = []
        for timer in _unit("", "timer").parent.glob("rekindle-*.timer"):
            if match := _NOTE.match(timer.read_text(encoding="utf-8")):
                asked = (*_SYSTEMCTL, "is-enabled", timer.name)
                enabled = self.systemd and _ended(*asked).returncode == 0
                found.append(Schedule(match["name"], match["cron"], match["zone"], enabled))
        for line in _crontab():
            if match := _NOTE.search(line):
                enabled = not line.startswith(_PAUSED)
                found.append(Schedule(match["name"], match["cron"], match["zone"], enabled))
        return tuple(sorted(found, key=lambda each: each.id))

    def pause_schedule(self, name: str) -> Schedule:
        """Start nothing until it is set again; PlatformError where there is none."""
        if _unit(name, "timer").exists():
            _run(*_SYSTEMCTL, "disable", "--now", f"rekindle-{name}.timer")
        _rewrite(name, lambda line: _PAUSED + line.removeprefix(_PAUSED))
        for each in self.list_schedules():
            if each.id == name:
                return each
        raise no_schedule(name)

    def delete_schedule(self, name: str) -> bool:
        """Whether there was one; a run that it started goes on."""
        there = any(each.id == name for each in self.list_schedules())
        if _unit(name, "timer").exists():
            if self.systemd:
                _run(*_SYSTEMCTL, "disable", "--now", f"rekindle-{name}.timer")
            for end in ("timer", "service"):
                _unit(name, end).unlink(missing_ok=True)
            if self.systemd:
                _run(*_SYSTEMCTL, "daemon-reload")
        _rewrite(name, lambda _: None)
        return there

    def _problems(self, schedule: ScheduleSpec) -> Iterator[Problem]:
        if schedule.overlap in ("queue", "parallel"):
            yield _problem("overlap")
        if self.systemd:
            return
        for program in self.lacking:
            yield _problem("lacking", program=program)
        if self.lacking:
            return
        if schedule.catch_up:
            yield _problem("catch_up")
        now, there = datetime.datetime.now(datetime.UTC), zoneinfo.ZoneInfo(schedule.timezone)
        year = [now + datetime.timedelta(days=n) for n in range(366)]
        if any(day.astimezone().utcoffset() != day.astimezone(there).utcoffset() for day in year):
            yield _problem("clock", zone=schedule.timezone)


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


def _crontab() -> list[str]:
    if shutil.which("crontab") is None:
        return []
    listed = _ended("crontab", "-l")
    if listed.returncode and "no crontab" not in listed.stderr:
        raise PlatformError(f"crontab -l: {listed.stderr.strip()}", fix="check that cron allows it")
    return listed.stdout.splitlines()


def _rewrite(name: str, change: Callable[[str], str | None], added: str = "") -> None:
    """The crontab with the lines of schedule `name` changed, or left out where that is None."""
    before = _crontab()
    after = [
        change(line) if (match := _NOTE.search(line)) and match["name"] == name else line
        for line in before
    ]
    kept = [line for line in (*after, added or None) if line is not None]
    if kept != before:
        _run("crontab", "-", text="".join(f"{line}\n" for line in kept))


def _run(*command: str, text: str = "") -> None:
    done = _ended(*command, text=text)
    if done.returncode:
        what = f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}"
        raise PlatformError(what, fix="correct it, and run the command again")


def _ended(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True)
