"""`rekindle run CONFIG`: the whole pipeline here and now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from rekindle.cli.options import config, overrides, shared
from rekindle.errors import RekindleError


@click.command("run")
@config
@overrides
@click.option("--fresh", is_flag=True, help="Run every step again, whatever the cache holds.")
@click.option(
    "--from", "from_step", metavar="STEP", help="Run this step and all that depend on it again."
)
@click.option(
    "--require-promotion", is_flag=True, help="Exit with 1 when the candidate was not promoted."
)
@shared
def command(
    config: Path,
    overrides: tuple[str, ...],
    fresh: bool,
    from_step: str | None,
    require_promotion: bool,
    home: Path,
    as_json: bool,
) -> int:
    """Retrain, judge and register the model of CONFIG on this machine.

    Steps whose code and inputs have not changed come from the cache. An interrupted run goes on
    from its last checkpoint when the same command is given again. A refused candidate is a success:
    exit code 0."""
    from rekindle.cli.job import Options, windows
    from rekindle.spec.load import load_spec

    spec = load_spec(config, overrides)
    options = Options(home, fresh, from_step)
    result: dict[str, Any] = {}
    earlier = []
    for one in windows(spec):
        if result:
            earlier.append(result["run_id"])
        result = _one(one, options, as_json)
    if as_json:
        print(json.dumps({**result, "earlier": earlier} if earlier else result))
    gate = result["gate"]
    return 1 if require_promotion and not (gate and gate["promoted"]) else 0


def _one(spec: Any, options: Any, as_json: bool) -> dict[str, Any]:
    """Execute one window; prints what came of it."""
    from rekindle.cli.job import execute, summary
    from rekindle.cli.progress import Progress
    from rekindle.records import RunRecord

    with Progress() as progress:
        try:
            record = execute(spec, options, progress.changed, progress.event)
        except RekindleError:
            if progress.record is not None and not as_json:
                folder = options.home / "runs" / progress.record.run_id
                _conclude(RunRecord.read(folder / "run.json"), options.home)
            raise
    result = summary(record, options.home)
    if not as_json:
        _conclude(record, options.home)
    return result


def _conclude(record: Any, home: Path) -> None:
    """The step table, the gate, the model, the card."""
    from rich.console import Console

    from rekindle.cli.job import summary
    from rekindle.cli.progress import step_table

    result = summary(record, home)
    console = Console(soft_wrap=False)
    console.print(step_table(record))
    console.print()
    lines = [("run", f"{record.run_id}  {record.status} in {record.seconds:.1f} s")]
    if result["metrics"]:
        lines.append(("metrics", "  ".join(f"{k} {v:.4f}" for k, v in result["metrics"].items())))
    if gate := result["gate"]:
        lines.append(("gate", f"{_words(gate, record.run_id)}: {gate['reason']}"))
    if model := result["model"]:
        new = "new" if model["created"] else "known"
        aliases = f" ({', '.join(model['aliases'])})" if model["aliases"] else ""
        lines.append(("model", f"{model['name']} version {model['version']}{aliases}, {new}"))
    lines.append(("card", result["card"]))
    for name, text in lines:
        console.print(f"{name:8}{text}", highlight=False, markup=False, soft_wrap=True)


def _words(gate: dict[str, Any], run_id: str) -> str:
    return {
        "promoted": "promoted",
        "pending": "passed, but the promotion did not happen",
        "approval_needed": f"passed, waits for `rekindle promote {run_id}`",
        "refused": "not promoted",
    }[gate["decision"]]
