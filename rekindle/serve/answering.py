"""What a wire form needs of a server that answers: `Answering`; and what stands beside the
answers: the figures of `/metrics`, and the version in the shadow."""

import asyncio
import functools
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import prometheus_client as prometheus
from starlette.requests import Request

from rekindle.serve.inputs import Inputs
from rekindle.serve.messages import BOUNDS_MS, ServedModel, Shadowed
from rekindle.serve.work import (
    Answer,
    PendingInstance,
    Prediction,
    RefusedError,
    Waiting,
    WritingOptions,
)

_LATEST = 1_000  # answers whose latency is kept
_DECISION = ("label", "tags", "text")
Reread = Callable[[Inputs], tuple[list[Any], WritingOptions]]
"""What the body of a request asks of a model with these inputs; raises RefusedError."""


class Answering(Protocol):
    """A server as a wire form sees it that streams, and so counts and logs by itself."""

    model: ServedModel
    inputs: Inputs
    waiting: "Waiting"
    figures: "Figures"
    accepted: int
    """Requests under way, which SIGTERM waits for."""

    @property
    def decode(self) -> Callable[[list[int]], str]:
        """The text of tokens."""

    async def predictions(
        self,
        request: Request,
        contents: list[Any],
        options: WritingOptions,
        reread: Reread,
        ids: Sequence[str] = (),
    ) -> list[Prediction]:
        """What the model makes of the contents."""

    def judge(self, answers: Sequence[Prediction | RefusedError]) -> None:
        """Note whether the model answered a request, or failed it."""

    def watch(self, request: Request, works: list[PendingInstance]) -> asyncio.Task[None]:
        """A task that drops the works when their client goes away."""

    def note(
        self,
        request: Request,
        works: list[PendingInstance],
        predictions: list[Prediction],
        seconds: float,
        reread: Reread,
        ids: Sequence[str] = (),
    ) -> None:
        """Give what was answered to the shadow and the log."""

    def drop(self, works: list[PendingInstance]) -> None:
        """Mark works whose client went away, and count them."""


class Figures:
    """What `/metrics` shows."""

    def __init__(self, waiting: Waiting) -> None:
        # a registry of its own: the process-wide one
        # would refuse a second server in a process
        self.registry = prometheus.CollectorRegistry()
        histogram = functools.partial(prometheus.Histogram, registry=self.registry)
        counter = functools.partial(prometheus.Counter, registry=self.registry)
        gauge = functools.partial(prometheus.Gauge, registry=self.registry)
        self.seconds = histogram(
            "rekindle_request_seconds",
            "whole answers",
            ("route", "status"),
            buckets=[bound / 1_000 for bound in BOUNDS_MS],
        )
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        self.batch = histogram("rekindle_batch_instances", "taken at once", buckets=sizes)
        self.refused = counter("rekindle_refused", "requests without an answer", ("reason",))
        self.dropped = counter("rekindle_dropped", "instances whose client went away")
        self.unlogged = gauge("rekindle_unlogged", "instances that the log of predictions dropped")
        queue = gauge("rekindle_waiting_instances", "in the queue")
        queue.set_function(lambda: len(waiting))


class Shadow:
    """The version in the shadow: what waits for it, and the counts of its answers."""

    def __init__(self) -> None:
        self.waiting = Waiting()
        self.inputs: Inputs
        # an endpoint may have several servers: their counts are added up by this name
        self.replica = secrets.token_hex(8)
        self.answered = 0
        self.failed = 0
        self.differed = 0
        self.spared = 0
        self.refused = 0
        self.seconds = deque[tuple[float, float]](maxlen=_LATEST)  # of it, and of the one before
        # asyncio holds tasks by weak references alone
        self.giving = set[asyncio.Task[None]]()

    def give(
        self,
        works: list[PendingInstance],
        predictions: list[Prediction],
        seconds: float,
        reread: Reread,
    ) -> None:
        """Have it answer, too, a request that took so long to be answered so; not where
        it has not kept up. It reads the body itself: it may refuse what the version
        before takes."""
        giving = self._give(works, predictions, seconds, reread)
        task = asyncio.get_running_loop().create_task(giving)
        self.giving.add(task)
        task.add_done_callback(self.giving.discard)

    async def _give(
        self,
        works: list[PendingInstance],
        predictions: list[Prediction],
        seconds: float,
        reread: Reread,
    ) -> None:
        try:
            if self.inputs.question.is_slow:
                contents, options = await asyncio.to_thread(reread, self.inputs)
            else:
                contents, options = reread(self.inputs)
            if len(contents) != len(works):
                raise RefusedError(400, "there are other instances in the body")
        except RefusedError:
            self.answered += len(works)
            self.refused += len(works)
            return
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        again = list[PendingInstance]()
        answers = list[asyncio.Future[Answer]]()
        for content, work in zip(contents, works, strict=True):
            answer: asyncio.Future[Answer] = loop.create_future()
            # the same seed: texts that are drawn differ by the models alone
            again.append(PendingInstance(content, options, answer, seed=work.seed))
            answers.append(answer)
        try:
            self.waiting.put(again)
        except RefusedError:
            self.spared += len(again)
            return
        for answer, expected in zip(answers, predictions, strict=True):
            answer.add_done_callback(functools.partial(self._count, expected))
        asyncio.gather(*answers).add_done_callback(
            lambda _: self.seconds.append((time.perf_counter() - began, seconds))
        )

    def _count(self, expected: Prediction, answered: asyncio.Future[Answer]) -> None:
        answer = answered.result()
        self.answered += 1
        if isinstance(answer, RefusedError):
            self.failed += 1
        elif any(answer.get(name) != expected.get(name) for name in _DECISION):
            self.differed += 1

    @property
    def shadowed(self) -> Shadowed:
        return Shadowed(
            self.replica,
            self.answered,
            self.failed,
            self.differed,
            self.spared,
            _p50_p99_ms([seconds for seconds, _ in self.seconds]),
            _p50_p99_ms([seconds_before for _, seconds_before in self.seconds]),
            self.refused,
        )


def _p50_p99_ms(seconds: list[float]) -> tuple[float, ...]:
    """How long 50 and 99 of 100 answers took at most, in ms; nothing of no answers."""
    if not seconds:
        return ()
    times_ms = sorted(1e3 * one_answer for one_answer in seconds)
    last = len(times_ms) - 1
    return times_ms[int(0.5 * last)], times_ms[int(0.99 * last)]
