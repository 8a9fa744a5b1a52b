"""`rekindle images build|push CONFIG`: the user's code in an image, and that image in the
registry that a platform pulls it from, by digest."""

import os
from pathlib import Path

import click

from rekindle.app.pipeline import read_pipeline
from rekindle.cli.definitions import parse_platforms
from rekindle.cli.options import Overrides, answer, of_config, shared
from rekindle.errors import Problem, RequestError
from rekindle.outputs import ImageBuilt, ImagesPushed
from rekindle.platforms import docker as daemon
from rekindle.platforms.docker import Docker, code_label, find
from rekindle.platforms.user_code import Code, code_of
from rekindle.spec import lock
from rekindle.spec.installed import platform_names
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec


@click.group("images")
def command() -> None:
    """Build an image with your code, and push it to a registry."""


@command.command("build")
@of_config
@shared
def build(config: Path, overrides: Overrides, home: Path, as_json: bool) -> None:
    """Build an image on this machine: rekindle's image (`image.base`) and the files that
    the steps of CONFIG need."""
    spec, code = _read(config, overrides)
    name = daemon.local_name(spec.name)
    image_id = daemon.build(_docker(), code, spec.image.base, name)
    files = tuple(sorted(code.files))
    if as_json:
        answer(ImageBuilt(image=name, id=image_id, code=code.digest, files=files))
        return
    for file in files:
        click.echo(f"  {file}", err=True)
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    click.echo(f"{name} {image_id}: {spec.image.base} and {count} of yours")
    click.echo(f"next: rekindle images push {config}")


@command.command("push")
@of_config
@click.option(
    "--platform",
    "platforms",
    callback=parse_platforms,
    metavar="P[,P]",
    default="",
    help="Platforms to push for, separated by commas; default: each platform with an `image` in "
    "CONFIG.",
)
@shared
def push(
    config: Path,
    overrides: Overrides,
    platforms: tuple[str, ...],
    home: Path,
    as_json: bool,
) -> None:
    """Push that image as `platforms.P.image` (REGISTRY/NAME:TAG), and write its digest to
    rekindle.lock beside CONFIG. Later commands read it there."""
    spec, code = _read(config, overrides)
    names = _image_names(spec, platforms)
    docker = _docker()
    local_name = daemon.local_name(spec.name)
    _refuse_other_code(docker, local_name, code, config)
    pushed = []
    for name in names:
        pin = daemon.push(docker, local_name, name)
        lock.write(config.parent, {name: pin})  # one by one: the next may fail
        pinned_name = lock.by_digest(name, pin)
        pushed.append(pinned_name)
        if not as_json:
            click.echo(pinned_name)
    path = config.parent / lock.NAME
    if as_json:
        answer(ImagesPushed(images=tuple(pushed), lock=str(path)))
    else:
        click.echo(f"digests written to {path}: commit it", err=True)


def _read(config: Path, overrides: Overrides) -> tuple[Spec, Code]:
    """The spec, with images as it names them, and the code that its steps need."""
    spec = load_target(config, overrides, pinned=False)
    return spec, code_of(spec, read_pipeline(spec).graph)


def _image_names(spec: Spec, platforms: tuple[str, ...]) -> list[str]:
    """The names to push the image as, each once.

    The images of platforms that are asked for have to be tags."""
    fix = "set it to REGISTRY/NAME:TAG; its digest is written to rekindle.lock"
    names: dict[str, None] = {}
    problems: list[Problem] = []
    for platform in platforms or platform_names():
        where = f"platforms.{platform}.image"
        name = spec.platforms.section(platform).image
        if not name:
            problems.append(Problem(f"{where} is not set", where, fix))
        elif "@" in name:
            problems.append(Problem(f"{name} is a digest; an image is pushed as a tag", where, fix))
        else:
            names[name] = None
    if problems and (platforms or not names):
        raise RequestError(problems)
    return list(names)


def _refuse_other_code(docker: Docker, local_name: str, code: Code, config: Path) -> None:
    """Raise RequestError unless the image here has the code that is here."""
    image_code = code_label(docker, local_name)
    if image_code == code.digest:
        return
    message = f"{local_name} was built from other files than those that are here now"
    if image_code is None:
        message = f"there is no image {local_name} here"
    raise RequestError(message, fix=f"rekindle images build {config}")


def _docker() -> Docker:
    try:
        return find(os.environ)
    except RequestError as error:
        raise RequestError(error.problems[0].what, fix="install docker and start it") from None
