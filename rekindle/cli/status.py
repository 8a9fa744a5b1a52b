"""`rekindle status RUN`: the steps of a run, running or ended; of one on a platform, what that says
of it."""

from pathlib import Path

import click

from rekindle.app.runs import find_run
from rekindle.cli.options import answer, shared
from rekindle.masking import plain
from rekindle.platforms.local.store import is_alive
from rekindle.platforms.snapshot import first_failed
from rekindle.records import RunRecord

_TAIL_LINES = 10


@click.command("status")
@click.argument("run", default="latest")
@shared
def command(run: str, home: Path, as_json: bool) -> None:
    """The step table of RUN (default: the latest). Of a run that failed, the end of the log of the
    first step that failed follows; a run that was killed is shown as such."""
    record = find_run(home, run)
    if record.platform != "local":
        from rekindle.app.follow import asked

        record = asked(record, home)
    elif record.status == "running" and not is_alive(home, record.run_id):
        update = {"status": "cancelled", "error": "killed; the same command resumes"}
        record = record.model_copy(update=update)
    if as_json:
        answer(record)
    else:
        show(record)


def show(record: RunRecord) -> None:
    """The run for people, on stdout."""
    from rich.console import Console

    from rekindle.app.progress import step_table
    from rekindle.report.timeline import last_lines

    console = Console()
    where = "" if record.platform == "local" else f" on {record.platform}"
    console.print(f"{record.run_id}  {record.status}{where}", highlight=False)
    if record.steps:
        console.print(step_table(record, console.width))
    if record.submission and record.submission.url:
        click.echo(plain(record.submission.url))
    if record.error:
        console.print(plain(record.error), markup=False, highlight=False)
    failed = first_failed(record.steps)
    log = Path(failed.failed_log or failed.log) if failed else Path()
    if failed and log.is_file():
        click.echo(plain(f"the end of what `{failed.name}` printed:"))
        text, _ = last_lines(log)
        click.echo("\n".join(f"  {line}" for line in text.split("\n")[-_TAIL_LINES:]))
