"""Processes that end with their parent, folders that one process owns, signals that arrive."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that a killed run leaves no trainer
    behind.

    Nothing happens on other systems. A process whose parent is already gone exits at once.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def owned(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold `folder` for this process alone; calls `on_wait` once if another process holds it, then
    waits for it.

    The lock is the kernel's (flock), so it is released however the owner ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def on_signal(handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler` for SIGTERM and SIGINT instead of dying of them, until the block ends."""

    def receive(number: int, frame: FrameType | None) -> None:
        handler(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
