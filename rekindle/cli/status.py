"""`rekindle status RUN`: the steps of a run, running or ended."""

from __future__ import annotations

from pathlib import Path

import click

from rekindle.cli.options import find_run, shared


@click.command("status")
@click.argument("run", default="latest")
@shared
def command(run: str, home: Path, as_json: bool) -> int:
    """The step table of RUN (default: the latest); says so when the run was killed."""
    from rekindle.platforms.local.execute import is_alive

    record = find_run(home, run)
    if record.status == "running" and not is_alive(home, record.run_id):
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
    console.print(step_table(record))
    if record.error:
        console.print(record.error, markup=False, highlight=False)
    return 0
