"""`rekindle submit CONFIG --platform P`: compiles, shows what will be made where, asks, sends it
once, and says where to look."""

import dataclasses
import functools
from pathlib import Path

import click

from rekindle.app.follow import wait_until_ended
from rekindle.app.forecast import outlook
from rekindle.app.progress import Progress
from rekindle.app.runs import summary
from rekindle.app.submit import submit_spec
from rekindle.cli.options import Overrides, agree, answer, of_config, platform, shared, wait, yes
from rekindle.cli.run import conclude
from rekindle.outputs import Planned, Submitted
from rekindle.platforms.submission import SubmissionPreview, SubmittedRun
from rekindle.records import RunRecord
from rekindle.spec.load import load_target


@click.command("submit")
@of_config
@platform("Target platform.", required=True)
@yes
@wait
@click.option(
    "--token",
    default=None,
    metavar="TEXT",
    help="Idempotency key: the same config and token are submitted once. Default: "
    "continue an interrupted submission, else a new key.",
)
@shared
def command(
    config: Path,
    overrides: Overrides,
    platform: str,
    yes: bool,
    wait: bool,
    token: str | None,
    home: Path,
    as_json: bool,
) -> int:
    """Compile CONFIG, show the steps and their machines, ask, and submit it to the platform."""
    spec = load_target(config, overrides)
    record, placed, outline = submit_spec(
        spec, platform, home, token, functools.partial(agreed, yes)
    )
    return told(record, placed, home, wait, as_json, outline)


def agreed(yes: bool, outline: SubmissionPreview, plan: Planned | None) -> None:
    """Show what will be made and what it costs; RequestError unless the user agrees."""
    show(outline, outline.id)
    for line in outlook(plan):
        click.echo(line, err=True)
    agree(yes, "Submit it?")


def told(
    record: RunRecord,
    placed: SubmittedRun,
    home: Path,
    wait: bool,
    as_json: bool,
    outline: SubmissionPreview | None = None,
) -> int:
    """Say where the run is and what to do next, or stay until it is over: the exit code."""
    submission = record.submission
    assert submission is not None
    if wait:
        return _waited(record, home, as_json)
    if as_json:
        answer(
            Submitted(
                run_id=record.run_id,
                platform=record.platform,
                token=submission.token,
                **dataclasses.asdict(placed),
                where=outline.where if outline else "",
                steps=outline.steps if outline else (),
            )
        )
        return 0
    verb = "submitted" if placed.anew else "submitted before"
    click.echo(f"{'goes on' if submission.resumed else verb}: {placed.id}\n{placed.url}")
    for next_one in ("status", "logs -f", "cancel"):
        click.echo(f"next: rekindle {next_one} {record.run_id}")
    return 0


def _waited(record: RunRecord, home: Path, as_json: bool) -> int:
    with Progress() as progress:
        progress.changed(record)
        record = wait_until_ended(record, home, progress.changed)
    result = summary(record, home)
    if as_json:
        answer(result)
    else:
        conclude(record, result)
        if record.error:
            click.echo(f"{record.error}\nnext: rekindle logs {record.run_id}", err=True)
    # those of a run here which ended like this
    return {"succeeded": 0, "preempted": 75, "cancelled": 130}.get(record.status, 1)


def show(outline: SubmissionPreview, what: str) -> None:
    """Show what will be made, for the user who confirms the submission."""
    click.echo(f"{what} in {outline.where}, {len(outline.steps)} steps:", err=True)
    width = max((len(planned.step) for planned in outline.steps), default=0)
    for planned in outline.steps:
        spot = " (spot)" if planned.spot else ""
        machine = f"{planned.machines} x {planned.machine}{spot}"
        click.echo(f"  {planned.step:<{width}}  {machine}", err=True)
