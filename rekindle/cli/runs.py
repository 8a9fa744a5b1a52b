"""`rekindle runs`: the ledger of all runs under the home folder."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rekindle.cli.options import all_runs, shared
from rekindle.records import RunRecord, RunSummary


@click.command("runs")
@shared
def command(home: Path, as_json: bool) -> int:
    """Every run, newest first: status, time, metric, gate, model."""
    from rekindle.cli.job import summary

    rows = [
        (record, _status(home, record), summary(record, home)) for record in all_runs(home)[::-1]
    ]
    if as_json:
        listed = [
            {
                **result.model_dump(mode="json"),
                "name": record.name,
                "started_at": record.started_at,
                "status": status,
            }
            for record, status, result in rows
        ]
        print(json.dumps({"schema_version": 1, "runs": listed}))
    else:
        _table(rows)
    return 0


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
