"""Long pauses of the processes of steps made short, by a module that Python imports as it starts: what
waits for a cloud looks each quarter of a minute, and the ones that are played are ready at once."""

from __future__ import annotations

from pathlib import Path

_CODE = """
import time

_sleep = time.sleep
time.sleep = lambda seconds: _sleep(0.2 if seconds > 5 else seconds)
"""


def installed(folder: Path) -> str:
    """The folder for PYTHONPATH, which has it now."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_CODE)
    return str(folder)
