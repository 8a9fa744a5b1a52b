"""Signs of life: one small file a rank, which it writes through a memory map and its supervisor
reads.

Decides the format. The room for a rank's last words is part of the file from the start, because a
full disk must not keep it from saying so. Times are CLOCK_MONOTONIC, which all processes of a
machine share; standard library only, so that a supervisor needs no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

Phase = Literal["start", "warm-up", "step", "validation", "save", "finish"]
PHASES: tuple[Phase, ...] = get_args(Phase)

_BYTES = 8192
_BEAT = struct.Struct("<dqB")  # time, step, phase
_WHO = struct.Struct("<iQq")  # process, main thread, first step trained by this process
_WHO_AT, _WORDS_AT = 32, 64
_LENGTH = struct.Struct("<I")


@dataclasses.dataclass(frozen=True)
class Sign:
    """What a rank last said of itself: `phase` and `step` (the one in work, counted from 1) at
    `time` (CLOCK_MONOTONIC), the `first_step` it trained (0: none yet), and its last `words` as
    `Vitals.failed` left them, or nothing."""

    rank: int
    pid: int
    thread: int
    time: float
    step: int
    phase: Phase
    first_step: int
    words: dict[str, Any] | None

    @property
    def age(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self.time

    @property
    def doing(self) -> str:
        """`step 5`, `validation after step 5`, `start`."""
        if self.phase == "step":
            return f"step {self.step}"
        return f"{self.phase} at step {self.step}" if self.step else self.phase


class SignFile:
    """The rank's end: writes its file in place; never blocks on a disk."""

    def __init__(self, status: Path, rank: int, thread: int) -> None:
        status.mkdir(parents=True, exist_ok=True)
        path = _path(status, rank)
        with path.open("wb") as file:
            file.write(b"\0" * _BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._thread, self._first = thread, 0
        self.beat(0, "start")

    def beat(self, step: int, phase: Phase) -> None:
        """A sign of life; about a microsecond."""
        if self._first == 0 and (phase == "step" or not _WHO.unpack_from(self._map, _WHO_AT)[0]):
            self._first = step
            _WHO.pack_into(self._map, _WHO_AT, os.getpid(), self._thread, step)
        _BEAT.pack_into(self._map, 0, time.monotonic(), step, PHASES.index(phase))

    def say(self, words: dict[str, Any]) -> None:
        """Leave last words; only the first ones count."""
        if _LENGTH.unpack_from(self._map, _WORDS_AT)[0]:
            return
        content = json.dumps(words).encode()
        start = _WORDS_AT + _LENGTH.size
        self._map[start : start + len(content)] = content
        _LENGTH.pack_into(self._map, _WORDS_AT, len(content))


def clear(status: Path) -> None:
    """Forget the ranks of an earlier gang."""
    for path in (*status.glob("rank-*.signs"), *status.glob("rank-*.stacks")):
        path.unlink(missing_ok=True)


def read(status: Path) -> list[Sign]:
    """The signs of all ranks of this machine that have started, by rank."""
    return sorted(_read(status), key=lambda sign: sign.rank)


def stacks_path(status: Path, rank: int) -> Path:
    """Where a rank writes its stacks when it is asked to with SIGUSR1."""
    return status / f"rank-{rank}.stacks"


def _path(status: Path, rank: int) -> Path:
    return status / f"rank-{rank}.signs"


def _read(status: Path) -> Iterator[Sign]:
    for path in status.glob("rank-*.signs"):
        content = b""
        with contextlib.suppress(OSError):
            content = path.read_bytes()
        if len(content) < _BYTES:
            continue
        when, step, phase = _BEAT.unpack_from(content)
        pid, thread, first = _WHO.unpack_from(content, _WHO_AT)
        if not when:
            continue
        size = _LENGTH.unpack_from(content, _WORDS_AT)[0]
        start = _WORDS_AT + _LENGTH.size
        words = json.loads(content[start : start + size]) if size else None
        rank = int(path.stem.removeprefix("rank-"))
        yield Sign(rank, pid, thread, when, step, PHASES[phase], first, words)
