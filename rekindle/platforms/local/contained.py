"""The shim of a step in a container: what it runs is docker's client, and however that ends, the
container goes.

TASK.json holds `afterwards` too, the command that removes the container. A client that is killed
leaves its container running, so this is the shim's process itself, which outlives a killed run for
as long as that takes. Standard library only, as the shim."""

import contextlib
import json
import signal
import subprocess
from pathlib import Path

from rekindle.launch import shim


def main(argv: list[str]) -> int:
    """Run the task in the file `argv[1]`; the exit code is the container's."""
    afterwards = json.loads(Path(argv[1]).read_text(encoding="utf-8"))["afterwards"]
    try:
        return shim.main(argv)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            subprocess.run(
                afterwards, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
