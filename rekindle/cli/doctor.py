"""`rekindle doctor [CONFIG] [--platform P]`: is everything there that a run needs? Every problem at
once, each with its fix."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from rekindle.cli.options import overrides, shared
from rekindle.errors import RequestError

LOCAL = "local"
PLATFORMS = {"kubeflow": "rekindle.platforms.kubeflow.doctor"}


@click.command("doctor")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@overrides
@click.option(
    "--platform", type=click.Choice([LOCAL, *PLATFORMS]), default=LOCAL, show_default=True,
    help="Where it shall run.",
)  # fmt: skip
@shared
def command(
    config: Path | None, overrides: tuple[str, ...], platform: str, home: Path, as_json: bool
) -> int:
    """Say what a platform lacks for CONFIG, or for the defaults without one, and which permissions
    it needs at least. Changes nothing."""
    from rekindle.spec.load import load_target
    from rekindle.spec.model import PlatformsSpec

    if config is None and platform == LOCAL:
        raise RequestError("there is no config to look at", fix="rekindle doctor CONFIG")
    spec = load_target(config, overrides) if config else None
    needed = ""
    if platform == LOCAL:
        from rekindle.cli.preflight import preflight

        assert spec is not None
        preflight(spec, home)
    else:
        place = getattr(spec.platforms if spec else PlatformsSpec(), platform)
        doctor: Any = importlib.import_module(PLATFORMS[platform])
        needed = doctor.permissions(place)
        if not as_json:
            click.echo(needed)
        if found := doctor.problems(place):
            raise RequestError(found)
    if as_json:
        print(json.dumps({"schema_version": 1, "platform": platform, "permissions": needed}))
    else:
        click.echo(f"{platform} is ready", err=True)
    return 0
