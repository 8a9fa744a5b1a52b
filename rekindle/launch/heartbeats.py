"""Heartbeats of ranks, and which rank is to blame when a worker group ends.

Each rank has a small file, which it overwrites in place and its supervisor reads; this
module decides its format. The room for a rank's last words is part of the file from the
start, because a full disk must not keep the rank from reporting just that. Times are
CLOCK_MONOTONIC, which all processes of a machine share. Standard library only, so that a
supervisor needs no torch.

The first cause is found from the last words of ranks, from how they ended and from where
they hang. Errors that only say that a peer is gone come last, as do exits that follow
from others; among the rest the earliest counts. A rank hangs itself if its main thread is
not waiting for others; if all wait, the one that is furthest behind is to blame."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import struct
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

Phase = Literal["start", "warm-up", "step", "validation", "save", "finish", "score"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# phases that consist of many pieces of work, each of which counts as a heartbeat
PIECEWISE: tuple[Phase, ...] = ("start", "finish")

_BYTES = 1 << 16  # of a file: heartbeat, process and room for last words
_BEAT = struct.Struct("<dqB")  # time, step, phase; at the beginning of the file
_WHO = struct.Struct("<iQq")  # process, main thread, first step trained by this process
_WHO_AT = 32  # bytes into the file
_WORDS_AT = 64
_LENGTH = struct.Struct("<I")  # of the last words, before them


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a rank."""

    rank: int
    pid: int
    thread: int
    """The identifier of its main thread, by which faulthandler names it."""
    time: float
    """When it was sent, by CLOCK_MONOTONIC."""
    step: int
    """The step that the rank works on, counted from 1; 0: none yet."""
    phase: Phase
    first_step: int
    """The first step that this process trained; 0: none yet."""
    words: dict[str, Any] | None
    """The rank's last words, as `Vitals.failed` left them; None if it has not failed."""

    @property
    def age(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self.time

    @property
    def doing(self) -> str:
        """What the rank does, in words: `step 5`, `validation at step 5`, `start`."""
        if self.phase == "step":
            return f"step {self.step}"
        if self.step:
            return f"{self.phase} at step {self.step}"
        return self.phase


class HeartbeatFile:
    """The rank's side: it overwrites its file in place, which needs no room on the disk."""

    def __init__(self, status: Path, rank: int, thread: int) -> None:
        status.mkdir(parents=True, exist_ok=True)
        path = status / f"rank-{rank}.signs"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        # all of it now: later writes then need no room on the disk
        os.pwrite(self._file, b"\0" * _BYTES, 0)
        self._thread = thread
        self._first_step = 0
        self._has_spoken = False
        self._last: tuple[int, Phase] = (0, "start")
        self._introduce()
        self.beat(0, "start")

    def beat(self, step: int, phase: Phase) -> None:
        """Send a heartbeat; it takes about a microsecond."""
        if phase == "step" and not self._first_step:
            self._first_step = step
            self._introduce()
        self._last = (step, phase)
        os.pwrite(self._file, _BEAT.pack(time.monotonic(), step, PHASES.index(phase)), 0)

    def go_on(self) -> None:
        """Repeat the last heartbeat, in a phase that consists of many pieces of work.

        In any other phase it does nothing: a thread in the background must not hide that
        the main thread hangs."""
        step, phase = self._last
        if phase in PIECEWISE:
            self.beat(step, phase)

    def say(self, words: dict[str, Any]) -> None:
        """Leave last words; only the first ones count."""
        if not self._has_spoken:
            self._has_spoken = True
            content = json.dumps(words).encode()
            # the length is written last: a reader sees the words once they are complete
            os.pwrite(self._file, content, _WORDS_AT + _LENGTH.size)
            os.pwrite(self._file, _LENGTH.pack(len(content)), _WORDS_AT)

    def _introduce(self) -> None:
        os.pwrite(self._file, _WHO.pack(os.getpid(), self._thread, self._first_step), _WHO_AT)


def clear(status: Path) -> None:
    """Remove the files of the ranks of an earlier attempt."""
    for path in (*status.glob("rank-*.signs"), *status.glob("rank-*.stacks")):
        path.unlink(missing_ok=True)


def read(status: Path) -> list[Heartbeat]:
    """The heartbeats of all ranks of this machine that have started, by rank."""
    found_heartbeats = []
    for path in status.glob("rank-*.signs"):
        content = b""
        with contextlib.suppress(OSError):
            content = path.read_bytes()
        if len(content) < _BYTES:
            continue
        beat_time, step, phase = _BEAT.unpack_from(content)
        if not beat_time:  # the rank is about to write its first one
            continue
        pid, thread, first_step = _WHO.unpack_from(content, _WHO_AT)
        size = _LENGTH.unpack_from(content, _WORDS_AT)[0]
        start = _WORDS_AT + _LENGTH.size
        words = json.loads(content[start : start + size]) if size else None
        found_heartbeats.append(
            Heartbeat(
                rank=int(path.stem.removeprefix("rank-")),
                pid=pid,
                thread=thread,
                time=beat_time,
                step=step,
                phase=PHASES[phase],
                first_step=first_step,
                words=words,
            )
        )
    return sorted(found_heartbeats, key=lambda heartbeat: heartbeat.rank)


def stacks_path(status: Path, rank: int) -> Path:
    """Where a rank writes its stacks when it is asked to with SIGUSR1."""
    return status / f"rank-{rank}.stacks"


# raised: the rank raised an error of its own.  killed: by a signal.  hung: no heartbeat,
# and it does not wait for others.  node: a whole node is gone.  ended: it exited without
# last words.  waits: no heartbeat, but it waits for others.  followed: it failed because
# another rank did.
Kind = Literal["raised", "killed", "hung", "node", "ended", "waits", "followed"]

_ORDER: Mapping[Kind, int] = {
    "raised": 0,
    "killed": 0,
    "hung": 0,
    "node": 0,
    "ended": 1,
    "waits": 1,
    "followed": 2,
}
_FRAME = re.compile(r'\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
# where the innermost frames of a rank are that waits for others
_COLLECTIVE = "torch/distributed/"
_OPERATOR = "torch/_ops.py"
_BACKWARD = "torch/autograd/graph.py"
_MEMORY = "use less memory: a smaller train.micro_batch_size, activation checkpointing, more shards"


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a worker group ended."""

    kind: Kind
    rank: int
    time: float
    """When it happened, in seconds since 1970: causes come from several machines."""
    what: str
    where: str = ""
    fix: str = ""
    starved_at: int | None = None
    """The step in which the kernel killed the rank for its memory; None if it did not."""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """A cause from its fields, which another node sent; ValueError or TypeError where
        they are not those of a cause."""
        cause = cls(**facts)
        has_numbers = isinstance(cause.rank, int) and isinstance(cause.time, int | float)
        has_texts = all(isinstance(text, str) for text in (cause.what, cause.where, cause.fix))
        if cause.kind not in _ORDER or not has_numbers or not has_texts:
            raise ValueError(f"no cause: {facts!r:.200}")
        return cause


def first_cause(causes: Iterable[Cause]) -> Cause | None:
    """The cause that the others follow from; None where there is none."""
    return min(causes, key=lambda cause: (_ORDER[cause.kind], cause.time), default=None)


def causes_of(
    heartbeats: Sequence[Heartbeat],
    exits: Sequence[Mapping[str, Any]],
    ours: Collection[int],
    oom_kills: int,
) -> list[Cause]:
    """Causes from the last words of ranks, and from how torchrun saw them end (`exits`).

    The ranks `ours` were killed by their supervisor, so their ends explain nothing.
    `oom_kills` is how many processes the kernel killed for their memory."""
    by_rank = {heartbeat.rank: heartbeat for heartbeat in heartbeats}
    explained_ranks = set(ours)
    causes = []
    for heartbeat in heartbeats:
        if heartbeat.words:
            causes.append(_cause_of_words(heartbeat, heartbeat.words))
            explained_ranks.add(heartbeat.rank)
    for facts in exits:
        rank = facts["rank"]
        if rank not in explained_ranks:
            causes.append(_cause_of_exit(facts, by_rank.get(rank), oom_kills))
    return causes


def _cause_of_words(heartbeat: Heartbeat, words: Mapping[str, Any]) -> Cause:
    """The cause that a rank's last words name."""
    rank = heartbeat.rank
    kind: Kind = "followed" if words["peer_lost"] else "raised"
    message = f"rank {rank} failed in {heartbeat.doing}: {words['message']}"
    return Cause(kind, rank, words["time"], message, words["where"], words["fix"])


def _cause_of_exit(facts: Mapping[str, Any], heartbeat: Heartbeat | None, oom_kills: int) -> Cause:
    """The cause where a rank ended without last words."""
    rank = facts["rank"]
    code = facts["exit_code"]
    exit_time = float(facts["time"])
    doing = f" in {heartbeat.doing}" if heartbeat else ""
    if code >= 0:
        message = f"rank {rank} ended with exit code {code}{doing}"
        fix = "see the step's log for what it printed last"
        return Cause("ended", rank, exit_time, message, "", fix)
    message, fix = _killed(f"rank {rank}", -code, doing, oom_kills)
    kind: Kind = "killed"
    # torchrun sends SIGTERM to the ranks beside a failed one; gloo aborts when a peer is
    # gone
    if code in (-signal.SIGTERM, -signal.SIGABRT):
        kind = "followed"
    starved_at = None
    if heartbeat and oom_kills and code == -signal.SIGKILL:
        starved_at = heartbeat.step
    return Cause(kind, rank, exit_time, message, "", fix, starved_at)


def agent_killed(rank: int, number: int, oom_kills: int) -> Cause:
    """The cause where torchrun itself, whose first rank is `rank`, ended by a signal."""
    message, fix = _killed("torchrun", number, "", oom_kills)
    return Cause("killed", rank, time.time(), message, "", fix)


def _killed(who: str, number: int, doing: str, oom_kills: int) -> tuple[str, str]:
    """What to report where a signal ended `who`: what happened, and the fix."""
    if number != signal.SIGKILL:
        names = {known_signal.value: known_signal.name for known_signal in signal.Signals}
        return f"{who} was killed by {names.get(number, number)}{doing}", "see the step's log"
    if oom_kills:
        return f"{who} was killed{doing}: the kernel ran out of memory", _MEMORY
    fix = "a process outside killed it, or its machine lacks memory: see the machine's own log"
    return f"{who} was killed by SIGKILL{doing}", fix


@dataclasses.dataclass(frozen=True)
class Stack:
    """Where the main thread of a rank is."""

    frames: tuple[tuple[str, int, str], ...]
    """The file, line and function of each frame, the innermost first."""

    @classmethod
    def read(cls, text: str, thread: int) -> Self:
        """The stack of one thread, from what faulthandler wrote of all threads."""
        blocks = re.split(r"\n(?=Thread |Current thread )", "\n" + text)
        own_block = next((block for block in blocks if f"0x{thread:016x}" in block), "")
        frames = []
        for line in own_block.splitlines():
            frame = _FRAME.match(line)
            if frame:
                frames.append((frame["file"], int(frame["line"]), frame["function"]))
        return cls(tuple(frames))

    @property
    def waits(self) -> bool:
        """Whether the thread is in a collective, or in a backward pass, which runs them."""
        files = [file for file, _, _ in self.frames[:4]]
        if not files:
            return False
        innermost = files[0]
        if _COLLECTIVE in innermost or _BACKWARD in innermost:
            return True
        # a functional collective is an operator; a frame around it is torch.distributed's
        return _OPERATOR in innermost and any(_COLLECTIVE in file for file in files)

    @property
    def where(self) -> str:
        """The innermost frame and its callers: `loop.py:90 in step < fit`."""
        if not self.frames:
            return ""
        file, line, function = self.frames[0]
        functions = [function, *(caller for _, _, caller in self.frames[1:4])]
        return f"{file}:{line} in {' < '.join(functions)}"


def hung_causes(
    heartbeats: Sequence[Heartbeat], stacks: Mapping[int, Stack], fix: str
) -> list[Cause]:
    """A cause for each of these ranks, which had no heartbeat for too long; where all of
    them wait for others, only for the one that is furthest behind."""
    causes = []
    for heartbeat in heartbeats:
        rank = heartbeat.rank
        stack = stacks.get(rank, Stack(()))
        silent_seconds = heartbeat.age
        message = f"rank {rank} hangs in {heartbeat.doing}: no heartbeat for {silent_seconds:.0f} s"
        if not stack.frames:
            message += ", and it does not answer a signal either"
        kind: Kind = "waits" if stack.waits else "hung"
        causes.append(Cause(kind, rank, time.time() - silent_seconds, message, stack.where, fix))
    if not causes or any(cause.kind == "hung" for cause in causes):
        return causes
    behind = min(heartbeats, key=lambda heartbeat: (heartbeat.step, heartbeat.time))
    return [cause for cause in causes if cause.rank == behind.rank]
