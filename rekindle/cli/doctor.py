"""`rekindle doctor [CONFIG] [--platform P]`: is everything there that a run needs? Every problem at
once, each with its fix."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.cli.options import overrides, shared
from rekindle.errors import Problem, RequestError

if TYPE_CHECKING:
    from rekindle.spec.model import Spec

LOCAL = "local"
# each has `permissions(place)`, the least that steps need, and `problems(place)`, what the platform
# itself lacks, as far as it can be asked
PLATFORMS = {
    "azureml": "rekindle.platforms.azureml.doctor",
    "kubeflow": "rekindle.platforms.kubeflow.doctor",
    "sagemaker": "rekindle.platforms.sagemaker.doctor",
    "vertex": "rekindle.platforms.vertex.doctor",
}


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
    """Say what CONFIG and a platform lack for each other, and which permissions steps need at
    least. Changes nothing."""
    from rekindle.spec.load import load_target
    from rekindle.spec.places import PlatformsSpec

    if config is None and platform == LOCAL:
        raise RequestError("there is no config to look at", fix="rekindle doctor CONFIG")
    spec = load_target(config, overrides) if config else None
    needed, found = "", list[Problem]()
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
        found = [*(_of_config(spec, platform) if spec else ()), *doctor.problems(place)]
    if found:
        raise RequestError(dict.fromkeys(found))
    if as_json:
        print(json.dumps({"schema_version": 1, "platform": platform, "permissions": needed}))
    elif spec or platform == "kubeflow":
        known = "" if platform in (LOCAL, "kubeflow") else ", as far as can be told from here"
        click.echo(f"{platform} is ready{known}", err=True)
    return 0


def _of_config(spec: Spec, platform: str) -> tuple[Problem, ...]:
    """Why the config would not compile."""
    from rekindle.cli.compile import compiled
    from rekindle.cli.job import graph_of

    try:
        compiled(platform, spec, *graph_of(spec))
    except RequestError as error:
        return error.problems
    return ()
