"""`rekindle diff CONFIG --platform P`: which steps will run again, and why, against what was
submitted last or a folder; sends nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import click

from rekindle.answers import Difference, StepDifference
from rekindle.cli.compile import PLATFORMS, compiled
from rekindle.cli.options import FOLDER, answer, config, newest_first, overrides, shared
from rekindle.errors import RequestError


@click.command("diff")
@config
@overrides
@click.option("--platform", type=click.Choice(list(PLATFORMS)), required=True,
              help="The platform to compile for.")  # fmt: skip
@click.option("--against", type=FOLDER, default=None,
              help="What `rekindle compile` wrote; default: what was submitted last.")  # fmt: skip
@shared
def command(
    config: Path,
    overrides: tuple[str, ...],
    platform: str,
    against: Path | None,
    home: Path,
    as_json: bool,
) -> int:
    """Say which steps of CONFIG the platform will run again, compared with what was submitted
    last, and why. Steps that it takes from its cache are listed as such."""
    from rekindle.cli.job import graph_of
    from rekindle.cli.planning import on_machines
    from rekindle.platforms.difference import compare
    from rekindle.spec.load import load_target

    spec = on_machines(load_target(config, overrides), platform, home)
    against = against or _last_sent(spec.name, platform, home)
    before = {
        path.relative_to(against).as_posix(): path.read_bytes()
        for path in sorted(against.rglob("*"))
        if path.is_file()
    }
    module: Any = importlib.import_module(PLATFORMS[platform].replace(".compile", ".units"))
    after = compiled(platform, spec, *graph_of(spec)).files
    (definition,) = (name for name in after if "/" not in name)
    if definition not in before:
        raise RequestError(
            f"{against} holds no {definition}", where="--against",
            fix=f"rekindle compile {config} --platform {platform} -o {against}",
        )  # fmt: skip
    known = {n: c for n, c in before.items() if n == definition or n.startswith("bundles/")}
    verdicts = compare(module.units(known), module.units(after))
    if as_json:
        steps = tuple(StepDifference(**dataclasses.asdict(verdict)) for verdict in verdicts)
        answer(Difference(platform=platform, steps=steps))
        return 0
    width = max((len(verdict.step) for verdict in verdicts), default=0)
    words = {"yes": "runs again", "perhaps": "may run again", "no": "cached", "gone": "gone"}
    for verdict in verdicts:
        click.echo(f"{verdict.step:<{width}}  {words[verdict.again]:<13}  {verdict.why}")
    return 0


def _last_sent(name: str, platform: str, home: Path) -> Path:
    """The folder with what was submitted last to the platform; RequestError if nothing was."""
    from rekindle.cli.remote import DEFINITION

    for record in newest_first(home):
        folder = home / "runs" / record.run_id / DEFINITION
        if (record.platform, record.name) == (platform, name) and folder.is_dir():
            return folder
    raise RequestError(
        f"nothing of {name} was submitted to {platform} from {home}", where="--against",
        fix="name a folder that `rekindle compile` wrote",
    )  # fmt: skip
