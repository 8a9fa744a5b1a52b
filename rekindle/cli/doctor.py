"""`rekindle doctor [CONFIG] --platform P`: is the platform ready for this config? Every problem at
once, each with its fix; what needs no config is printed without one."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.cli.options import overrides, shared
from rekindle.errors import RequestError

if TYPE_CHECKING:
    from rekindle.spec.model import Spec

PLATFORMS = {"vertex": "rekindle.platforms.vertex.doctor"}


@click.command("doctor")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@overrides
@click.option("--platform", type=click.Choice(list(PLATFORMS)), required=True,
              help="Where it shall run.")  # fmt: skip
@shared
def command(
    config: Path | None, overrides: tuple[str, ...], platform: str, home: Path, as_json: bool
) -> int:
    """Say what PLATFORM needs, and what CONFIG lacks for it. Asks nobody and changes nothing."""
    from rekindle.spec.load import load_target
    from rekindle.spec.model import PlatformsSpec

    doctor: Any = importlib.import_module(PLATFORMS[platform])
    spec = load_target(config, overrides) if config else None
    places = spec.platforms if spec else PlatformsSpec()
    lines = list(doctor.needed(getattr(places, platform)))
    if not as_json:
        click.echo("\n".join(lines))
    if spec:
        _check(doctor, spec, platform)
    if as_json:
        print(json.dumps({"schema_version": 1, "platform": platform, "needs": lines}))
    elif spec:
        click.echo(f"{config} is ready for {platform}, as far as can be told from here.")
    return 0


def _check(doctor: Any, spec: Spec, platform: str) -> None:
    from rekindle.cli.job import graph_of

    _, graph = graph_of(spec)
    if problems := list(doctor.problems(graph, getattr(spec.platforms, platform))):
        raise RequestError(problems)
