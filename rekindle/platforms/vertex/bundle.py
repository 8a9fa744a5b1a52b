"""What the nodes of one attempt are given: a folder on the mount of Cloud Storage with `node.pyz`
and `task.json`.

The zip holds the modules that node.py imports, under their own names; what is started from it finds
no other rekindle, and what the step itself imports is that of its image."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from rekindle.platforms.vertex.node import TASK

ENTRY = "node.pyz"
PACKAGE = Path(__file__).parents[2]
MODULES = (
    "__init__", "errors", "http", "launch.__init__", "launch.node", "launch.rendezvous",
    "launch.shim", "masking", "platforms.__init__", "platforms.vertex.__init__",
    "platforms.vertex.node", "platforms.vertex.rendezvous", "platforms.vertex.rest",
)  # fmt: skip
_MAIN = """import pathlib, sys
from rekindle.platforms.vertex.node import main
sys.exit(main(pathlib.Path(__file__).absolute().parent.parent))
"""


def write(folder: Path, task: dict[str, Any]) -> list[str]:
    """Fill the folder; the command that runs a node from it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TASK).write_text(json.dumps(task), encoding="utf-8")
    content = io.BytesIO()  # the mount is written in one go
    with zipfile.ZipFile(content, "w") as bundle:
        for module in MODULES:
            path = Path(*module.split(".")).with_suffix(".py")
            bundle.write(PACKAGE / path, Path("rekindle", path))
        bundle.writestr("__main__.py", _MAIN)
    (folder / ENTRY).write_bytes(content.getvalue())
    return ["python3", str(folder / ENTRY)]


def folder_of(command: tuple[str, ...]) -> Path | None:
    """The folder behind a command of `write`; None for another one."""
    return Path(command[-1]).parent if command and command[-1].endswith(f"/{ENTRY}") else None
