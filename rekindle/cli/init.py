"""`rekindle init [DIR]`: a config to start from; with --full, the shipped pipeline and components,
too."""

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
@click.option("--full", is_flag=True, help="All example configs with their data, and the pipeline "
              "and components to change.")  # fmt: skip
@shared
def command(folder: Path, full: bool, home: Path, as_json: bool) -> None:
    """Copy a config to start from, with sample data and a README, into FOLDER (default: here).
    Never overwrites a file."""
    parts = ("configs", "pipelines", "components") if full else ("configs/starter",)
    files = {
        Path(part if full else "") / path.relative_to(shipped(part)): path
        for part in parts
        for path in sorted(shipped(part).rglob("*"))
        if path.is_file()
        and "__pycache__" not in path.parts
        # what pipelines were compiled to is of no use where they are changed
        and (part, path.suffix) != ("pipelines", ".yaml")
    }
    taken = [str(folder / target) for target in files if (folder / target).exists()]
    if taken:
        raise RequestError(f"already here: {', '.join(taken[:5])}", fix="choose an empty folder")
    for target, source in files.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / target)
    if as_json:
        answer(LaidOut(folder=str(folder.absolute()), files=tuple(sorted(map(str, files)))))
        return
    click.echo(f"laid out {len(files)} files in {folder.absolute()}")
    if folder.resolve() != Path.cwd():
        click.echo(f"  cd {shlex.quote(str(folder))}")
    if not full:
        click.echo("  rekindle run tickets.yaml     README.md says how to change it to your data")
        return
    click.echo("  rekindle run configs/digits.yaml          the demo")
    own = f"--set pipeline={PIPELINE} --set receives=all"
    click.echo(f"  rekindle run configs/digits.yaml {own}   your copy of it")
