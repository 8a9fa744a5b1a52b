"""The ranks of a run as the operating system shows them."""

import re

import psutil


def ranks_of(pid):
    """The living ranks among the descendants of a process, by their number."""
    found = [
        p
        for p in psutil.Process(pid).children(recursive=True)
        if re.fullmatch(r"rank \d+", name_of(p))
    ]
    return sorted(found, key=name_of)


def name_of(process):
    """Its name; nothing if it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""
