"""`rekindle status RUN`: the steps of a run, running or ended; of one on a platform, what that says
of it."""

from __future__ import annotations

from pathlib import Path

import click

from rekindle.cli.options import find_run, shared
from rekindle.records import RunRecord


@click.command("status")
@click.argument("run", default="latest")
@shared
def command(run: str, home: Path, as_json: bool) -> int:
    """The step table of RUN (default: the latest); says so when the run was killed."""
    from rekindle.platforms.local.execute import is_alive

    record = find_run(home, run)
    if record.platform != "local":
        record = _asked(record, home)
    elif record.status == "running" and not is_alive(home, record.run_id):
        record = record.model_copy(
            update={"status": "cancelled", "error": "killed; the same command resumes"}
        )
    if as_json:
        print(record.model_dump_json())
        return 0
    from rich.console import Console

    from rekindle.cli.progress import step_table

    console = Console()
    console.print(f"{record.run_id}  {record.status}", highlight=False)
    if record.steps:
        console.print(step_table(record))
    if record.submission and record.submission.url:
        click.echo(record.submission.url)
    if record.error:
        console.print(record.error, markup=False, highlight=False)
    return 0


def _asked(record: RunRecord, home: Path) -> RunRecord:
    """What the platform says of the run now; what it says last is kept."""
    from rekindle.cli.submit import client_of
    from rekindle.spec.places import PlatformsSpec

    sent = record.submission
    if record.status != "running" or sent is None or not sent.id:
        return record
    client = client_of(record.platform)
    places = PlatformsSpec.model_validate(record.spec["platforms"])
    said = client.status(getattr(places, record.platform), sent.id)
    now = record.model_copy(update={"status": client.OVER.get(said, "running")})
    if now.status != "running":
        now.write(home / "runs" / now.run_id / "run.json")
    return now
