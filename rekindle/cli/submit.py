"""`rekindle submit CONFIG --platform P`: compiles, shows what will be made where, asks,
sends it once, and says where to look."""

import dataclasses
import functools
from pathlib import Path

import click

from rekindle.app.follow import wait_until_ended
from rekindle.app.forecast import outlook
from rekindle.app.prepared import prepare_for
from rekindle.app.progress import Progress
from rekindle.app.runs import summary
from rekindle.app.submit import submit_prepared
from rekindle.cli.options import (
    Overrides,
    agree,
    answer,
    of_config,
    platform,
    shared,
    show_notices,
    wait,
    yes,
)
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
    """Compile CONFIG, show the steps and their machines, ask, and submit it to the
    platform."""
    spec = load_target(config, overrides)
    consent = functools.partial(ask_to_submit, yes)
    prepared = prepare_for(platform, spec, home)
    record, submitted_run, preview = submit_prepared(prepared, home, token, consent)
    return report_submission(record, submitted_run, home, wait, as_json, preview)


def ask_to_submit(yes: bool, preview: SubmissionPreview, plan: Planned | None) -> None:
    """Show what will be made and what it costs; RequestError unless the user agrees."""
    show(preview, preview.id)
    for line in outlook(plan):
        click.echo(line, err=True)
    agree(yes, "Submit it?")


def report_submission(
    record: RunRecord,
    submitted_run: SubmittedRun,
    home: Path,
    wait: bool,
    as_json: bool,
    preview: SubmissionPreview | None = None,
) -> int:
    """Print where the run is, or wait until it is over; returns the exit code."""
    submission = record.submission
    assert submission is not None
    if wait:
        return _wait(record, home, as_json)
    if as_json:
        submitted = Submitted(
            run_id=record.run_id,
            platform=record.platform,
            token=submission.token,
            **dataclasses.asdict(submitted_run),
            where="",
            steps=(),
        )
        if preview is not None:
            update = {
                "where": preview.where,
                "steps": preview.steps,
                "notices": preview.notices,
            }
            submitted = submitted.model_copy(update=update)
        answer(submitted)
        return 0
    if submission.resumed:
        state = "goes on"
    elif submitted_run.anew:
        state = "submitted"
    else:
        state = "submitted before"
    click.echo(f"{state}: {submitted_run.id}\n{submitted_run.url}")
    for verb in ("status", "logs -f", "cancel"):
        click.echo(f"next: rekindle {verb} {record.run_id}")
    return 0


def _wait(record: RunRecord, home: Path, as_json: bool) -> int:
    """Wait until the run is over, and print how it ended; returns the exit code, which is
    that of a run on this machine that ends like this."""
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
    return {"succeeded": 0, "preempted": 75, "cancelled": 130}.get(record.status, 1)


def show(preview: SubmissionPreview, name: str) -> None:
    """Show what will be made, for the user who confirms the submission."""
    click.echo(f"{name} in {preview.where}, {len(preview.steps)} steps:", err=True)
    width = max((len(step.step) for step in preview.steps), default=0)
    for step in preview.steps:
        spot = " (spot)" if step.spot else ""
        machines = f"{step.machines} x {step.machine}{spot}"
        click.echo(f"  {step.step:<{width}}  {machines}", err=True)
    show_notices(preview.notices)
