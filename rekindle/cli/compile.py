"""`rekindle compile CONFIG|PIPELINE --platform P[,P] -o DIR`: the pipeline as each platform wants
it; sends nothing.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from rekindle.answers import Compiled
from rekindle.cli.options import FOLDER, ON_MACHINES, answer, config, overrides, shared
from rekindle.errors import Problem, RequestError
from rekindle.records import write_atomically

if TYPE_CHECKING:
    from rekindle.ir.graph import Graph
    from rekindle.platforms.definition import Definition
    from rekindle.spec.model import Spec

log = logging.getLogger(__name__)

PLATFORMS = {
    "azureml": "rekindle.platforms.azureml.compile",
    "kubeflow": "rekindle.platforms.kubeflow.compile",
    "sagemaker": "rekindle.platforms.sagemaker.compile",
    "vertex": "rekindle.platforms.vertex.compile",
}
_CHECKPOINT = "artifact_root"
PARITY = "parity.md"
BUNDLES = "bundles"


class Several(click.ParamType):  # type: ignore[type-arg]
    """Platforms with commas between them."""

    name = "P[,P]"

    def convert(self, value: Any, param: Any, context: Any) -> tuple[str, ...]:
        """Their names, each once."""
        names = tuple(dict.fromkeys(str(value).split(","))) if value else ()
        for name in names:
            if name not in PLATFORMS:
                self.fail(f"`{name}` is none of {', '.join(PLATFORMS)}", param, context)
        return names


@click.command("compile")
@config
@overrides
@click.option(
    "--platform", "platforms", type=Several(), required=True,
    help=f"Where it shall run: {', '.join(PLATFORMS)}, or several with commas.",
)  # fmt: skip
@click.option("-o", "--output", type=FOLDER, default=Path("compiled"), show_default=True,
              help="Folder for the definition.")  # fmt: skip
@shared
def command(
    config: Path,
    overrides: tuple[str, ...],
    platforms: tuple[str, ...],
    output: Path,
    home: Path,
    as_json: bool,
) -> int:
    """Write the pipeline of CONFIG, or a pipeline by itself, for one platform or several, with a
    table of how each carries what it uses. The same input gives the same bytes."""
    from rekindle.cli.job import arguments_of, graph_of
    from rekindle.cli.planning import on_machines
    from rekindle.platforms.parity import as_markdown
    from rekindle.spec.load import load_target

    wanted = load_target(config, overrides)
    text, graph = graph_of(wanted)
    files: dict[str, bytes] = {}
    problems: list[Problem] = []
    for platform in platforms:
        try:
            spec = on_machines(wanted, platform, home)
            files |= compiled(platform, spec, text, graph).files
        except RequestError as error:
            problems += error.problems
    if problems:
        raise RequestError(dict.fromkeys(problems))
    if len(platforms) > 1:
        arguments = arguments_of(spec, graph, "")
        files[PARITY] = as_markdown(_spread(spec, graph), platforms, arguments).encode()
    for name, content in files.items():
        write_atomically(output / name, content.decode())
    paths = [str(output / name) for name in files]
    if as_json:
        answer(Compiled(platform=",".join(platforms), files=tuple(paths)))
    else:
        for path in paths:
            if f"/{BUNDLES}/" not in path:
                click.echo(path)
        if bundles := sum(f"/{BUNDLES}/" in path for path in paths):
            click.echo(f"{output / BUNDLES}: {bundles} files that the steps run")
    return 0


def compiled(platform: str, spec: Spec, text: str, graph: Graph) -> Definition:
    """The definition for one platform, with the steps that train and score on the machines that the
    config asks for; RequestError with everything that is wrong."""
    from rekindle.cli.job import arguments_of
    from rekindle.cli.planning import settled
    from rekindle.platforms import code as own

    problems = list(_lacks(platform, spec))
    place = getattr(spec.platforms, platform)
    try:
        spec = settled(spec, platform)
        code = own.code_of(spec, graph)
        problems += own.problems(platform, spec, graph, code)
        spec = own.placed(spec, code)
        graph = _spread(spec, graph)
        compiler: Any = importlib.import_module(PLATFORMS[platform])
        arguments = arguments_of(spec, graph, place.artifact_root)
        definition: Definition = compiler.compile(text, graph, arguments, place)
    except RequestError as error:
        problems += error.problems
    if problems:
        raise RequestError(dict.fromkeys(problems))
    _say_what_is_needed(platform, graph)
    if place.image and "@" not in place.image:
        log.warning(
            "%s may be another image tomorrow; `rekindle images push` notes its digest", place.image
        )
    return definition


def _say_what_is_needed(platform: str, graph: Graph) -> None:
    """Warn of what images need that no compiler can look into."""
    from rekindle.catalog.features import table
    from rekindle.ir.features import uses

    carried = table()["container_components"].on[platform]
    paths = [use.path for use in uses(graph) if use.feature == "container_components"]
    if paths and carried.verdict == "emulated":
        log.warning("%s on %s: %s", ", ".join(paths), platform, carried.how)


def _spread(spec: Spec, graph: Graph) -> Graph:
    """The steps that train and score on the machines that the config asks for."""
    from rekindle.ir.distribution import Distribution
    from rekindle.spec.model import ResourcesSpec

    asked = spec.resources
    machines = {name: getattr(asked, name) for name in ResourcesSpec.MACHINES}
    if machines == {name: getattr(ResourcesSpec(), name) for name in machines}:
        return graph
    if spec.pipeline is not None:
        raise RequestError(
            "`resources` are for the steps of rekindle's own pipeline that train and score",
            where="resources",
            fix="call rekindle.distribute(task, nodes=...) in your pipeline",
        )
    wanted = Distribution(checkpoint=_CHECKPOINT, **machines)
    if problems := wanted.problems(frozenset([_CHECKPOINT]), "resources"):
        raise RequestError(problems)
    for step in ON_MACHINES:
        graph = graph.spread(step, wanted)
    return graph


def _only_here(uri: str) -> str:
    """What a tracking URI means that steps elsewhere do not see, or ""."""
    found = urlsplit(uri)
    if not uri:
        return "the embedded registry"
    if uri == "databricks":  # MLflow's own word for one that the environment names
        return ""
    if found.scheme in ("", "file", "sqlite") or found.scheme.startswith("sqlite+"):
        return f"`{uri}`"
    if found.hostname in ("localhost", "127.0.0.1", "::1", "0.0.0.0"):  # noqa: S104 - refused
        return f"`{uri}`"
    return ""


_ROOTS = {
    "azureml": "abfs://container@account.dfs.core.windows.net/rekindle",
    "kubeflow": "s3://my-bucket/rekindle, or the mount point of a volume that all pods share",
}


def _lacks(platform: str, spec: Spec) -> Iterator[Problem]:
    """What rekindle's own pipeline needs of a platform beside what its compiler asks for."""
    if spec.pipeline is not None:
        return
    if what := _only_here(spec.registration.tracking_uri):
        yield Problem(
            f"{what} lives on this machine, and a cluster cannot reach it",
            "register.tracking_uri",
            "name a tracking server, such as https://mlflow.example.com",
        )
    root = getattr(spec.platforms, platform).artifact_root
    if platform in _ROOTS and "://" not in root and not root.startswith("/"):
        yield Problem(
            "checkpoints need a place that outlives a step",
            f"platforms.{platform}.artifact_root",
            f"set platforms.{platform}.artifact_root: {_ROOTS[platform]}",
        )
