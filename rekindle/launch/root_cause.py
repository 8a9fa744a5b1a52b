"""Who is to blame: from what ranks said, how they ended and where they hang to the first cause.

Decides the order of causes. Errors that only say that a peer is gone come last, as do exits that
follow from others; among the rest the earliest counts. A hung rank is one whose main thread is not
waiting for others; if all wait, the one that is furthest behind."""

from __future__ import annotations

import dataclasses
import re
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from rekindle.launch.heartbeats import Heartbeat

# raised: an error of its own. killed: by a signal. hung: no heartbeat. ended: left without a
# word. node: a whole node is gone. waits: hangs where it waits for others. followed: from another.
Kind = Literal["raised", "killed", "hung", "node", "ended", "waits", "followed"]

_ORDER: Mapping[Kind, int] = {
    "raised": 0, "killed": 0, "hung": 0, "node": 0, "ended": 1, "waits": 1, "followed": 2,
}  # fmt: skip
_FRAME = re.compile(r'\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_COLLECTIVE, _OPERATOR, _BACKWARD = "torch/distributed/", "torch/_ops.py", "torch/autograd/graph.py"
_MEMORY = "use less memory: a smaller train.micro_batch_size, activation checkpointing, more shards"


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a worker group ended: `what` happened to `rank` at `time` (seconds since 1970), `where`,
    and the `fix`. `starved_at` is the step in which the kernel killed it for its memory."""

    kind: Kind
    rank: int
    time: float
    what: str
    where: str = ""
    fix: str = ""
    starved_at: int | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """From its fields, which another node sent: raises ValueError or TypeError."""
        cause = cls(**facts)
        numbers = isinstance(cause.rank, int) and isinstance(cause.time, int | float)
        texts = all(isinstance(text, str) for text in (cause.what, cause.where, cause.fix))
        if cause.kind not in _ORDER or not (numbers and texts):
            raise ValueError(f"no cause: {facts!r:.200}")
        return cause


def first(causes: Iterable[Cause]) -> Cause | None:
    """The one that the others follow from."""
    return min(causes, key=lambda cause: (_ORDER[cause.kind], cause.time), default=None)


def causes_of(
    heartbeats: Sequence[Heartbeat], exits: Sequence[Mapping[str, Any]], ours: Collection[int],
    oom_kills: int,
) -> list[Cause]:  # fmt: skip
    """Causes from the ranks' last words and from how torchrun saw them end (`exits`).

    `ours` are the ranks that we had to kill ourselves, `oom_kills` is how many processes the kernel
    killed for their memory meanwhile."""
    by_rank = {heartbeat.rank: heartbeat for heartbeat in heartbeats}
    spoken = []
    for rank in heartbeats:
        if words := rank.words:
            kind: Kind = "followed" if words["peer_lost"] else "raised"
            what = f"rank {rank.rank} failed in {rank.doing}: {words['message']}"
            cause = Cause(kind, rank.rank, words["time"], what, words["where"], words["fix"])
            spoken.append(cause)
    told = {*ours, *(cause.rank for cause in spoken)}
    silent = [facts for facts in exits if facts["rank"] not in told]
    return spoken + [_from_exit(facts, by_rank.get(facts["rank"]), oom_kills) for facts in silent]


def _from_exit(facts: Mapping[str, Any], heartbeat: Heartbeat | None, oom_kills: int) -> Cause:
    rank, code, when = facts["rank"], facts["exit_code"], float(facts["time"])
    doing = f" in {heartbeat.doing}" if heartbeat else ""
    log = "see the step's log for what it printed last"
    if code >= 0:
        what = f"rank {rank} ended with exit code {code}{doing}"
        return Cause("ended", rank, when, what, "", log)
    followed = code in (-signal.SIGTERM, -signal.SIGABRT)  # torchrun's own, gloo's when a peer goes
    what, fix = _killed(f"rank {rank}", -code, doing, oom_kills)
    starved_at = heartbeat.step if heartbeat and oom_kills and code == -signal.SIGKILL else None
    return Cause("followed" if followed else "killed", rank, when, what, "", fix, starved_at)


def agent_killed(rank: int, number: int, oom_kills: int) -> Cause:
    """The cause where torchrun itself, whose first rank is `rank`, ended by a signal."""
    what, fix = _killed("torchrun", number, "", oom_kills)
    return Cause("killed", rank, time.time(), what, "", fix)


def _killed(who: str, number: int, doing: str, oom_kills: int) -> tuple[str, str]:
    if number != signal.SIGKILL:
        known = {known.value: known.name for known in signal.Signals}
        return f"{who} was killed by {known.get(number, number)}{doing}", "see the step's log"
    if oom_kills:
        return f"{who} was killed{doing}: the kernel ran out of memory", _MEMORY
    fix = "a process outside killed it, or its machine lacks memory: see the machine's own log"
    return f"{who} was killed by SIGKILL{doing}", fix


@dataclasses.dataclass(frozen=True)
class Stack:
    """The main thread of a rank, innermost frame first, as `file:line function`."""

    frames: tuple[tuple[str, int, str], ...]

    @classmethod
    def read(cls, text: str, thread: int) -> Self:
        """From what faulthandler wrote of all threads."""
        blocks = re.split(r"\n(?=Thread |Current thread )", "\n" + text)
        own = next((block for block in blocks if f"0x{thread:016x}" in block), "")
        found = (_FRAME.match(line) for line in own.splitlines())
        return cls(tuple((m["file"], int(m["line"]), m["function"]) for m in found if m))

    @property
    def waits(self) -> bool:
        """Whether it is inside a collective, or in a backward pass, which runs them."""
        files = [file for file, _, _ in self.frames[:4]] or [""]
        collective = any(_COLLECTIVE in file for file in files)
        inside = _COLLECTIVE in files[0] or (_OPERATOR in files[0] and collective)
        return inside or _BACKWARD in files[0]

    @property
    def where(self) -> str:
        """`step in loop.py:90, called from fit`."""
        if not self.frames:
            return ""
        file, line, function = self.frames[0]
        callers = " < ".join(name for _, _, name in self.frames[1:4])
        return f"{file}:{line} in {function}" + (f" < {callers}" if callers else "")


def hung(heartbeats: Sequence[Heartbeat], stacks: Mapping[int, Stack], fix: str) -> list[Cause]:
    """A cause for each rank without a heartbeat; where all wait for others, that is said of
    the one furthest behind."""
    causes = []
    for rank in heartbeats:
        stack = stacks.get(rank.rank, Stack(()))
        what = f"rank {rank.rank} hangs in {rank.doing}: no heartbeat for {rank.age:.0f} s"
        if not stack.frames:
            what += ", and it does not answer a signal either"
        kind: Kind = "waits" if stack.waits else "hung"
        causes.append(Cause(kind, rank.rank, time.time() - rank.age, what, stack.where, fix))
    if any(cause.kind == "hung" for cause in causes):
        return causes
    behind = min(heartbeats, key=lambda heartbeat: (heartbeat.step, heartbeat.time), default=None)
    return [cause for cause in causes if behind is not None and cause.rank == behind.rank]
