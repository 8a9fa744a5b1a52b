"""`rekindle compile CONFIG|PIPELINE --platform P -o DIR`: the pipeline as the platform wants it;
sends nothing.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.cli.options import FOLDER, config, overrides, shared
from rekindle.errors import Problem, UnsupportedError
from rekindle.records import write_atomically

if TYPE_CHECKING:
    from rekindle.spec.model import Spec

PLATFORMS = {"kubeflow": "rekindle.platforms.kubeflow.compile"}


@click.command("compile")
@config
@overrides
@click.option(
    "--platform", type=click.Choice(sorted(PLATFORMS)), required=True, help="Where it shall run."
)
@click.option("-o", "--output", type=FOLDER, default=Path("compiled"), show_default=True,
              help="Folder for the definition.")  # fmt: skip
@click.option(
    "--artifact-root",
    default="",
    help="Mount point of a volume that all pods share, for checkpoints.",
)
@shared
def command(
    config: Path,
    overrides: tuple[str, ...],
    platform: str,
    output: Path,
    artifact_root: str,
    home: Path,
    as_json: bool,
) -> int:
    """Write the pipeline of CONFIG for a platform. The same input gives the same bytes."""
    from rekindle.cli.job import arguments_of, graph_of
    from rekindle.spec.load import load_spec

    spec = load_spec(config, overrides)
    _refuse(spec, artifact_root)
    text, graph = graph_of(spec)
    arguments = arguments_of(spec, graph, artifact_root)
    compiler: Any = importlib.import_module(PLATFORMS[platform])
    definition = compiler.compile(text, graph, arguments, spec.platforms.kubeflow.image)
    paths = []
    for name, content in definition.files.items():
        write_atomically(output / name, content.decode())
        paths.append(str(output / name))
    if as_json:
        print(json.dumps({"schema_version": 1, "platform": platform, "files": paths}))
    else:
        for path in paths:
            click.echo(path)
    return 0


def _refuse(spec: Spec, artifact_root: str) -> None:
    """What this compiler cannot carry over yet, or a cluster cannot reach: all of it at once."""
    problems = []
    asked = spec.resources
    for field, value, plain in (
        ("nodes", asked.nodes, 1),
        ("gpus_per_node", asked.gpus_per_node, 0),
        ("spot", asked.spot, False),
    ):
        if value != plain:
            problems.append(
                Problem(
                    f"`{field}: {value}` is not lowered to Kubeflow yet, and is not dropped",
                    f"resources.{field}",
                    f"set resources.{field}: {json.dumps(plain)}",
                )
            )
    if spec.pipeline is None and not spec.registration.tracking_uri:
        problems.append(
            Problem(
                "the embedded registry lives on this machine, and a cluster cannot reach it",
                "register.tracking_uri",
                "name a tracking server, such as https://mlflow.example.com",
            )
        )
    if spec.pipeline is None and not artifact_root.startswith("/"):
        problems.append(
            Problem(
                "checkpoints need a place that outlives a pod",
                "--artifact-root",
                "name the mount point of a shared volume: --artifact-root /mnt/rekindle",
            )
        )
    if problems:
        raise UnsupportedError(problems)
