"""`rekindle schedule set|list|pause|delete CONFIG --platform P`: what a platform, or this
machine, starts by itself."""

import datetime
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rekindle.app.forecast import outlook
from rekindle.app.prepared import PreparedSubmission, prepare_for, prepare_here
from rekindle.app.run import windows
from rekindle.cli.options import (
    Decorated,
    Overrides,
    agree,
    of_config,
    platform,
    shared,
    tell,
    unasked,
    yes,
)
from rekindle.cli.submit import show
from rekindle.errors import Problem, RequestError, collected
from rekindle.outputs import Schedule, ScheduleDeleted, Schedules
from rekindle.platforms.api import SchedulesPipelines, platform_of, schedules_of
from rekindle.platforms.local.schedule import CronJob, Here
from rekindle.platforms.submission import Lowered
from rekindle.spec.cron import starts, unsteady
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec
from rekindle.spec.schedule import ScheduleSpec

_SHOWN = 3  # of the next starts
_platform = platform("Target platform; local is this machine.", here=True, required=True)


@click.group("schedule")
def command() -> None:
    """Create, list, pause or delete a schedule on a platform or on this machine."""


@command.command("set")
@of_config
@_platform
@yes
@click.option(
    "--print",
    "printed",
    is_flag=True,
    help="Only print what would be written on this machine.",
)
@shared
def set_(
    config: Path,
    overrides: Overrides,
    platform: str,
    yes: bool,
    printed: bool,
    home: Path,
    as_json: bool,
) -> None:
    """Create or update the schedule of CONFIG from its section `schedule`; a paused
    schedule resumes.

    On this machine (--platform local) it is a timer of your systemd or, where that does
    not answer, a line of your crontab, which starts `rekindle run CONFIG` in this folder,
    or `rekindle watch --once CONFIG` where CONFIG has `triggers`."""
    spec = load_target(config, overrides)
    if spec.schedule is None:
        fix = "add schedule: {cron: 0 3 * * 1, timezone: Europe/Berlin}"
        raise RequestError("the config has no schedule", where="schedule", fix=fix)
    if platform == "local":
        arguments = ["watch", "--once"] if spec.triggers else ["run"]
        arguments.append(str(config.absolute()))
        arguments += [f"--set={override}" for override in overrides]
        _set_here(spec, spec.schedule, arguments, home.absolute(), yes, printed, as_json)
        return
    if printed:
        raise RequestError(
            "--print shows what is written on this machine",
            where="--print",
            fix="use it with --platform local",
        )
    schedule = spec.schedule
    schedules = schedules_of(platform_of(platform, spec.platforms))
    prepared, lowered = _prepared(platform, schedules, spec, schedule, home)
    show(prepared.preview(), f"the schedule of {spec.name}")
    for line in (*outlook(prepared.plan), *_starts(schedule, lowered)):
        click.echo(line, err=True)
    agree(yes, f"Start it at `{schedule.cron}` ({schedule.timezone})?")
    prepared.refuse_early()
    created = schedules.set_schedule(prepared.definition, schedule, spec.name)
    _print_schedules(platform, [created], as_json)


def _of_a_config(function: Decorated) -> Decorated:
    """CONFIG with its overrides, and the platform that has its schedule."""
    return of_config(_platform(shared(function)))


@command.command("list")
@_of_a_config
def list_(config: Path, overrides: Overrides, platform: str, home: Path, as_json: bool) -> None:
    """List the schedules that rekindle set where CONFIG runs, those of other configs
    too."""
    spec = load_target(config, overrides)
    _print_schedules(platform, _scheduler(platform, spec).list_schedules(), as_json)


@command.command("pause")
@unasked
@_of_a_config
def pause(config: Path, overrides: Overrides, platform: str, home: Path, as_json: bool) -> None:
    """Pause the schedule; `schedule set` resumes it."""
    spec = load_target(config, overrides)
    paused = _scheduler(platform, spec).pause_schedule(spec.name)
    _print_schedules(platform, [paused], as_json)


@command.command("delete")
@unasked
@_of_a_config
def delete(config: Path, overrides: Overrides, platform: str, home: Path, as_json: bool) -> None:
    """Delete the schedule; its running runs continue."""
    spec = load_target(config, overrides)
    deleted = _scheduler(platform, spec).delete_schedule(spec.name)
    record = ScheduleDeleted(platform=platform, deleted=deleted)
    text = "deleted" if deleted else "there was none"
    tell(record, text, as_json)


def _scheduler(platform: str, spec: Spec) -> SchedulesPipelines | Here:
    """What starts the pipeline there by the clock."""
    if platform == "local":
        return Here()
    return schedules_of(platform_of(platform, spec.platforms))


def _set_here(
    spec: Spec,
    schedule: ScheduleSpec,
    arguments: Sequence[str],
    home: Path,
    yes: bool,
    printed: bool,
    as_json: bool,
) -> None:
    """Have this machine start `rekindle` with these arguments, or print how it would."""
    scheduler = Here(printed)
    lowered = scheduler.lowered(schedule)
    command = (sys.executable, "-m", "rekindle.cli.main", *arguments, f"--home={home}")
    job = CronJob(spec.name, command, Path.cwd(), home)
    # printed also where this machine could not keep them
    for path, text in scheduler.files(job, schedule).items():
        click.echo(f"{path}:\n{text.rstrip()}\n", err=not printed)
    if printed:
        return
    prepare_here(windows(spec)[-1], home)
    for line in (*_starts(schedule, lowered), *scheduler.remarks()):
        click.echo(line, err=True)
    agree(yes, f"Start it at `{schedule.cron}` ({schedule.timezone})?")
    _print_schedules("local", [scheduler.set_schedule(job, schedule)], as_json)


def _prepared(
    platform: str,
    schedules: SchedulesPipelines,
    spec: Spec,
    schedule: ScheduleSpec,
    home: Path,
) -> tuple[PreparedSubmission, Lowered]:
    """What is sent at each start, and the schedule as the platform takes it.

    RequestError with everything that is wrong with both."""
    problems: list[Problem] = []
    lowered = None
    with collected(problems):
        lowered = schedules.lowered(schedule)
    with collected(problems):
        prepared = prepare_for(platform, spec, home)
    if problems:
        raise RequestError(problems)
    assert lowered is not None
    return prepared, lowered


def _starts(schedule: ScheduleSpec, lowered: Lowered) -> Iterator[str]:
    """What the platform will do by itself, for the user who confirms the schedule."""
    now = datetime.datetime.now(datetime.UTC)
    head = "starts"
    for moment in starts(schedule.cron, schedule.timezone, now, _SHOWN):
        yield f"  {head:<9}{moment}"
        head = ""
    yield f"  overlap  a start that falls due while a run goes on {lowered.overlap}"
    yield f"  missed   starts that were missed are {lowered.missed}"
    unsteady_times = ", ".join(unsteady(schedule.cron, schedule.timezone, now))
    if unsteady_times:
        yield f"  clocks   {unsteady_times}: {lowered.clocks}"


def _print_schedules(platform: str, schedules: Sequence[Schedule], as_json: bool) -> None:
    if not (schedules or as_json):
        click.echo(f"rekindle set no schedule on {platform}", err=True)
        return
    lines = []
    for schedule in schedules:
        state = "on" if schedule.enabled else "paused"
        lines.append(f"{schedule.id}  {state}  {schedule.cron}  {schedule.timezone}")
    record = Schedules(platform=platform, schedules=tuple(schedules))
    tell(record, "\n".join(lines), as_json)
