"""`rekindle logs RUN [--step S]`: what a step printed."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rekindle.cli.options import find_run, shared
from rekindle.errors import RequestError


@click.command("logs")
@click.argument("run", default="latest")
@click.option(
    "--step", help="Name of the step; default: the first that failed, or the last that ran."
)
@shared
def command(run: str, step: str | None, home: Path, as_json: bool) -> int:
    """Print the log of one step of RUN (default: the latest)."""
    record = find_run(home, run)
    ran = [one for one in record.steps if one.log]
    names = ", ".join(one.name for one in ran)
    try:
        chosen = (
            record.step(step) if step else next((s for s in ran if s.status == "failed"), ran[-1])
        )
    except (KeyError, IndexError):
        raise RequestError(
            f"the run {record.run_id} has no log of a step `{step or ''}`",
            fix=f"steps with a log: {names}",
        ) from None
    path = Path(chosen.log)
    if not path.is_file():
        raise RequestError(f"the step {chosen.name} left no log", fix=f"steps with a log: {names}")
    sys.stdout.write(path.read_text(errors="replace"))
    return 0
