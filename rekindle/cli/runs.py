"""`rekindle runs`: the ledger of all runs under the home folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from rekindle.cli.options import overrides, shared
from rekindle.errors import RequestError
from rekindle.outputs import Runs
from rekindle.platforms.local.store import is_alive
from rekindle.platforms.platform import PLATFORMS
from rekindle.report.ledger import Entry, ledger


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
    folder = f"{os.path.realpath(home)}/runs"
    if recover is not None:
        if platform is None:
            raise RequestError("which platform?", where="--platform", fix=f"{', '.join(PLATFORMS)}")
        from rekindle.app.recover import recovered  # loads the planner
        from rekindle.spec.load import load_target

        for run_id in recovered(load_target(recover, overrides), platform, home):
            click.echo(f"found {run_id}", err=True)
    rows = [_row(entry, home, folder) for entry in ledger(home).entries[::-1]]
    if as_json:
        # as `Runs` would have it: the summaries were written by their records
        click.echo(json.dumps({**Runs(runs=()).model_dump(mode="json"), "runs": rows}))
    else:
        _table(rows)
    return 0


def _row(entry: Entry, home: Path, runs: str) -> dict[str, Any]:
    """The fields of a RunRow."""
    known = {"status": _status(home, entry), "card": f"{runs}/{entry.run_id}/card.html"}
    return {**entry.summary, **known, "name": entry.name, "started_at": entry.started_at}


def _status(home: Path, entry: Entry) -> str:
    """The record's status, or `killed` where it was never closed and no process works on it."""
    here = entry.platform == "local" and entry.status == "running"
    return "killed" if here and not is_alive(home, entry.run_id) else entry.status


def _table(rows: list[dict[str, Any]]) -> None:
    """Aligned columns, whatever the width of the terminal."""
    if not rows:
        click.echo("no runs yet: `rekindle run CONFIG`")
        return
    lines = [("run", "status", "seconds", "accuracy", "gate", "model"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = "  ".join(f"{{:{width}}}" for width in widths).format
    click.echo("\n".join(aligned(*line).rstrip() for line in lines))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    accuracy, gate, model = row["metrics"].get("accuracy"), row["gate"], row["model"]
    return (
        row["run_id"],
        row["status"],
        f"{row['seconds']:.1f}",
        "" if accuracy is None else f"{float(accuracy):.4f}",
        gate["decision"] if gate else "",
        f"{model['name']} v{model['version']}" if model else "",
    )
