"""What is done to processes and files: each from one random generator, each counted."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import psutil


class Child(Protocol):
    """A run: `subprocess.Popen`, or a fork of this process."""

    pid: int

    def poll(self) -> int | None: ...


class Counts(collections.Counter[str]):
    """How often each thing was done; `recoveries` are the seconds that recovering runs took."""

    def __init__(self) -> None:
        super().__init__()
        self.recoveries: list[float] = []
        self.notes: set[str] = set()


class Chaos:
    """The accidents of one round."""

    def __init__(self, seed: int, counts: Counts) -> None:
        self.random, self.counts = random.Random(seed), counts
        self.log: list[str] = []

    def did(self, what: str, detail: str = "") -> None:
        self.counts[what] += 1
        self.log.append(f"{what} {detail}".strip())

    # processes

    def disturb(self, child: Child, within: float, when: Callable[[], bool] = lambda: True) -> None:
        """Wait until `when` and up to `within` seconds more, then do one thing to the processes of
        a run."""
        pause = self.random.uniform(0.0, within)
        kinds = ["kill tree", "kill one", "kill main", "ask to stop", "hold up"]
        kind = self.random.choices(kinds, [4, 3, 2, 1, 2])[0]
        picks = self.random.random()
        while child.poll() is None and not when():
            time.sleep(0.02)
        end = time.monotonic() + pause
        while time.monotonic() < end and child.poll() is None:
            time.sleep(0.01)
        if child.poll() is not None:
            return
        tree = processes_of(child.pid)
        one = tree[int(picks * len(tree))]
        self.did(kind, f"{name_of(one)} after {pause:.1f} s")
        if kind == "kill tree":
            for process in self.random.sample(tree, len(tree)):
                send(process, signal.SIGKILL)
        elif kind == "kill one":
            send(one, signal.SIGKILL)
        elif kind == "kill main":
            os.kill(child.pid, signal.SIGKILL)
        elif kind == "ask to stop":
            os.kill(child.pid, self.random.choice([signal.SIGINT, signal.SIGTERM]))
        else:
            self._hold_up([process for process in tree if self.random.random() < 0.6] or tree)

    def _hold_up(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            send(process, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.05, 1.5))
        for process in processes:
            send(process, signal.SIGCONT)

    # files

    def damage(self, files: list[Path]) -> list[Path]:
        """Do something to one to four of the files; those that were met."""
        chosen = self.random.sample(files, min(len(files), self.random.randint(1, 4)))
        for file in chosen:
            kind = self.random.choice(
                ["flip", "flip", "cut", "empty", "delete", "garbage", "append"]
            )
            self.did("files damaged", f"{kind} {file}")
            self._damage(file, kind)
        return chosen

    def _damage(self, file: Path, kind: str) -> None:
        before = file.stat()
        content = bytearray(file.read_bytes())
        if kind == "delete":
            file.unlink()
            return
        if kind == "flip" and content:
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        elif kind == "cut":
            content = content[: self.random.randrange(len(content) + 1)]
        elif kind == "garbage":
            content = bytearray(self.random.randbytes(len(content)))
        elif kind == "append":
            content += self.random.randbytes(20) + b"\n"
        else:
            content = bytearray()
        with file.open("r+b") as opened:  # in place, as a disk does it
            opened.write(content)
            opened.truncate()
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    def moved(self, home: Path) -> Path:
        """The home under another name, or a copy of it whose original is damaged."""
        there = home.with_name(f"{home.name}-{self.random.randrange(10**6)}")
        if self.random.random() < 0.5:
            self.did("homes moved")
            return home.rename(there)
        self.did("homes copied")
        shutil.copytree(home, there, symlinks=True)
        shutil.rmtree(home)
        return there


def send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def name_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return "gone"


def processes_of(pid: int) -> list[psutil.Process]:
    """A run's own process and all below it."""
    with contextlib.suppress(psutil.Error):
        main = psutil.Process(pid)
        return [main, *main.children(recursive=True)]
    return []


def left_in(folder: Path) -> list[psutil.Process]:
    """Processes that still work in a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder):
                found.append(process)
    return found


def files_in(home: Path, *aside: str) -> list[Path]:
    """Files below a home, in order, but for what lies in folders or files with these names."""
    files = (path for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(f for f in files if not {*f.relative_to(home).parts} & {*aside})


def limit_file_size(limit: int) -> None:
    """In a child: what is written beyond is refused, as by a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """A file system of `size` bytes in `folder`; False where we may not have one."""
    import subprocess

    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def grow(folder: Path) -> None:
    """Make room on a small disk."""
    import subprocess

    subprocess.run(["mount", "-o", "remount,size=400m", str(folder)], check=True)
