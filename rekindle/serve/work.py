"""Instances on their way through the one inference thread: asked, waiting, answered.

The thread takes what waits, at most as much as the model has room for, and never waits
for more: under load batches fill by themselves, and a single request is answered at once.
The queue is bounded: a client that finds it full has to try again (429)."""

import asyncio
import dataclasses
import functools
import logging
import random
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

log = logging.getLogger(__name__)

MOST_WAITING = 1_024
MOST_TOKENS = 4_096
# field -> value, as the client reads it: the fields
# differ by objective and by a user's own task
Prediction = dict[str, Any]


class RefusedError(Exception):
    """A request or instance that is not answered; `reason` is its label in /metrics."""

    def __init__(self, status: int, text: str, reason: str = "bad_request") -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class WritingOptions(BaseModel):
    """How a language model writes: at most so many tokens; the most probable ones at
    temperature 0, else drawn by the seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens: int = Field(64, ge=1, le=MOST_TOKENS)
    temperature: float = Field(0.0, ge=0, le=2)
    # 64 bits with a sign are what torch.Generator takes
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)


Answer = Prediction | RefusedError


@dataclasses.dataclass(eq=False)
class PendingInstance:
    """One instance. `answer` is set on the event loop; `pieces` gets tokens as they are
    written, then None, where they are wanted; `gone` drops it; `seed` draws where the
    options name none."""

    content: Any
    options: WritingOptions
    answer: asyncio.Future[Answer] | None = None
    pieces: asyncio.Queue[int | None] | None = None
    gone: bool = False
    seed: int = dataclasses.field(default_factory=functools.partial(random.getrandbits, 63))


Event = tuple[PendingInstance, Answer | int]
"""An answer, a refusal, or the next token."""


class Model:
    """What the inference thread turns to: `room` is how many instances the next turn can
    take, `busy` whether it goes on with earlier ones, `broken` that no turn will answer
    any more."""

    room = 0
    busy = False
    broken = False

    def turn(self, new: list[PendingInstance]) -> list[Event]:
        """Answer the new instances, or begin with them. Never raises."""
        raise NotImplementedError

    def turn_with_retry(self, new: list[PendingInstance]) -> list[Event]:
        """Turn, and try what memory did not suffice for once more, in two halves."""
        events = self.turn(new)
        out_of_memory = set[PendingInstance]()
        for work, event in events:
            if isinstance(event, RefusedError) and event.reason == "out_of_memory":
                out_of_memory.add(work)
        # in the order of `new`; what was under way before cannot be tried again: it is refused
        again = [work for work in new if work in out_of_memory]
        if len(again) > 1:
            retried = set(again)
            events = [(work, event) for work, event in events if work not in retried]
            half = len(again) // 2
            events += self.turn(again[:half])
            events += self.turn(again[half:])
        return events

    def answers(self, contents: Iterable[Any], options: WritingOptions) -> list[Answer]:
        """The prediction, or RefusedError, of each content, in order;
        without a thread."""
        works = [PendingInstance(content, options) for content in contents]
        waiting = deque(works)
        answer_of = dict[PendingInstance, Answer]()
        while waiting or self.busy:
            count = min(self.room, len(waiting))
            new = [waiting.popleft() for _ in range(count)]
            for work, event in self.turn_with_retry(new):
                if not isinstance(event, int):
                    answer_of[work] = event
        return [answer_of[work] for work in works]


class Waiting:
    """The bounded queue."""

    def __init__(self) -> None:
        self._works: deque[PendingInstance] = deque()
        self._change = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._works)

    def put(self, works: list[PendingInstance]) -> None:
        """Add all.
        RefusedError 429 where there is no room for them, 503 once it is closed."""
        with self._change:
            if self._closed:
                raise RefusedError(503, "the server is ending", "not_ready")
            if len(self._works) + len(works) > MOST_WAITING:
                raise RefusedError(429, f"{len(self._works)} instances wait already", "queue_full")
            self._works.extend(works)
            self._change.notify()

    def close(self) -> list[PendingInstance]:
        """Take no more; returns what waits."""
        with self._change:
            self._closed = True
            works = list(self._works)
            self._works.clear()
            return works

    def take(self, most: int, *, wait: bool) -> list[PendingInstance]:
        """Up to so many whose client is still there;
        waits for the first one if `wait`."""
        with self._change:
            while True:
                works: list[PendingInstance] = []
                while self._works and len(works) < most:
                    work = self._works.popleft()
                    if not work.gone:
                        works.append(work)
                if works or not wait:
                    return works
                self._change.wait()


def failure_of(error: Exception) -> RefusedError:
    """What a client learns of an error in the model; the log has the rest."""
    # torch raises its own class on a GPU, and on the
    # CPU a RuntimeError that names the allocator
    if type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error):
        return RefusedError(500, "the model ran out of memory", "out_of_memory")
    log.error("the model failed", exc_info=error)
    return RefusedError(500, "the model failed; the server's log says why", "internal")


def not_finite() -> RefusedError:
    """Why there is no answer where scores are infinite or NaN."""
    return RefusedError(500, "the model's scores are not finite", "not_finite")
