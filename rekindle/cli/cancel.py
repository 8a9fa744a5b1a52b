"""`rekindle cancel RUN`: have a run stop, here or on a platform."""

from __future__ import annotations

from pathlib import Path

import click

from rekindle.app.follow import cancelled
from rekindle.app.runs import find_run
from rekindle.cli.options import answer, shared
from rekindle.platforms.snapshot import ENDED_RUN


@click.command("cancel")
@click.argument("run", default="latest")
@shared
def command(run: str, home: Path, as_json: bool) -> int:
    """Have RUN (default: the latest) stop: steps save what they can and end. One that is over stays
    as it is; `rekindle resume` goes on with one that was stopped."""
    record = cancelled(find_run(home, run), home)
    if as_json:
        answer(record)
    else:
        stopping = "" if record.status in ENDED_RUN else ", asked to stop"
        click.echo(f"{record.run_id}  {record.status}{stopping}")
    return 0
