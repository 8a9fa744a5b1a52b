"""What tests share with platforms/local/test_execute.py."""

from __future__ import annotations

from pathlib import Path


def alive(folder: Path) -> list[int]:
    """Which of the processes that a step wrote down still run."""
    pids = map(int, (folder / "pids").read_text().split())
    return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
