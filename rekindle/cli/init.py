"""`rekindle init [DIR]`: a starter config, the shipped pipeline and components to change."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import click

from rekindle.app.pipeline import PIPELINE, shipped
from rekindle.cli.options import answer, shared
from rekindle.errors import RequestError
from rekindle.outputs import LaidOut


@click.command("init")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=Path())
@shared
def command(folder: Path, home: Path, as_json: bool) -> int:
    """Copy configs/, pipelines/ and components/ into FOLDER (default: here). Never overwrites a
    file."""
    files = {
        Path(part) / path.relative_to(shipped(part)): path
        for part in ("configs", "pipelines", "components")
        for path in sorted(shipped(part).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    taken = [str(folder / target) for target in files if (folder / target).exists()]
    if taken:
        raise RequestError(f"{', '.join(taken[:5])} exists already", fix="choose an empty folder")
    for target, source in files.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / target)
    if as_json:
        answer(LaidOut(folder=str(folder.absolute()), files=tuple(sorted(map(str, files)))))
        return 0
    click.echo(f"laid out {len(files)} files in {folder.absolute()}")
    if folder.resolve() != Path.cwd():
        click.echo(f"  cd {shlex.quote(str(folder))}")
    click.echo("  rekindle run configs/digits.yaml          the demo")
    own = f"--set pipeline={PIPELINE} --set receives=all"
    click.echo(f"  rekindle run configs/digits.yaml {own}   your copy of it")
    return 0
