"""`rekindle runs`: the ledger of all runs under the home folder."""

from __future__ import annotations

from pathlib import Path

import click

from rekindle.answers import RunRow, Runs
from rekindle.cli.compile import PLATFORMS
from rekindle.cli.options import all_runs, answer, overrides, shared
from rekindle.errors import RequestError
from rekindle.records import RunRecord, RunSummary


@click.command("runs")
@click.option("--recover", type=click.Path(path_type=Path), metavar="CONFIG",
              help="First find runs of CONFIG on --platform that are not known here.")  # fmt: skip
@click.option("--platform", type=click.Choice(list(PLATFORMS)), help="Where to look for them.")
@overrides
@shared
def command(
    recover: Path | None,
    platform: str | None,
    overrides: tuple[str, ...],
    home: Path,
    as_json: bool,
) -> int:
    """Every run, newest first: status, time, metric, gate, model."""
    from rekindle.cli.job import summary

    if recover is not None:
        if platform is None:
            raise RequestError("which platform?", where="--platform", fix=f"{', '.join(PLATFORMS)}")
        from rekindle.cli.remote import recovered
        from rekindle.spec.load import load_target

        for run_id in recovered(load_target(recover, overrides), platform, home):
            click.echo(f"found {run_id}", err=True)
    rows = [
        (record, _status(home, record), summary(record, home)) for record in all_runs(home)[::-1]
    ]
    if as_json:
        answer(Runs(runs=tuple(_row(*row) for row in rows)))
    else:
        _table(rows)
    return 0


def _row(record: RunRecord, status: str, result: RunSummary) -> RunRow:
    known = dict(result) | {"status": status}
    return RunRow(**known, name=record.name, started_at=record.started_at)


def _status(home: Path, record: RunRecord) -> str:
    """The record's status, or `killed` where it was never closed and nobody works on it."""
    from rekindle.platforms.local.execute import is_alive

    here = record.platform == "local" and record.status == "running"
    killed = here and not is_alive(home, record.run_id)
    return "killed" if killed else record.status


def _table(rows: list[tuple[RunRecord, str, RunSummary]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("run", "status", "seconds", "accuracy", "gate", "model"):
        table.add_column(name, no_wrap=name == "run")
    for _, status, result in rows:
        accuracy = result.metrics.get("accuracy")
        table.add_row(
            result.run_id,
            status,
            f"{result.seconds:.1f}",
            "" if accuracy is None else f"{accuracy:.4f}",
            result.gate.decision if result.gate else "",
            f"{result.model.name} v{result.model.version}" if result.model else "",
        )
    Console().print(table if rows else "no runs yet: `rekindle run CONFIG`")
