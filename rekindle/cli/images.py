"""`rekindle images build|push CONFIG`: the user's code in an image, and that image in the registry
that a platform pulls it from, by digest."""

import os
from pathlib import Path

import click

from rekindle.app.pipeline import graph_of
from rekindle.cli.definitions import several
from rekindle.cli.options import Overrides, answer, of_config, shared
from rekindle.errors import Problem, RequestError
from rekindle.outputs import ImageBuilt, ImagesPushed
from rekindle.platforms import docker as daemon
from rekindle.platforms.docker import Docker, code_label, find
from rekindle.platforms.platform import PLATFORMS
from rekindle.platforms.user_code import Code, code_of
from rekindle.spec import lock
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec


@click.group("images")
def command() -> None:
    """Build an image with your code, and push it to a registry."""


@command.command("build")
@of_config
@shared
def build(config: Path, overrides: Overrides, home: Path, as_json: bool) -> None:
    """Build an image on this machine: rekindle's image (`image.base`) and the files that the steps
    of CONFIG need."""
    spec, code = _read(config, overrides)
    name = daemon.local_name(spec.name)
    image_id = daemon.build(_docker(), code, spec.image.base, name)
    if as_json:
        files = tuple(sorted(code.files))
        answer(ImageBuilt(image=name, id=image_id, code=code.digest, files=files))
        return
    for file in sorted(code.files):
        click.echo(f"  {file}", err=True)
    count = "1 file" if len(code.files) == 1 else f"{len(code.files)} files"
    click.echo(f"{name} {image_id}: {spec.image.base} and {count} of yours")
    click.echo(f"next: rekindle images push {config}")


@command.command("push")
@of_config
@click.option(
    "--platform",
    "platforms",
    callback=several,
    metavar="P[,P]",
    default="",
    help="Platforms to push for, separated by commas; default: each platform with an `image` in "
    "CONFIG.",
)
@shared
def push(
    config: Path, overrides: Overrides, platforms: tuple[str, ...], home: Path, as_json: bool
) -> None:
    """Push that image as `platforms.P.image` (REGISTRY/NAME:TAG), and write its digest to
    rekindle.lock beside CONFIG. Later commands read it there."""
    spec, code = _read(config, overrides)
    names = _names(spec, platforms)
    docker, local = _docker(), daemon.local_name(spec.name)
    _check(docker, local, code, config)
    pushed = []
    for name in names:
        pin = daemon.push(docker, local, name)
        lock.write(config.parent, {name: pin})  # one by one: the next may fail
        pushed.append(lock.by_digest(name, pin))
        if not as_json:
            click.echo(pushed[-1])
    path = config.parent / lock.NAME
    if as_json:
        answer(ImagesPushed(images=tuple(pushed), lock=str(path)))
    else:
        click.echo(f"digests written to {path}: commit it", err=True)


def _read(config: Path, overrides: Overrides) -> tuple[Spec, Code]:
    """The spec, with images as it names them, and the code that its steps need."""
    spec = load_target(config, overrides, pinned=False)
    return spec, code_of(spec, graph_of(spec)[1])


def _names(spec: Spec, platforms: tuple[str, ...]) -> list[str]:
    """What to push it as, each once."""
    there = {p: getattr(spec.platforms, p).image or "" for p in platforms or PLATFORMS}
    names = list(dict.fromkeys(name for name in there.values() if name and "@" not in name))
    fix, problems = "set it to REGISTRY/NAME:TAG; its digest is written to rekindle.lock", []
    for where, name in ((f"platforms.{p}.image", name) for p, name in there.items()):
        if not name:
            problems.append(Problem(f"{where} is not set", where, fix))
        elif "@" in name:
            problems.append(Problem(f"{name} is a digest; an image is pushed as a tag", where, fix))
    if problems and (platforms or not names):
        raise RequestError(problems)
    return names


def _check(docker: Docker, local: str, code: Code, config: Path) -> None:
    """RequestError unless the image here has the code that is here."""
    held = code_label(docker, local)
    if held != code.digest:
        what = f"{local} was built from other files than those that are here now"
        fix = f"rekindle images build {config}"
        raise RequestError(what if held is not None else f"there is no image {local} here", fix=fix)


def _docker() -> Docker:
    try:
        return find(os.environ)
    except RequestError as error:
        raise RequestError(error.problems[0].what, fix="install docker and start it") from None
