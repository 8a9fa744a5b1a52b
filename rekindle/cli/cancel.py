"""`rekindle cancel RUN`: stops a run, here or on a platform."""

from pathlib import Path

import click

from rekindle.app.follow import cancelled
from rekindle.app.runs import find_run
from rekindle.cli.options import shared, tell
from rekindle.platforms.snapshot import ENDED_RUN


@click.command("cancel")
@click.argument("run", default="latest")
@shared
def command(run: str, home: Path, as_json: bool) -> None:
    """Stop RUN (default: the latest): its steps save what they can and end. A finished run is not
    changed. `rekindle resume` continues a stopped run."""
    before = find_run(home, run)
    record = cancelled(before, home)
    done = "" if record.status in ENDED_RUN else ", asked to stop"
    done = ": already over, nothing changed" if before.status in ENDED_RUN else done
    tell(record, f"{record.run_id}  {record.status}{done}", as_json)
