"""`rekindle cancel RUN`: have a run stop, here or on a platform."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from rekindle.cli.options import find_run, shared
from rekindle.errors import RequestError
from rekindle.records import RunRecord


@click.command("cancel")
@click.argument("run", default="latest")
@shared
def command(run: str, home: Path, as_json: bool) -> int:
    """Have RUN (default: the latest) stop: steps save what they can and end. One that is over stays
    as it is; `rekindle resume` goes on with one that was stopped."""
    from rekindle.platforms.watch import OVER

    record = find_run(home, run)
    if record.platform == "local":
        record = _interrupted(record, home)
    else:
        from rekindle.cli.remote import asked, watch_of

        if record.status not in OVER:
            watch, place, sent = watch_of(record)
            watch.cancel(place, sent.id)
            record = asked(record, home)
    if as_json:
        print(record.model_dump_json())
    else:
        click.echo(
            f"{record.run_id}  {record.status}" + ("" if record.status in OVER else ", stopping")
        )
    return 0


def _interrupted(record: RunRecord, home: Path) -> RunRecord:
    """What Ctrl-C does, sent to whoever works on the run."""
    from rekindle.platforms.local.execute import owner

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
