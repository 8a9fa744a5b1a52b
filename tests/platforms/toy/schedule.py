"""A schedule is a file that nothing looks at."""

from __future__ import annotations

from pathlib import Path

from rekindle.outputs import Schedule
from rekindle.platforms.submission import Definition, Lowered
from rekindle.spec.schedule import ScheduleSpec
from tests.platforms.toy import ToySpec


def lowered(schedule: ScheduleSpec, place: ToySpec) -> Lowered:
    return Lowered(schedule.cron, schedule.timezone, "waits", "made up for")


def set_(definition: Definition, place: ToySpec, schedule: ScheduleSpec, name: str) -> Schedule:
    (Path(place.folder) / f"{name}.schedule").write_text(schedule.cron)
    return Schedule(name, schedule.cron, schedule.timezone, enabled=True)


def list_(place: ToySpec) -> tuple[Schedule, ...]:
    files = sorted(Path(place.folder).glob("*.schedule"))
    return tuple(Schedule(f.stem, f.read_text(), "UTC", enabled=True) for f in files)


def pause(place: ToySpec, name: str) -> Schedule:
    return Schedule(name, (Path(place.folder) / f"{name}.schedule").read_text(), "UTC", False)


def delete(place: ToySpec, name: str) -> bool:
    file = Path(place.folder) / f"{name}.schedule"
    there = file.exists()
    file.unlink(missing_ok=True)
    return there
