"""Heartbeats: one small file a rank, which it overwrites in place and its supervisor reads.

Decides the format. The room for a rank's last words is part of the file from the start, because a
full disk must not keep it from saying so. Times are CLOCK_MONOTONIC, which all processes of a
machine share; standard library only, so that a supervisor needs no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import struct
import time
from pathlib import Path
from typing import Any, Literal, get_args

Phase = Literal["start", "warm-up", "step", "validation", "save", "finish", "score"]
PHASES: tuple[Phase, ...] = get_args(Phase)
PIECEWISE: tuple[Phase, ...] = ("start", "finish")

_BYTES = 1 << 16
_BEAT = struct.Struct("<dqB")  # time, step, phase
_WHO = struct.Struct("<iQq")  # process, main thread, first step trained by this process
_WHO_AT, _WORDS_AT = 32, 64
_LENGTH = struct.Struct("<I")


@dataclasses.dataclass(frozen=True)
class Heartbeat:
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


class HeartbeatFile:
    """The rank's end: overwrites its file in place, and so needs no room on the disk."""

    def __init__(self, status: Path, rank: int, thread: int) -> None:
        status.mkdir(parents=True, exist_ok=True)
        path = status / f"rank-{rank}.signs"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self._file, b"\0" * _BYTES, 0)
        self._thread, self._first, self._spoken = thread, 0, False
        self._last: tuple[int, Phase] = (0, "start")
        self._introduce()
        self.beat(0, "start")

    def beat(self, step: int, phase: Phase) -> None:
        """A heartbeat; about a microsecond."""
        if phase == "step" and not self._first:
            self._first = step
            self._introduce()
        self._last = step, phase
        os.pwrite(self._file, _BEAT.pack(time.monotonic(), step, PHASES.index(phase)), 0)

    def go_on(self) -> None:
        """A heartbeat from a start or an end that consists of many pieces of work. In any other
        phase it does nothing: a thread in the background must not hide that the main one hangs."""
        step, phase = self._last
        if phase in PIECEWISE:
            self.beat(step, phase)

    def say(self, words: dict[str, Any]) -> None:
        """Leave last words; only the first ones count."""
        if not self._spoken:
            self._spoken = True
            content = json.dumps(words).encode()
            os.pwrite(self._file, content, _WORDS_AT + _LENGTH.size)
            os.pwrite(self._file, _LENGTH.pack(len(content)), _WORDS_AT)

    def _introduce(self) -> None:
        os.pwrite(self._file, _WHO.pack(os.getpid(), self._thread, self._first), _WHO_AT)


def clear(status: Path) -> None:
    """Forget the ranks of an earlier attempt."""
    for path in (*status.glob("rank-*.signs"), *status.glob("rank-*.stacks")):
        path.unlink(missing_ok=True)


def read(status: Path) -> list[Heartbeat]:
    """The signs of all ranks of this machine that have started, by rank."""
    found = []
    for path in status.glob("rank-*.signs"):
        content = b""
        with contextlib.suppress(OSError):
            content = path.read_bytes()
        if len(content) < _BYTES:
            continue
        when, step, phase = _BEAT.unpack_from(content)
        pid, thread, first = _WHO.unpack_from(content, _WHO_AT)
        size = _LENGTH.unpack_from(content, _WORDS_AT)[0]
        start = _WORDS_AT + _LENGTH.size
        if when:
            words = json.loads(content[start : start + size]) if size else None
            rank = int(path.stem.removeprefix("rank-"))
            found.append(Heartbeat(rank, pid, thread, when, step, PHASES[phase], first, words))
    return sorted(found, key=lambda heartbeat: heartbeat.rank)


def stacks_path(status: Path, rank: int) -> Path:
    """Where a rank writes its stacks when it is asked to with SIGUSR1."""
    return status / f"rank-{rank}.stacks"
