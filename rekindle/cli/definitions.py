"""Definitions for platforms, and which of their steps will run again; sends nothing."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import click

from rekindle.app.compile import spread
from rekindle.app.pipeline import arguments_of, read_pipeline
from rekindle.app.prepared import prepare_for
from rekindle.app.runs import files_in, last_sent
from rekindle.cli.options import (
    FOLDER,
    Overrides,
    answer,
    of_config,
    platform,
    shared,
    show_notices,
    tell,
)
from rekindle.errors import Problem, RequestError, collected
from rekindle.outputs import Compiled, Difference
from rekindle.platforms.api import refuse_left_out
from rekindle.platforms.cache_diff import compare
from rekindle.platforms.feature_checks import parity_report
from rekindle.records import write_atomically
from rekindle.spec.installed import platform_names
from rekindle.spec.load import load_target

PARITY = ".parity.md"
BUNDLES = "bundles"  # folder with what steps run
_AGAIN = {"yes": "runs again", "perhaps": "may run again", "no": "cached", "gone": "gone"}


def parse_platforms(
    _context: click.Context, _option: click.Parameter, value: str
) -> tuple[str, ...]:
    """Platforms with commas between them, each once."""
    # dict: each once, in order
    names = tuple(dict.fromkeys(value.split(","))) if value else ()
    for name in names:
        if name not in platform_names():
            refuse_left_out(name)
            raise click.BadParameter(f"`{name}` is not one of {', '.join(platform_names())}")
    return names


@click.command("compile")
@of_config
@click.option(
    "--platform",
    "platforms",
    callback=parse_platforms,
    metavar="P[,P]",
    required=True,
    help=f"Target platform: {', '.join(platform_names())}; several are separated by commas.",
)
@click.option(
    "-o",
    "--output",
    type=FOLDER,
    default=Path("compiled"),
    show_default=True,
    help="Folder for the definition.",
)
@shared
def compile(
    config: Path,
    overrides: Overrides,
    platforms: tuple[str, ...],
    output: Path,
    home: Path,
    as_json: bool,
) -> None:
    """Write the definition of CONFIG, or of a pipeline alone (path.py:function, a
    compiled YAML), for each platform. For more than one it also writes
    PIPELINE.parity.md, a table of how each platform carries every step. The same input
    gives the same bytes."""
    loaded = load_target(config, overrides)
    pipeline = read_pipeline(loaded)
    files: dict[str, bytes] = {}
    notices: list[str] = []
    problems: list[Problem] = []
    for name in platforms:
        with collected(problems):
            prepared = prepare_for(name, loaded, home, pipeline, is_sent=False, trains=False)
            files |= prepared.definition.files
            notices += [f"on {name}, {notice}" for notice in prepared.definition.notices]
    # nothing is written unless all platforms can have it
    if problems:
        raise RequestError(dict.fromkeys(problems))
    if len(platforms) > 1:
        # of all platforms, so that it is the same whichever were asked for
        spec = prepared.spec
        graph = spread(spec, pipeline.graph)
        table = parity_report(graph, platform_names(), arguments_of(spec, graph, ""))
        files[f"{graph.name}{PARITY}"] = table.encode()
    texts = {str(output / name): content.decode() for name, content in files.items()}
    _refuse_to_replace(config, texts)
    replaced = {path for path, text in texts.items() if _holds_other(Path(path), text)}
    for path, text in texts.items():
        write_atomically(path, text)
    if as_json:
        written = tuple(texts)
        answer(Compiled(platform=",".join(platforms), files=written, notices=tuple(notices)))
    else:
        _print_paths(list(texts), replaced, output)
        show_notices(notices)


def _refuse_to_replace(config: Path, paths: Iterable[str]) -> None:
    """Raise RequestError where one of the paths is the config's."""
    if str(config.resolve()) in {str(Path(path).resolve()) for path in paths}:
        fix = "name another folder"
        raise RequestError(f"the definition would replace {config}", where="--output", fix=fix)


def _holds_other(path: Path, text: str) -> bool:
    """Whether there is a file with other content."""
    return path.is_file() and path.read_bytes() != text.encode()


def _print_paths(paths: Sequence[str], replaced: Collection[str], output: Path) -> None:
    """Print what was written; the many files that steps run as a number."""
    bundled = 0
    for path in paths:
        if f"/{BUNDLES}/" in path:
            bundled += 1
        elif path in replaced:
            click.echo(f"{path} (replaced other content)")
        else:
            click.echo(path)
    if bundled:
        click.echo(f"{output / BUNDLES}: {bundled} files that the steps run")


@click.command("diff")
@of_config
@platform("The platform to compile for.", required=True)
@click.option(
    "--against",
    type=FOLDER,
    default=None,
    help="What `rekindle compile` wrote; default: what was submitted last.",
)
@shared
def diff(
    config: Path,
    overrides: Overrides,
    platform: str,
    against: Path | None,
    home: Path,
    as_json: bool,
) -> None:
    """Say which steps of CONFIG the platform will run again, compared with what was
    submitted last, and why. Steps that it takes from its cache are listed as such."""
    spec = load_target(config, overrides)
    against = against or last_sent(spec.name, platform, home)
    before = files_in(against)
    prepared = prepare_for(platform, spec, home, is_sent=False, trains=False)
    target = prepared.platform
    after = prepared.definition
    if after.entry not in before:
        fix = f"rekindle compile {config} --platform {platform} -o {against}"
        raise RequestError(f"{against} holds no {after.entry}", where="--against", fix=fix)
    # the folder may hold more, such as the definitions of other platforms
    comparable = {}
    for name, content in before.items():
        if name == after.entry or name.startswith(f"{BUNDLES}/"):
            comparable[name] = content
    verdicts = compare(target.cache_keys(comparable), target.cache_keys(after.files))
    width = max((len(verdict.step) for verdict in verdicts), default=0)
    lines = [f"{v.step:<{width}}  {_AGAIN[v.again]:<13}  {v.why}" for v in verdicts]
    tell(Difference(platform=platform, steps=verdicts), "\n".join(lines), as_json)
