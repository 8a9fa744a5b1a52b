"""`rekindle resume RUN`: continues a run that failed or was stopped."""

import shlex
from pathlib import Path

import click

from rekindle.app.follow import place_of, refresh_from_platform, resume_on_platform
from rekindle.app.prepared import prepare_here
from rekindle.app.run import RunOptions
from rekindle.app.runs import find_run
from rekindle.cli.options import answer, shared, wait
from rekindle.cli.run import carry_out
from rekindle.cli.submit import report_submission
from rekindle.errors import RequestError
from rekindle.platforms.local.store import is_alive
from rekindle.platforms.snapshot import ENDED_RUN
from rekindle.records import RunRecord
from rekindle.spec.model import recorded_spec


@click.command("resume")
@click.argument("run", default="latest")
@wait
@shared
def command(run: str, wait: bool, home: Path, as_json: bool) -> int:
    """Continue RUN (default: the latest), which failed or was stopped. Steps that
    succeeded are not repeated; training continues from its last checkpoint. On this
    machine this starts a new run with the recorded config. A platform continues the same
    run, or starts a new one if it cannot retry."""
    record = find_run(home, run)
    if record.platform == "local":
        return _resume_here(record, home, as_json)
    return _resume_on_platform(record, home, wait, as_json)


def _resume_here(record: RunRecord, home: Path, as_json: bool) -> int:
    if record.status == "running" and is_alive(home, record.run_id):
        raise RequestError(f"{record.run_id} runs", fix=f"rekindle logs -f {record.run_id}")
    arguments = shlex.split(record.command)
    overrides = [word.removeprefix("--set=") for word in arguments if word.startswith("--set=")]
    spec = recorded_spec(record.spec)
    # so that the new record repeats the command
    spec._origin = (record.config, tuple(overrides))
    result = carry_out(prepare_here(spec, home), RunOptions(home), as_json)
    if as_json:
        answer(result)
    return 0


def _resume_on_platform(record: RunRecord, home: Path, wait: bool, as_json: bool) -> int:
    place_of(record)  # raises where the submission was not confirmed
    record = refresh_from_platform(record, home)
    if record.status not in ENDED_RUN:
        raise RequestError(f"{record.run_id} runs", fix=f"rekindle logs -f {record.run_id}")
    if record.status == "succeeded":
        raise RequestError(
            f"{record.run_id} succeeded: nothing is left to do",
            fix=f"submit it again: {record.command}",
        )
    record, submitted_run = resume_on_platform(record, home)
    return report_submission(record, submitted_run, home, wait, as_json)
