"""`rekindle runs`: the ledger of all runs under the home folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rekindle.answers import RunRow, Runs
from rekindle.cli.compile import PLATFORMS
from rekindle.cli.options import answer, overrides, shared
from rekindle.errors import RequestError

if TYPE_CHECKING:
    from rekindle.report.ledger import Entry


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
    from rekindle.cli.job import card_of
    from rekindle.report.ledger import ledger

    if recover is not None:
        if platform is None:
            raise RequestError("which platform?", where="--platform", fix=f"{', '.join(PLATFORMS)}")
        from rekindle.cli.remote import recovered
        from rekindle.spec.load import load_target

        for run_id in recovered(load_target(recover, overrides), platform, home):
            click.echo(f"found {run_id}", err=True)
    rows = [_row(entry, card_of(entry.run_id, home), home) for entry in ledger(home).entries[::-1]]
    if as_json:
        answer(Runs(runs=tuple(rows)))
    else:
        _table(rows)
    return 0


def _row(entry: Entry, card: str, home: Path) -> RunRow:
    known = {"status": _status(home, entry), "card": card}
    named = {"name": entry.name, "started_at": entry.started_at}
    return RunRow.model_validate({**entry.summary, **known, **named})


def _status(home: Path, entry: Entry) -> str:
    """The record's status, or `killed` where it was never closed and no process works on it."""
    from rekindle.platforms.local.execute import is_alive

    here = entry.platform == "local" and entry.status == "running"
    return "killed" if here and not is_alive(home, entry.run_id) else entry.status


def _table(rows: list[RunRow]) -> None:
    """Aligned columns, whatever the width of the terminal."""
    if not rows:
        click.echo("no runs yet: `rekindle run CONFIG`")
        return
    lines = [("run", "status", "seconds", "accuracy", "gate", "model"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def _cells(row: RunRow) -> tuple[str, ...]:
    accuracy = row.metrics.get("accuracy")
    return (
        row.run_id,
        row.status,
        f"{row.seconds:.1f}",
        "" if accuracy is None else f"{accuracy:.4f}",
        row.gate.decision if row.gate else "",
        f"{row.model.name} v{row.model.version}" if row.model else "",
    )
