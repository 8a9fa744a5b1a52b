"""What was submitted, kept in the folder of its run."""

from __future__ import annotations

from pathlib import Path

from rekindle.app.runs import newest_first
from rekindle.errors import RequestError
from rekindle.platforms.definition import Definition
from rekindle.records import RunRecord

DEFINITION = "definition"  # folder of a run with what was submitted


def sent_definition(record: RunRecord, home: Path) -> Definition:
    """What was submitted, from the run's folder; RequestError where that is lost."""
    folder = home / "runs" / record.run_id / DEFINITION
    if not (files := files_in(folder)):
        raise RequestError(
            f"what was submitted as {record.run_id} is not in {folder}",
            fix=f"submit it again: {record.command}",
        )
    return Definition(files)


def keep_definition(record: RunRecord, definition: Definition, home: Path) -> None:
    """Leave what is about to be submitted in the run's folder."""
    folder = home / "runs" / record.run_id / DEFINITION
    for name, content in definition.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def files_in(folder: Path) -> dict[str, bytes]:
    """The files below the folder, by their paths in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def last_sent(name: str, platform: str, home: Path) -> Path:
    """The folder with what was submitted last to the platform; RequestError if nothing was."""
    for record in newest_first(home):
        folder = home / "runs" / record.run_id / DEFINITION
        if (record.platform, record.name) == (platform, name) and folder.is_dir():
            return folder
    raise RequestError(
        f"nothing of {name} was submitted to {platform} from {home}", where="--against",
        fix="name a folder that `rekindle compile` wrote",
    )  # fmt: skip
