"""The ranks of a run as the operating system shows them."""

import re
from pathlib import Path

import psutil


def ranks_of(pid):
    """The living ranks of a process, by their number: those that print where it or one of its descendants does."""
    launcher = psutil.Process(pid)
    family = {printing(p) for p in (launcher, *launcher.children(recursive=True))} - {
        None,
        "/dev/null",
    }
    ranks = [p for p in psutil.process_iter() if re.fullmatch(r"rank \d+", name_of(p))]
    return sorted((p for p in ranks if printing(p) in family), key=name_of)


def printing(process):
    """The file or pipe of its standard output; None if it has ended."""
    try:
        return str(Path(f"/proc/{process.pid}/fd/1").readlink())
    except OSError:
        return None


def name_of(process):
    """Its name; nothing if it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""
