"""`rekindle logs RUN [-f] [--step S]`: what a step printed, here or on a platform."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from rekindle.app.follow import asked, chosen, log_of, steps_with_a_log
from rekindle.app.runs import find_run, read_run
from rekindle.cli.options import answer, shared
from rekindle.errors import RequestError
from rekindle.masking import plain_but_colour
from rekindle.outputs import LogText
from rekindle.platforms.local.store import is_alive
from rekindle.records import RunRecord, StepRecord

_PAUSE_SECONDS = 0.5


@click.command("logs")
@click.argument("run", default="latest")
@click.option(
    "--step", help="Name of the step; default: the first that failed, or the last that ran."
)
@click.option("-f", "--follow", is_flag=True, help="Go on until the step ends.")
@shared
def command(run: str, step: str | None, follow: bool, home: Path, as_json: bool) -> int:
    """Print the log of one step of RUN (default: the latest)."""
    record = find_run(home, run)
    if record.platform != "local":
        record = asked(record, home)
    found = chosen(record, step)
    if Path(found.log).is_file():
        pieces = _of_file(record, found, home, follow)
    elif record.platform != "local":
        pieces = log_of(record, found, home, follow)
    else:
        why = f": {found.reason}" if found.reason else ""
        raise RequestError(f"the step {found.name} has no log{why}", fix=steps_with_a_log(record))
    if as_json:
        answer(LogText(run_id=record.run_id, step=found.name, text="".join(pieces)))
        return 0
    on_terminal = sys.stdout.isatty()
    for piece in pieces:
        sys.stdout.write(plain_but_colour(piece) if on_terminal else piece)
        sys.stdout.flush()
    return 0


def _of_file(record: RunRecord, step: StepRecord, home: Path, follow: bool) -> Iterator[str]:
    """The text of a log that a process here writes."""
    over = not follow or record.platform != "local"
    with Path(step.log).open(encoding="utf-8", errors="replace") as file:
        while True:
            while text := file.read(1 << 16):
                yield text
            if over:
                return
            over = not _runs(home, record.run_id, step.name)
            if not over:
                time.sleep(_PAUSE_SECONDS)


def _runs(home: Path, run_id: str, step: str) -> bool:
    return is_alive(home, run_id) and read_run(home, run_id).step(step).status == "running"
