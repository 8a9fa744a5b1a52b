"""`rekindle cancel RUN`: have a run stop, here or on a platform."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from rekindle.cli.options import answer, find_run, shared
from rekindle.errors import RequestError
from rekindle.records import RunRecord


@click.command("cancel")
@click.argument("run", default="latest")
@shared
def command(run: str, home: Path, as_json: bool) -> int:
    """Have RUN (default: the latest) stop: steps save what they can and end. One that is over stays
    as it is; `rekindle resume` goes on with one that was stopped."""
    from rekindle.platforms.watch import OVER

    record = cancelled(find_run(home, run), home)
    if as_json:
        answer(record)
    else:
        stopping = "" if record.status in OVER else ", asked to stop"
        click.echo(f"{record.run_id}  {record.status}{stopping}")
    return 0


def cancelled(record: RunRecord, home: Path) -> RunRecord:
    """The record of a run that was told to stop."""
    from rekindle.cli.remote import asked, watch_of
    from rekindle.platforms.watch import OVER

    if record.platform == "local":
        return _interrupted(record, home)
    if record.status in OVER:
        return record
    watch, place, sent = watch_of(record)
    watch.cancel(place, sent.id)
    return asked(record, home)


def _interrupted(record: RunRecord, home: Path) -> RunRecord:
    """What Ctrl-C does, sent to whoever works on the run."""
    from rekindle.platforms.local.store import owner

    if record.status != "running":
        return record
    pid = owner(home, record.run_id)
    if pid is None:
        raise RequestError(
            f"nobody works on {record.run_id}: it was killed",
            fix=f"rekindle resume {record.run_id}",
        )
    os.kill(pid, signal.SIGINT)
    return record
