"""The HTTP server of one model: routes, states, limits, figures.

It listens at once (`/health/live`), loads the model in the inference thread, proves it (smoke.py),
and is ready then. SIGTERM: not ready, what was accepted is answered, and the server ends. Requests
before and meanwhile get 503."""

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import prometheus_client as prometheus
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import rekindle
from rekindle.errors import RequestError, StepError
from rekindle.records import Evidence, Smoke
from rekindle.serve import openai, wire
from rekindle.serve.inputs import Inputs
from rekindle.serve.listening import http_server
from rekindle.serve.load import loaded
from rekindle.serve.log import PredictionLog
from rekindle.serve.messages import ASK_SHADOW, BOUNDS_MS, ServedModel, ServeJob, Shadowed
from rekindle.serve.smoke import instance_of, smoke
from rekindle.serve.work import Event, Options, Prediction, RefusedError, Waiting, Work

log = logging.getLogger(__name__)

DRAIN_SECONDS = 30.0
MOST_FAILED = 20
"""Requests in a row that a model may fail before it has to prove itself again."""
DOUBT_SECONDS = 1.0
"""Between two proofs of a model that fails them."""
_LATEST = 1_000  # answers whose latency is kept
_PATIENCE = 0.1  # seconds for which nothing looks whether the client is still there
_PROOF = "x-rekindle-proof"
_ABOUT = ("/openapi.json", "/v2", "/v1/models", "/v1/models/{name}")
_DECISION = ("label", "tags", "text")
_ASK_SHADOW = next(iter(ASK_SHADOW)).encode()
Decode = Callable[[list[int]], str]
Started = asyncio.Future[tuple[Inputs, Decode]]
Reread = Callable[[Inputs], tuple[list[Any], Options]]
"""What the body of a request asks of a model with these inputs; raises RefusedError."""
Endpoint = Callable[[Request], Awaitable[Response]]


class Figures:
    """What `/metrics` shows."""

    def __init__(self, waiting: Waiting) -> None:
        self.known = known = prometheus.CollectorRegistry()
        spread = functools.partial(prometheus.Histogram, registry=known)
        count = functools.partial(prometheus.Counter, registry=known)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        bounds = [bound / 1_000 for bound in BOUNDS_MS]
        named = "rekindle_request_seconds", "whole answers", ("route", "status")
        self.seconds = spread(*named, buckets=bounds)
        self.batch = spread("rekindle_batch_instances", "taken at once", buckets=sizes)
        self.refused = count("rekindle_refused", "requests without an answer", ("reason",))
        self.dropped = count("rekindle_dropped", "instances whose client went away")
        gauge = "rekindle_unlogged", "instances that the log of predictions dropped"
        self.unlogged = prometheus.Gauge(*gauge, registry=known)
        queue = prometheus.Gauge("rekindle_waiting_instances", "in the queue", registry=known)
        queue.set_function(lambda: len(waiting))


class Shadow:
    """The version in the shadow: what waits for it, and what is counted of its answers."""

    def __init__(self) -> None:
        self.waiting = Waiting()
        self.inputs: Inputs
        self.replica, self.answered, self.failed = secrets.token_hex(8), 0, 0
        self.differed, self.spared, self.refused = 0, 0, 0
        self.seconds = deque[tuple[float, float]](maxlen=_LATEST)  # of it, and of the one before
        self.giving = set[asyncio.Task[None]]()

    def give(
        self, works: list[Work], found: list[Prediction], seconds: float, reread: Reread
    ) -> None:
        """Have it answer, too, a request that took so long to be answered so; not where it has not
        kept up. It reads the body itself: it may refuse what the version before takes."""
        task = asyncio.get_running_loop().create_task(self._give(works, found, seconds, reread))
        self.giving.add(task)
        task.add_done_callback(self.giving.discard)

    async def _give(
        self, works: list[Work], found: list[Prediction], seconds: float, reread: Reread
    ) -> None:
        try:
            if self.inputs.modality == "image":  # which take a while to decode
                contents, options = await asyncio.to_thread(reread, self.inputs)
            else:
                contents, options = reread(self.inputs)
            if len(contents) != len(works):
                raise RefusedError(400, "there are other instances in the body")
        except RefusedError:
            self.answered += len(works)
            self.refused += len(works)
            return
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        again = [
            Work(content, options, loop.create_future(), seed=work.seed)
            for content, work in zip(contents, works, strict=True)
        ]
        try:
            self.waiting.put(again)
        except RefusedError:
            self.spared += len(again)
            return
        for work, expected in zip(again, found, strict=True):
            assert work.answer is not None
            work.answer.add_done_callback(functools.partial(self._count, expected))
        asyncio.gather(*(work.answer for work in again if work.answer)).add_done_callback(
            lambda _: self.seconds.append((time.perf_counter() - began, seconds))
        )

    def _count(self, expected: Prediction, answer: asyncio.Future[Any]) -> None:
        found = answer.result()
        failed = isinstance(found, RefusedError)
        same = not failed and all(found.get(k) == expected.get(k) for k in _DECISION)
        self.answered, self.failed = self.answered + 1, self.failed + failed
        self.differed += not (failed or same)

    @property
    def shadowed(self) -> Shadowed:
        times = (sorted(1e3 * one for one in taken) for taken in zip(*self.seconds, strict=True))
        ms = [tuple(all_[int(q * (len(all_) - 1))] for q in (0.5, 0.99)) for all_ in times]
        took_ms, before_ms = ms or ((), ())
        return Shadowed(
            self.replica,
            self.answered,
            self.failed,
            self.differed,
            self.spared,
            took_ms,
            before_ms,
            self.refused,
        )


class Server:
    """`state`: loading, proving, ready, draining."""

    def __init__(self, job: ServeJob, listening: socket.socket) -> None:
        self.job, self.model, self.listening = job, job.model, listening
        host, self.port = listening.getsockname()[:2]
        self.host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - none is bound
        self.about = {name: getattr(self.model, name) for name in ("name", "version", "digest")}
        self.state, self.accepted, self.token = "loading", 0, secrets.token_hex(16)
        self.waiting, self.broken = Waiting(), False
        self.failures, self.failing = 0, False
        self.doubting: asyncio.Task[None] | None = None
        self.figures = Figures(self.waiting)
        self.kept = self._kept() if job.smoke else None
        self.shadow = Shadow() if job.model.shadow else None
        self.log = PredictionLog(self.model.log, self.model) if self.model.log else None
        self.inputs: Inputs
        self.decode: Decode
        self.loop: asyncio.AbstractEventLoop
        self.uvicorn = http_server(list(self._routes()))

    def _routes(self) -> Iterable[Route]:
        models = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
        posts: dict[str, Endpoint] = {
            "/predict": self._form(wire.predict),
            self.job.predict_route: self._form(wire.predict),
            "/invocations": self._form(wire.invocations),
            **{f"{path}/infer": self._form(wire.infer) for path in models},
            "/v1/completions": functools.partial(openai.answered, self, openai.Completion),
            "/v1/chat/completions": functools.partial(openai.answered, self, openai.Chat),
        }
        of_model = [f"{path}/ready" for path in models]
        ready = ("/health/ready", "/ping", "/v2/health/ready", self.job.health_route, *of_model)
        gets: dict[str, Endpoint] = {
            **dict.fromkeys(("/health/live", "/v2/health/live", "/metrics"), self._plain),
            **dict.fromkeys(ready, self._ready),
            **{path: self._counted(path, self._about) for path in (*models, *_ABOUT)},
        }
        for path, one in posts.items():
            yield Route(path, self._counted(path, one), methods=["POST"])
        for path, one in gets.items():
            yield Route(path, one, methods=["GET"])

    async def run(self) -> None:
        """Serve until a signal. Raises RekindleError where the model cannot be loaded or proven, or
        breaks."""
        self.loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: loop.create_task(self._drain()))
        starting = loop.create_task(self._start())
        await self.uvicorn.serve([self.listening])
        if starting.done():
            starting.result()
        if self.broken:
            raise StepError("the model's engine failed", fix="the log above says why")

    async def _start(self) -> None:
        started = [self._started(self.model, self.waiting)]
        if self.shadow and self.model.shadow:
            started.append(self._started(self.model.shadow, self.shadow.waiting))
        try:
            (self.inputs, self.decode), *others = await asyncio.gather(*started)
            if self.shadow:
                self.shadow.inputs = others[0][0]
            if self.kept:
                self.state = "proving" if self.state == "loading" else self.state
                asked = self.host, self.port, {_PROOF: self.token}, self.kept, self.inputs
                await asyncio.to_thread(smoke, *asked)
            if self.state != "draining":
                self.state = "ready"
                self._say()
        finally:
            self.uvicorn.should_exit |= self.state != "ready"

    def _kept(self) -> Smoke:
        evidence = self.model.evidence
        kept = Evidence.read(evidence).smoke if evidence else None
        if kept is None:
            what = f"version {self.model.version} was registered without rows to prove it by"
            fix = "pass --no-smoke to serve it unproven; a version that is trained now keeps rows"
            raise RequestError(what, where=self.model.name, fix=fix)
        return kept

    def _say(self) -> None:
        kept, host = self.kept, f"[{self.host}]" if ":" in self.host else self.host
        address = f"http://{host}:{self.port}"
        proof = f"{len(kept.rows)} rows of its test split" if kept else "nothing, as you asked"
        lines = f"{self.model.name} version {self.model.version} at {address}, proven by {proof}\n"
        if kept:
            body = json.dumps({"instances": [instance_of(kept.rows[0], self.inputs)]})
            quoted = body.replace("'", "'\\''")
            lines += f"curl -s {address}/predict -d '{quoted}'\n"
        sys.stdout.write(lines)
        sys.stdout.flush()

    def _started(self, served: ServedModel, waiting: Waiting) -> Started:
        """Start an inference thread; done when its model is loaded."""
        done: Started = self.loop.create_future()
        threading.Thread(target=self._infer, args=(served, waiting, done), daemon=True).start()
        return done

    def _infer(self, served: ServedModel, waiting: Waiting, done: Started) -> None:
        """An inference thread."""
        try:
            model, inputs, decode = loaded(served)
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            self.loop.call_soon_threadsafe(done.set_exception, error)
            return
        self.loop.call_soon_threadsafe(done.set_result, (inputs, decode))
        unanswered = set[Work]()
        try:
            while True:
                new = waiting.take(model.room, wait=not model.busy)
                if new and waiting is self.waiting:
                    self.figures.batch.observe(len(new))
                unanswered.update(new)
                events = model.turned(new)
                unanswered.difference_update(w for w, event in events if not isinstance(event, int))
                unanswered.difference_update([work for work in unanswered if work.gone])
                self.loop.call_soon_threadsafe(_deliver, events)
                if model.broken:
                    self._break()
        except BaseException as error:
            if self.loop.is_closed():
                return
            log.critical("the inference thread ended", exc_info=error)
            failure = RefusedError(500, "the model failed; the server's log says why", "internal")
            failed: list[Event] = [(work, failure) for work in [*unanswered, *waiting.close()]]
            self.loop.call_soon_threadsafe(_deliver, failed)
            self._break()

    def _break(self) -> None:
        """End the process: what runs it starts it again."""
        if not self.broken:
            self.broken = True
            os.kill(os.getpid(), signal.SIGTERM)

    def judge(self, answers: Sequence[Prediction | RefusedError]) -> None:
        """Note whether the model answered a request, or failed it."""
        refused = [answer for answer in answers if isinstance(answer, RefusedError)]
        if not refused:
            self.failures = 0
        elif any(error.status >= 500 for error in refused):
            self.failures += 1
        if self.failures >= MOST_FAILED and self.doubting is None:
            self.doubting = asyncio.get_running_loop().create_task(self._doubt())

    async def _doubt(self) -> None:
        """Be not ready while the model fails the rows that prove it. Requests alone do not decide:
        a client may have sent what no model answers. A server without such rows is ready again with
        the first request that it answers."""
        try:
            while self.state == "ready" and not await self._proves():
                if not self.failing:
                    what = "the model failed %d requests in a row: not ready until it answers"
                    log.error(what, self.failures)
                self.failing = True
                await asyncio.sleep(DOUBT_SECONDS)
        finally:
            self.failures, self.failing, self.doubting = 0, False, None

    async def _proves(self) -> bool:
        if self.kept is None:
            return self.failures < MOST_FAILED
        try:
            asked = self.host, self.port, {_PROOF: self.token}, self.kept, self.inputs
            await asyncio.to_thread(smoke, *asked)
        except (StepError, OSError, http.client.HTTPException):
            return False
        return True

    async def _drain(self) -> None:
        self.state = "draining"
        give_up = time.monotonic() + DRAIN_SECONDS
        while self.accepted and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        if self.log:
            await asyncio.to_thread(self.log.close)
        self.uvicorn.should_exit = True

    def _counted(self, route: str, endpoint: Endpoint) -> Endpoint:
        """What is refused gets its reason; before the server is ready, and when it ends, all is."""

        async def counted(request: Request) -> Response:
            began = time.perf_counter()
            self.accepted += 1
            try:
                if self.state != "ready" and request.headers.get(_PROOF) != self.token:
                    raise RefusedError(503, f"the server is {self.state}", "not_ready")
                if not request.path_params.items() <= self.about.items():
                    what = f"this is {self.model.name}, version {self.model.version}, and no other"
                    raise RefusedError(404, what, "unknown_model")
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=499)
            except RefusedError as error:
                self.figures.refused.labels(error.reason).inc()
                body = openai.error_of(error) if route.startswith("/v1") else {"error": str(error)}
                again = {"retry-after": "1"} if error.status in (429, 503) else None
                response = JSONResponse(body, error.status, again)
            except Exception:
                log.exception("the endpoint %s failed", route)
                what = "the server failed; its log says why"
                response = JSONResponse({"error": what}, 500)
            finally:
                self.accepted -= 1
            if self.state == "draining":  # the client's next request needs another connection
                response.headers["connection"] = "close"
            if not isinstance(response, StreamingResponse):  # which is counted at its end
                taken = time.perf_counter() - began
                self.figures.seconds.labels(route, response.status_code).observe(taken)
            return response

        return counted

    def _form(self, form: Callable[..., wire.Asked]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            body = await wire.read_body(request)
            if _asks_shadow(body):
                known = dataclasses.asdict(self.shadow.shadowed) if self.shadow else {}
                return JSONResponse({"predictions": [known]})

            def read(inputs: Inputs) -> wire.Asked:
                return form(body, request.headers, inputs, self.about)

            def reread(inputs: Inputs) -> tuple[list[Any], Options]:
                again = read(inputs)
                return again.contents, again.options

            images = self.inputs.modality == "image"  # which take a while to decode
            asked = await asyncio.to_thread(read, self.inputs) if images else read(self.inputs)
            contents, options = asked.contents, asked.options
            found = await self.predictions(request, contents, options, reread, asked.ids)
            return Response(asked.render(found), 200, asked.headers, asked.media)

        return endpoint

    async def predictions(
        self,
        request: Request,
        contents: list[Any],
        options: Options,
        reread: Reread,
        ids: Sequence[str] = (),
    ) -> list[Prediction]:
        """What the model makes of the contents, which have these ids, if any. Raises
        ClientDisconnect where the client went away, and RefusedError where one of them could not
        be answered."""
        loop = asyncio.get_running_loop()
        works = [Work(content, options, loop.create_future()) for content in contents]
        began = time.perf_counter()
        self.waiting.put(works)
        watching: list[asyncio.Task[None]] = []
        timer = loop.call_later(_PATIENCE, lambda: watching.append(self.watch(request, works)))
        try:
            found = [await work.answer for work in works if work.answer]
        finally:
            timer.cancel()
            for task in watching:
                task.cancel()
        if any(work.gone for work in works):
            raise ClientDisconnect
        self.judge(found)
        for i, each in enumerate(found):
            if isinstance(each, RefusedError):
                raise RefusedError(each.status, f"instance {i}: {each}", each.reason)
        self.note(request, works, found, time.perf_counter() - began, reread, ids)
        return found

    def note(
        self,
        request: Request,
        works: list[Work],
        found: list[Prediction],
        seconds: float,
        reread: Reread,
        ids: Sequence[str] = (),
    ) -> None:
        """Give what was answered to the shadow and the log, but for proofs."""
        is_proof = request.headers.get(_PROOF) == self.token
        if self.shadow and not is_proof:
            self.shadow.give(works, found, seconds, reread)
        if self.log and not is_proof:
            self.log.put(ids, [work.content for work in works], found, seconds)
            self.figures.unlogged.set(self.log.dropped)

    def watch(self, request: Request, works: list[Work]) -> asyncio.Task[None]:
        """Drops them when their client goes away: a task costs more than most answers take."""

        async def watched() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.drop(works)
            _deliver([(work, RefusedError(499, "its client went away")) for work in works])

        return asyncio.get_running_loop().create_task(watched())

    def drop(self, works: list[Work]) -> None:
        """Their client went away."""
        for work in works:
            work.gone = True
        self.figures.dropped.inc(len(works))

    async def _plain(self, request: Request) -> Response:
        if request.url.path == "/metrics":
            text = prometheus.generate_latest(self.figures.known)
            return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)
        return JSONResponse({"live": True})

    async def _ready(self, request: Request) -> Response:
        state = "failing" if self.failing and self.state == "ready" else self.state
        ready = state == "ready"
        if not request.path_params.items() <= self.about.items():
            return JSONResponse({"ready": False, "state": "unknown_model"}, 404)
        return JSONResponse({"ready": ready, "state": state}, 200 if ready else 503)

    async def _about(self, request: Request) -> Response:
        if (path := request.url.path) == "/openapi.json":
            return JSONResponse(wire.document(self.about, self.inputs))
        if path == "/v2":
            us = {"name": "rekindle", "version": rekindle.__version__}
            return JSONResponse({**us, "extensions": ["binary_tensor_data"]})
        if path.startswith("/v1/"):
            return JSONResponse(openai.listed(self, path))
        inputs = [{"name": self.inputs.column, "datatype": "BYTES", "shape": [-1]}]
        named = {"name": self.model.name, "versions": [self.model.version], "platform": "rekindle"}
        return JSONResponse({**named, "inputs": inputs, "outputs": wire.outputs(self.inputs)})


def _asks_shadow(body: bytes) -> bool:
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        return _ASK_SHADOW in body and bool(json.loads(body)["instances"] == [ASK_SHADOW])
    return False


def _deliver(events: list[Event]) -> None:
    """On the event loop."""
    for work, event in events:
        if work.answer is not None and not isinstance(event, int) and not work.answer.done():
            work.answer.set_result(event)
        if work.pieces is not None:
            work.pieces.put_nowait(event if isinstance(event, int) else None)
