"""Schedules of this machine: a timer of the user's systemd or, where that does not
answer, a line of the user's crontab.

Both run `rekindle run CONFIG` in the folder where the schedule was set, and leave a start
out while the run before it goes on. What is written names what it was written for, and is
found by that. Authority: systemd.timer(5), systemd.time(7), systemd.service(5),
crontab(5), flock(1)."""

import dataclasses
import datetime
import getpass
import os
import re
import shlex
import shutil
import subprocess
import zoneinfo
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rekindle.errors import PlatformError, Problem, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms.submission import Lowered, no_schedule
from rekindle.records import write_atomically
from rekindle.spec import cron
from rekindle.spec.schedule import ScheduleSpec

_DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_NOTE = re.compile(r"# rekindle (?P<name>\S+) at (?P<cron>[^()]+) \((?P<zone>\S+)\)")
_PAUSED = "# paused: "
_SYSTEMCTL = ("systemctl", "--user")
_UNITS = Path(__file__).parent  # templates of what systemd starts, and when


@dataclasses.dataclass(frozen=True)
class CronJob:
    """What starts: the config's name, a command, the folder it runs in, and the home."""

    name: str
    command: tuple[str, ...]
    folder: Path
    home: Path


class Here:
    """This machine's schedules, with the names that a `Platform` has for its own. What is
    only `printed` may be for another machine: where this one has neither, systemd's
    files."""

    def __init__(self, printed: bool = False) -> None:
        self.missing_programs = []
        for program in ("crontab", "flock"):
            if shutil.which(program) is None:
                self.missing_programs.append(program)
        self.systemd = _has_systemd() or (printed and bool(self.missing_programs))

    def lowered(self, schedule: ScheduleSpec) -> Lowered:
        """The schedule in words of systemd or cron; UnsupportedError with what is not
        heeded."""
        problems = list(self._problems(schedule))
        if problems:
            raise UnsupportedError(problems)
        lines = [cron.written(schedule.cron)]
        if self.systemd:
            lines = list(on_calendar(schedule))
        missed = "left out"
        if self.systemd and schedule.catch_up:
            missed = "made up for by one run, once the machine is up"
        return Lowered("\n".join(lines), schedule.timezone, "is left out", missed)

    def files(self, job: CronJob, schedule: ScheduleSpec) -> dict[str, str]:
        """What is written: systemd's files by their paths, or the line of crontab."""
        line = cron.written(schedule.cron)
        note = f"# rekindle {job.name} at {line} ({schedule.timezone})"
        if not self.systemd:
            return {"crontab": f"{line} {_cron_command(job)} {note}"}
        calendar = [f"OnCalendar={expression}" for expression in on_calendar(schedule)]
        values = {
            "name": job.name,
            "note": note,
            "persistent": str(schedule.catch_up).lower(),
            "folder": str(job.folder).replace("%", "%%"),  # systemd's specifiers begin with one
            "command": " ".join(map(_quoted, job.command)),
            "calendar": "\n".join(calendar),
        }
        files = {}
        for suffix in ("service", "timer"):
            template = (_UNITS / f"rekindle.{suffix}").read_text(encoding="utf-8")
            files[str(_unit(job.name, suffix))] = template.format(**values)
        return files

    def remarks(self) -> Iterator[str]:
        """The differences from the shell that the user is in, as lines to print."""
        where = "~/.config/environment.d" if self.systemd else "the crontab"
        yield f"  shell    its variables, such as HF_TOKEN, reach no run; set them in {where}"
        user = getpass.getuser()
        if not self.systemd or not shutil.which("loginctl"):
            return
        linger = ("loginctl", "show-user", user, "--property=Linger", "--value")
        if _ended(*linger).stdout.strip() != "yes":
            yield f"  login    it starts while {user} is logged in; always: loginctl enable-linger"

    def set_schedule(self, job: CronJob, schedule: ScheduleSpec) -> Schedule:
        """Write the schedule of the config, or change it to this; one that is paused goes
        on."""
        self.lowered(schedule)  # which refuses what cannot be heeded
        files = self.files(job, schedule)
        if self.systemd:
            for path, text in files.items():
                write_atomically(path, text)
            _run(*_SYSTEMCTL, "daemon-reload")
            _run(*_SYSTEMCTL, "enable", f"rekindle-{job.name}.timer")
            _run(*_SYSTEMCTL, "restart", f"rekindle-{job.name}.timer")
            _rewrite_crontab(job.name, _dropped)  # of a time when systemd did not answer
        else:
            (job.home / "schedules").mkdir(parents=True, exist_ok=True)
            _rewrite_crontab(job.name, _dropped, files["crontab"])
        return next(other for other in self.list_schedules() if other.id == job.name)

    def list_schedules(self) -> tuple[Schedule, ...]:
        """All that rekindle set for this user, timers and lines, by name."""
        schedules = []
        for timer in _unit("", "timer").parent.glob("rekindle-*.timer"):
            note = _NOTE.match(timer.read_text(encoding="utf-8"))
            if note:
                is_enabled = (*_SYSTEMCTL, "is-enabled", timer.name)
                enabled = self.systemd and _ended(*is_enabled).returncode == 0
                schedules.append(Schedule(note["name"], note["cron"], note["zone"], enabled))
        for line in _crontab():
            note = _NOTE.search(line)
            if note:
                enabled = not line.startswith(_PAUSED)
                schedules.append(Schedule(note["name"], note["cron"], note["zone"], enabled))
        return tuple(sorted(schedules, key=lambda schedule: schedule.id))

    def pause_schedule(self, name: str) -> Schedule:
        """Start nothing until it is set again; PlatformError where there is none."""
        if _unit(name, "timer").exists():
            _run(*_SYSTEMCTL, "disable", "--now", f"rekindle-{name}.timer")
        _rewrite_crontab(name, _paused)
        for schedule in self.list_schedules():
            if schedule.id == name:
                return schedule
        raise no_schedule(name)

    def delete_schedule(self, name: str) -> bool:
        """Delete it; False where there was none. A run that it started goes on."""
        is_there = any(schedule.id == name for schedule in self.list_schedules())
        if _unit(name, "timer").exists():
            if self.systemd:
                _run(*_SYSTEMCTL, "disable", "--now", f"rekindle-{name}.timer")
            for suffix in ("timer", "service"):
                _unit(name, suffix).unlink(missing_ok=True)
            if self.systemd:
                _run(*_SYSTEMCTL, "daemon-reload")
        _rewrite_crontab(name, _dropped)
        return is_there

    def _problems(self, schedule: ScheduleSpec) -> Iterator[Problem]:
        if schedule.overlap in ("queue", "parallel"):
            yield Problem(
                "this machine leaves a start out while the run before it goes on",
                "schedule.overlap",
                "write schedule.overlap: skip",
            )
        if self.systemd:
            return
        for program in self.missing_programs:
            yield Problem(
                f"there is no systemd of this user here, and no {program}",
                fix=f"log in where systemd runs, or install {program}",
            )
        if self.missing_programs:
            return
        if schedule.catch_up:
            yield Problem(
                "crontab knows no start that it missed",
                "schedule.catch_up",
                "leave it out, or log in where systemd runs",
            )
        if not _is_own_clock(schedule.timezone):
            yield Problem(
                f"crontab follows this machine's clock, which is not that of {schedule.timezone}",
                "schedule.timezone",
                "name the machine's zone, or log in where systemd runs",
            )


def _has_systemd() -> bool:
    """Whether a systemd of this user answers."""
    if shutil.which("systemctl") is None:
        return False
    return _ended(*_SYSTEMCTL, "show-environment").returncode == 0


def _cron_command(job: CronJob) -> str:
    """What a line of crontab runs: flock leaves it out while the run before it goes
    on."""
    log = job.home / "schedules" / f"{job.name}.log"
    lock = job.home / "schedules" / f"{job.name}.lock"
    command = shlex.join(("flock", "-n", "-E", "0", str(lock), *job.command))
    folder = shlex.quote(str(job.folder))
    # cron takes % for the end of a line
    return f"cd {folder} && {command} >> {shlex.quote(str(log))} 2>&1".replace("%", r"\%")


def _is_own_clock(timezone: str) -> bool:
    """Whether this machine's clock is that of the zone on each day of the next year: two
    zones may differ in summer only."""
    zone = zoneinfo.ZoneInfo(timezone)
    now = datetime.datetime.now(datetime.UTC)
    for number in range(366):
        day = now + datetime.timedelta(days=number)
        if day.astimezone().utcoffset() != day.astimezone(zone).utcoffset():
            return False
    return True


def on_calendar(schedule: ScheduleSpec) -> Iterator[str]:
    """The line of cron as systemd has it: two where it names days of the month and of the
    week, of which either fits. `0 3 * * 1` is ``Mon *-*-* 03:00:00 UTC``."""
    fields = map(_calendar_field, cron.values(schedule.cron))
    minutes, hours, days, months, weekdays = fields
    time = f"{hours}:{minutes}:00 {schedule.timezone}"
    if weekdays != "*":
        names = ",".join(_DAYS[int(day)] for day in weekdays.split(","))
        yield f"{names} *-{months}-* {time}"
    if days != "*" or weekdays == "*":
        yield f"*-{months}-{days} {time}"


def _calendar_field(numbers: Sequence[int] | None) -> str:
    if numbers is None:
        return "*"
    return ",".join(f"{number:02}" for number in numbers)


def _quoted(word: str) -> str:
    """A word of ExecStart."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"'


def _unit(name: str, suffix: str) -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config, "systemd", "user", f"rekindle-{name}.{suffix}")


def _crontab() -> list[str]:
    if shutil.which("crontab") is None:
        return []
    listed = _ended("crontab", "-l")
    if listed.returncode and "no crontab" not in listed.stderr:  # which is not an error
        raise PlatformError(f"crontab -l: {listed.stderr.strip()}", fix="check that cron allows it")
    return listed.stdout.splitlines()


def _dropped(line: str) -> None:
    return None


def _paused(line: str) -> str:
    return _PAUSED + line.removeprefix(_PAUSED)


def _rewrite_crontab(name: str, changed: Callable[[str], str | None], added_line: str = "") -> None:
    """Write the crontab with the lines of schedule `name` changed, or left out where that
    is None; nothing is written where nothing changes."""
    lines_before = _crontab()
    lines = []
    for line in lines_before:
        note = _NOTE.search(line)
        new_line: str | None = line
        if note and note["name"] == name:
            new_line = changed(line)
        if new_line is not None:
            lines.append(new_line)
    if added_line:
        lines.append(added_line)
    if lines != lines_before:
        _run("crontab", "-", text="".join(f"{line}\n" for line in lines))


def _run(*command: str, text: str = "") -> None:
    done = _ended(*command, text=text)
    if done.returncode:
        message = f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}"
        raise PlatformError(message, fix="correct it, and run the command again")


def _ended(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True)
