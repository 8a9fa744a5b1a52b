"""`rekindle init [DIR]`: a config to start from; with --full, the shipped pipeline and components,
too."""

import shlex
import shutil
from pathlib import Path

import click

from rekindle.app.draft import draft_config
from rekindle.app.pipeline import PIPELINE, shipped
from rekindle.cli.options import answer, shared
from rekindle.errors import RequestError
from rekindle.outputs import LaidOut


@click.command("init")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=Path())
@click.option(
    "--full",
    is_flag=True,
    help="All example configs with their data, and the pipeline and components to change.",
)
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    help="A config for this "
    "CSV, JSON lines or Parquet file, or folder of images by class, with its columns "
    "guessed.",
)
@shared
def command(folder: Path, full: bool, data: Path | None, home: Path, as_json: bool) -> None:
    """Copy a config to start from, with sample data and a README, into FOLDER (default: here); or
    write one for your own data. Never overwrites a file."""
    if data is not None:
        _draft(folder, data, full, as_json)
        return
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


def _draft(folder: Path, data: Path, full: bool, as_json: bool) -> None:
    if full:
        what = "--full copies our examples, and --data writes a config for yours"
        raise RequestError(what, fix="leave one of them out")
    data = data.absolute()
    inside = data.is_relative_to(folder.absolute())
    text, task = draft_config(data, str(data.relative_to(folder.absolute()) if inside else data))
    target = folder / f"{data.stem}.yaml"
    if target.exists():
        raise RequestError(f"already here: {target}", fix="rename it, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    if as_json:
        answer(LaidOut(folder=str(folder.absolute()), files=(target.name,)))
        return
    click.echo(f"wrote {target} for {task}; what was guessed of {data.name}:\n")
    click.echo(text)
    words = shlex.quote(str(target))
    click.echo(f"  rekindle doctor {words}     checks the data, every problem at once")
    click.echo(f"  rekindle run {words}        trains, judges and registers a model")
