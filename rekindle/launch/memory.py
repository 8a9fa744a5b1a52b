"""How much memory of the host a process may still take, by its cgroups and by the machine, and how
often the kernel killed for the lack of it.

Follows the kernel's documents of cgroups, version 2 (memory.max, memory.current) and version 1
(memory.limit_in_bytes, memory.usage_in_bytes), and proc(5). Pages of files count as free: the
kernel drops them when memory is needed. Standard library only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

# of version 2, and of 1, whose counters without `total_` leave out what lies below
_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def available_bytes(root: Path = Path("/")) -> int:
    """The least that the machine and each of this process's cgroups have left."""
    meminfo = (root / "proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    left = [int(found[1]) * 1024] if found else []
    for top, own in _groups(root):
        for folder in (each for each in (own, *own.parents) if each.is_relative_to(top)):
            for limit, used, prefix in _FILES:
                with contextlib.suppress(OSError, ValueError):  # "max" is not a number
                    free = int((folder / limit).read_text()) - int((folder / used).read_text())
                    lines = (folder / "memory.stat").read_text().splitlines()
                    counters = dict(line.split() for line in lines if line)
                    kinds = (f"{prefix}inactive_file", f"{prefix}active_file")
                    left.append(free + sum(int(counters.get(kind, 0)) for kind in kinds))
    return max(0, min(left, default=1 << 62))


def identity(root: Path = Path("/")) -> str:
    """The same text for processes that share memory: of one machine, in one container."""
    texts = []
    for path in ("proc/sys/kernel/random/boot_id", "proc/self/cgroup"):
        with contextlib.suppress(OSError):
            texts.append((root / path).read_text())
    with contextlib.suppress(OSError):  # in a namespace of its own each container is "/"
        texts.append(str((root / "proc/self/ns/cgroup").readlink()))
    return "".join(texts)


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory in this process's cgroup, or on
    the machine where there is none to read."""
    files = []
    with contextlib.suppress(OSError):
        for top, own in _groups(Path("/")):
            name = "memory.oom_control" if top.name == "memory" else "memory.events"
            files += [own / name, top / name]
    for path in (*files, Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def _groups(root: Path) -> Iterator[tuple[Path, Path]]:
    """The root of each hierarchy of cgroups, which in a container is its own, and the folder of
    this process's."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            yield top, top / path.lstrip("/")
