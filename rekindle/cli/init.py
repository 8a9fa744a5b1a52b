"""`rekindle init [DIR]`: a config to start from, or all that is shipped (--full)."""

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
    """Copy a config to start from, with sample data and a README, into FOLDER (default:
    here); or write one for your own data. Never overwrites a file."""
    if data is not None:
        _draft(folder, data, full, as_json)
        return
    files = _full_files() if full else _starter_files()
    existing = [str(folder / target) for target in files if (folder / target).exists()]
    if existing:
        fix = "choose an empty folder"
        raise RequestError(f"already here: {', '.join(existing[:5])}", fix=fix)
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


def _starter_files() -> dict[Path, Path]:
    """The shipped files of a config to start from, by where they go."""
    root = shipped("configs/starter")
    return {path.relative_to(root): path for path in _source_files(root)}


def _full_files() -> dict[Path, Path]:
    """All example configs, the pipeline and the components, by where they go."""
    files = {}
    for part in ("configs", "pipelines", "components"):
        root = shipped(part)
        for path in _source_files(root):
            # what pipelines were compiled to is of no use where they are changed
            if (part, path.suffix) != ("pipelines", ".yaml"):
                files[Path(part) / path.relative_to(root)] = path
    return files


def _source_files(root: Path) -> list[Path]:
    paths = sorted(root.rglob("*"))
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


def _draft(folder: Path, data: Path, full: bool, as_json: bool) -> None:
    """Write a config for the user's data into the folder."""
    if full:
        message = "--full copies our examples, and --data writes a config for yours"
        raise RequestError(message, fix="leave one of them out")
    data = data.absolute()
    source = data
    if data.is_relative_to(folder.absolute()):
        source = data.relative_to(folder.absolute())  # so that the folder can be moved
    text, task = draft_config(data, str(source))
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
    quoted = shlex.quote(str(target))
    click.echo(f"  rekindle doctor {quoted}     checks the data, every problem at once")
    click.echo(f"  rekindle run {quoted}        trains, judges and registers a model")
