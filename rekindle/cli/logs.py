"""`rekindle logs RUN [-f] [--step S]`: what a step printed, here or on a platform."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from rekindle.answers import LogText
from rekindle.cli.options import answer, find_run, read_run, shared
from rekindle.errors import RequestError
from rekindle.masking import plain_but_colour
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
        from rekindle.cli.remote import asked

        record = asked(record, home)
    found = chosen(record, step)
    if Path(found.log).is_file():
        pieces = _of_file(record, found, home, follow)
    elif record.platform != "local":
        from rekindle.cli.remote import log_of

        pieces = log_of(record, found, home, follow)
    else:
        why = f": {found.reason}" if found.reason else ""
        raise RequestError(f"the step {found.name} has no log{why}", fix=_with_log(record))
    if as_json:
        answer(LogText(run_id=record.run_id, step=found.name, text="".join(pieces)))
        return 0
    on_terminal = sys.stdout.isatty()
    for piece in pieces:
        sys.stdout.write(plain_but_colour(piece) if on_terminal else piece)
        sys.stdout.flush()
    return 0


def chosen(record: RunRecord, wanted: str | None) -> StepRecord:
    """The step called `wanted`, or the one to look at; RequestError where that printed nothing."""
    from rekindle.platforms.watch import first_failed

    ran = [one for one in record.steps if one.log]
    try:
        found = record.step(wanted) if wanted else first_failed(ran) or ran[-1]
    except (KeyError, IndexError):
        found = None
    if found is None or not found.log:
        which = f"a step `{wanted}`" if wanted else "any step"
        raise RequestError(f"the run {record.run_id} has no log of {which}", fix=_with_log(record))
    return found


def _with_log(record: RunRecord) -> str:
    names = ", ".join(one.name for one in record.steps if one.log and Path(one.log).is_file())
    return f"steps with a log: {names}" if names else "no step has begun yet; rekindle status"


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
    from rekindle.platforms.local.store import is_alive

    return is_alive(home, run_id) and read_run(home, run_id).step(step).status == "running"
