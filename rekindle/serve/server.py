"""The HTTP server of one model: routes, states, limits, figures.

It listens at once (`/health/live`), loads the model in the inference thread, proves it
(smoke.py), and is ready then. SIGTERM: not ready, what was accepted is answered, and the
server ends. Requests before and meanwhile get 503."""

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
from rekindle.serve.answering import Figures, Reread, Shadow
from rekindle.serve.inputs import Inputs
from rekindle.serve.listening import http_server
from rekindle.serve.load import load_served
from rekindle.serve.log import PredictionLog
from rekindle.serve.messages import ABOUT_ROUTES, ASK_SHADOW, ServedModel, ServeJob
from rekindle.serve.smoke import instance_of, proof_contents, smoke
from rekindle.serve.work import (
    Event,
    PendingInstance,
    Prediction,
    RefusedError,
    Waiting,
    WritingOptions,
)

log = logging.getLogger(__name__)

DRAIN_SECONDS = 30.0
MOST_FAILED = 20
"""Requests in a row that a model may fail before it has to prove itself again."""
DOUBT_SECONDS = 1.0
"""Between two proofs of a model that fails them."""
_PATIENCE_SECONDS = 0.1  # for which nothing looks whether the client is still there
# header of the requests by which the server proves itself, with a token that only it has
_PROOF = "x-rekindle-proof"
_ASK_SHADOW = next(iter(ASK_SHADOW)).encode()
Decode = Callable[[list[int]], str]
Started = asyncio.Future[tuple[Inputs, Decode]]
Endpoint = Callable[[Request], Awaitable[Response]]


class Server:
    """`state`: loading, proving, ready, draining."""

    def __init__(self, job: ServeJob, listening: socket.socket) -> None:
        self.job = job
        self.model = job.model
        self.listening = listening
        host, self.port = listening.getsockname()[:2]
        # where a server that listens everywhere reaches itself
        self.host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - none is bound
        self.about = {name: getattr(self.model, name) for name in ("name", "version", "digest")}
        self.state = "loading"
        self.accepted = 0
        self.token = secrets.token_hex(16)
        self.waiting = Waiting()
        self.broken = False
        self.failures = 0
        self.failing = False
        self.doubting: asyncio.Task[None] | None = None
        self.figures = Figures(self.waiting)
        self.smoke = self._smoke_rows() if job.smoke else None
        self.shadow = Shadow() if job.model.shadow else None
        self.log: PredictionLog | None = None  # once the model is loaded
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
            "/v1/completions": functools.partial(openai.answer_request, self, openai.Completion),
            "/v1/chat/completions": functools.partial(openai.answer_request, self, openai.Chat),
        }
        for path in models:
            posts[f"{path}/infer"] = self._form(wire.infer)
        gets: dict[str, Endpoint] = {}
        for path in ("/health/live", "/v2/health/live", "/metrics"):
            gets[path] = self._plain
        gets["/health/ready"] = self._ready
        gets["/ping"] = self._ready  # SageMaker's
        gets["/v2/health/ready"] = self._ready
        gets[self.job.health_route] = self._ready
        for path in models:
            gets[f"{path}/ready"] = self._ready
        for path in ABOUT_ROUTES:
            gets[path] = self._counted(path, self._about)
        for path, endpoint in posts.items():
            yield Route(path, self._counted(path, endpoint), methods=["POST"])
        for path, endpoint in gets.items():
            yield Route(path, endpoint, methods=["GET"])

    async def run(self) -> None:
        """Serve until a signal. Raises RekindleError where
        the model cannot be loaded or proven, or breaks."""
        self.loop = loop = asyncio.get_running_loop()
        # not uvicorn's own handlers: what was accepted is answered first
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
            if self.model.log:
                proofs = proof_contents(self.model, self.inputs)
                modality = self.inputs.modality
                self.log = PredictionLog(self.model.log, self.model, modality, proofs)
            if self.smoke:
                if self.state == "loading":  # a signal may have come meanwhile
                    self.state = "proving"
                await self._prove(self.smoke)
            if self.state != "draining":
                self.state = "ready"
                self._announce()
        finally:
            if self.state != "ready":
                self.uvicorn.should_exit = True

    def _smoke_rows(self) -> Smoke:
        evidence = self.model.evidence
        rows = Evidence.read(evidence).smoke if evidence else None
        if rows is None:
            message = f"version {self.model.version} was registered without rows to prove it by"
            fix = "pass --no-smoke to serve it unproven; a version that is trained now keeps rows"
            raise RequestError(message, where=self.model.name, fix=fix)
        return rows

    async def _prove(self, rows: Smoke) -> None:
        """Have the model answer the rows over HTTP, as clients ask. Raises StepError
        where it answers otherwise than it was judged by, OSError or HTTPException where
        it does not."""
        headers = {_PROOF: self.token}
        # in a thread, as the answer comes from this event loop
        await asyncio.to_thread(smoke, self.host, self.port, headers, rows, self.inputs)

    def _announce(self) -> None:
        """Say on stdout where the server is, and how to ask it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        address = f"http://{host}:{self.port}"
        served = f"{self.model.name} version {self.model.version} at {address}"
        if self.smoke is None:
            lines = f"{served}, proven by nothing, as you asked\n"
        else:
            rows = self.smoke.rows
            lines = f"{served}, proven by {len(rows)} rows of its test split\n"
            body = json.dumps({"instances": [instance_of(rows[0], self.inputs)]})
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
            model, inputs, decode = load_served(served)
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            self.loop.call_soon_threadsafe(done.set_exception, error)
            return
        self.loop.call_soon_threadsafe(done.set_result, (inputs, decode))
        unanswered = set[PendingInstance]()
        try:
            while True:
                new = waiting.take(model.room, wait=not model.busy)
                if new and waiting is self.waiting:
                    self.figures.batch.observe(len(new))
                unanswered.update(new)
                events = model.turn_with_retry(new)
                for work, event in events:
                    if not isinstance(event, int):
                        unanswered.discard(work)
                unanswered.difference_update([work for work in unanswered if work.gone])
                # futures and queues belong to the event loop
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
            # by the signal, so that what was accepted is answered first
            os.kill(os.getpid(), signal.SIGTERM)

    def judge(self, answers: Sequence[Prediction | RefusedError]) -> None:
        """Note whether the model answered a request, or failed it."""
        # 4xx is the client's fault, and says nothing of the model
        refused = [answer for answer in answers if isinstance(answer, RefusedError)]
        if not refused:
            self.failures = 0
        elif any(error.status >= 500 for error in refused):
            self.failures += 1
        if self.failures >= MOST_FAILED and self.doubting is None:
            self.doubting = asyncio.get_running_loop().create_task(self._doubt())

    async def _doubt(self) -> None:
        """Be not ready while the model fails the rows that prove it. Requests alone do
        not decide: a client may have sent what no model answers. A server without such
        rows is ready again with the first request that it answers."""
        try:
            while self.state == "ready" and not await self._is_proven():
                if not self.failing:
                    message = "the model failed %d requests in a row: not ready until it answers"
                    log.error(message, self.failures)
                self.failing = True
                await asyncio.sleep(DOUBT_SECONDS)
        finally:
            self.failures = 0
            self.failing = False
            self.doubting = None

    async def _is_proven(self) -> bool:
        if self.smoke is None:
            return self.failures < MOST_FAILED
        try:
            await self._prove(self.smoke)
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
        """The endpoint, counted; it refuses all requests before the server is ready."""

        async def counted(request: Request) -> Response:
            began = time.perf_counter()
            # what SIGTERM waits for
            self.accepted += 1
            try:
                if self.state != "ready" and request.headers.get(_PROOF) != self.token:
                    raise RefusedError(503, f"the server is {self.state}", "not_ready")
                if not request.path_params.items() <= self.about.items():
                    message = (
                        f"this is {self.model.name}, version {self.model.version}, and no other"
                    )
                    raise RefusedError(404, message, "unknown_model")
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=499)
            except RefusedError as error:
                self.figures.refused.labels(error.reason).inc()
                body = openai.error_of(error) if route.startswith("/v1") else {"error": str(error)}
                # full or not ready: the same request may be answered a moment later
                headers = {"retry-after": "1"} if error.status in (429, 503) else None
                response = JSONResponse(body, error.status, headers)
            except Exception:
                log.exception("the endpoint %s failed", route)
                message = "the server failed; its log says why"
                response = JSONResponse({"error": message}, 500)
            finally:
                self.accepted -= 1
            if self.state == "draining":  # the client's next request needs another connection
                response.headers["connection"] = "close"
            if not isinstance(response, StreamingResponse):  # which is counted at its end
                seconds = time.perf_counter() - began
                self.figures.seconds.labels(route, response.status_code).observe(seconds)
            return response

        return counted

    def _form(self, form: Callable[..., wire.WireRequest]) -> Endpoint:
        """The endpoint of a wire form."""

        async def endpoint(request: Request) -> Response:
            body = await wire.read_body(request)
            if _asks_shadow(body):
                shadowed = dataclasses.asdict(self.shadow.shadowed) if self.shadow else {}
                return JSONResponse({"predictions": [shadowed]})

            def read(inputs: Inputs) -> wire.WireRequest:
                return form(body, request.headers, inputs, self.about)

            def reread(inputs: Inputs) -> tuple[list[Any], WritingOptions]:
                again = read(inputs)
                return again.contents, again.options

            if self.inputs.question.is_slow:
                parsed = await asyncio.to_thread(read, self.inputs)
            else:
                parsed = read(self.inputs)
            predictions = await self.predictions(
                request, parsed.contents, parsed.options, reread, parsed.ids
            )
            # rendered before the headers are read: rendering may fill them
            content = parsed.render(predictions)
            return Response(content, 200, parsed.headers, parsed.media)

        return endpoint

    async def predictions(
        self,
        request: Request,
        contents: list[Any],
        options: WritingOptions,
        reread: Reread,
        ids: Sequence[str] = (),
    ) -> list[Prediction]:
        """What the model makes of the contents, which have these ids, if any. Raises
        ClientDisconnect where the client went away, and RefusedError where one of them
        could not be answered."""
        loop = asyncio.get_running_loop()
        works = [PendingInstance(content, options, loop.create_future()) for content in contents]
        began = time.perf_counter()
        self.waiting.put(works)
        watching: list[asyncio.Task[None]] = []

        def start_watching() -> None:
            watching.append(self.watch(request, works))

        timer = loop.call_later(_PATIENCE_SECONDS, start_watching)
        try:
            answers = [await work.answer for work in works if work.answer]
        finally:
            timer.cancel()
            for task in watching:
                task.cancel()
        if any(work.gone for work in works):
            raise ClientDisconnect
        self.judge(answers)
        predictions = list[Prediction]()
        for number, answer in enumerate(answers):
            if isinstance(answer, RefusedError):
                message = f"instance {number}: {answer}"
                raise RefusedError(answer.status, message, answer.reason)
            predictions.append(answer)
        self.note(request, works, predictions, time.perf_counter() - began, reread, ids)
        return predictions

    def note(
        self,
        request: Request,
        works: list[PendingInstance],
        predictions: list[Prediction],
        seconds: float,
        reread: Reread,
        ids: Sequence[str] = (),
    ) -> None:
        """Give what was answered to the shadow and the log, but for proofs."""
        is_proof = request.headers.get(_PROOF) == self.token
        if self.shadow and not is_proof:
            self.shadow.give(works, predictions, seconds, reread)
        if self.log and not is_proof:
            contents = [work.content for work in works]
            self.log.put(ids, contents, predictions, seconds)
            self.figures.unlogged.set(self.log.dropped)

    def watch(self, request: Request, works: list[PendingInstance]) -> asyncio.Task[None]:
        """A task that drops the works when their client goes away. It costs more than
        most answers take: start it only for what takes long."""

        async def watched() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.drop(works)
            _deliver([(work, RefusedError(499, "its client went away")) for work in works])

        return asyncio.get_running_loop().create_task(watched())

    def drop(self, works: list[PendingInstance]) -> None:
        """Mark works whose client went away, and count them."""
        for work in works:
            work.gone = True
        self.figures.dropped.inc(len(works))

    async def _plain(self, request: Request) -> Response:
        if request.url.path == "/metrics":
            text = prometheus.generate_latest(self.figures.registry)
            return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)
        return JSONResponse({"live": True})

    async def _ready(self, request: Request) -> Response:
        if not request.path_params.items() <= self.about.items():
            return JSONResponse({"ready": False, "state": "unknown_model"}, 404)
        if self.state == "ready" and not self.failing:
            return JSONResponse({"ready": True, "state": "ready"}, 200)
        state = "failing" if self.state == "ready" else self.state
        return JSONResponse({"ready": False, "state": state}, 503)

    async def _about(self, request: Request) -> Response:
        path = request.url.path
        if path == "/openapi.json":
            return JSONResponse(wire.document(self.about, self.inputs))
        if path == "/v2":
            return JSONResponse(
                {
                    "name": "rekindle",
                    "version": rekindle.__version__,
                    "extensions": ["binary_tensor_data"],
                }
            )
        if path.startswith("/v1/"):
            return JSONResponse(openai.model_list(self, path))
        return JSONResponse(
            {
                "name": self.model.name,
                "versions": [self.model.version],
                "platform": "rekindle",
                "inputs": [{"name": self.inputs.column, "datatype": "BYTES", "shape": [-1]}],
                "outputs": wire.outputs(self.inputs),
            }
        )


def _asks_shadow(body: bytes) -> bool:
    # any body may come; the search in the bytes spares most of them the parser
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        return _ASK_SHADOW in body and bool(json.loads(body)["instances"] == [ASK_SHADOW])
    return False


def _deliver(events: list[Event]) -> None:
    """Hand events to the requests that wait for them; runs on the event loop."""
    for work, event in events:
        if isinstance(event, int):
            if work.pieces is not None:
                work.pieces.put_nowait(event)
            continue
        if work.answer is not None and not work.answer.done():
            work.answer.set_result(event)
        if work.pieces is not None:  # the end of the tokens
            work.pieces.put_nowait(None)
