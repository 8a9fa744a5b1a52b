"""`python -m rekindle.serve.router FOLDER`: one address for the versions of a model on a machine.

It follows `wanted.json` in FOLDER: starts a server process for each version, restarts those that
die, drains those that are no longer wanted, and shares requests among them. A request that a
version fails is given to another one, so that clients do not see a bad canary or a roll back.
SIGTERM: what was accepted is answered, the servers end, and the router does. The servers die with
it."""

from __future__ import annotations

import asyncio
import bisect
import collections
import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from ipaddress import ip_address
from pathlib import Path

import httpx
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rekindle.launch.process import die_with_parent
from rekindle.serve.deployed import (
    BOUNDS_MS,
    STATUS,
    STATUS_JSON,
    VERSION,
    WANTED,
    WANTED_JSON,
    Status,
    Traffic,
    VersionStatus,
)
from rekindle.serve.listening import http_server, listen
from rekindle.serve.model import ServedModel, ServeJob
from rekindle.serve.wire import read_body
from rekindle.serve.work import RefusedError

log = logging.getLogger(__name__)

LOOK_SECONDS, PATIENCE_SECONDS, MOST_RESTART_SECONDS = 0.1, 30.0, 30.0
ANSWER_SECONDS = 300.0  # to the next part of an answer; then the version has failed
_TRIES = 2  # of a request at a version that gives no answer: it may have died of another one
_TAIL_BYTES = 2_000
_OURS = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"}


class Backend:
    """The server process of a version."""

    def __init__(self, model: ServedModel, folder: Path) -> None:
        self.model, self.log = model, folder / f"version-{model.version}.txt"
        self.state, self.reason = "starting", ""
        self.restarts, self.start_at, self.inflight = 0, 0.0, 0
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.AsyncClient()
        self.count(0)

    def count(self, number: int) -> None:
        """Count requests from zero."""
        self.number, self.requests, self.errors, self.ends = number, 0, 0, 0
        self.latencies: collections.Counter[int] = collections.Counter()

    def counted(self, status: int, taken_ms: float) -> None:
        """Count a request. One that came while the version ends (503) is another's."""
        self.requests += status != 503
        if status < 500:
            self.latencies[bisect.bisect_left(BOUNDS_MS, taken_ms)] += 1
        elif status != 503:
            self.errors += 1

    @property
    def status(self) -> VersionStatus:
        latencies = tuple(self.latencies[i] for i in range(len(BOUNDS_MS) + 1))
        traffic = Traffic(self.requests, self.errors, latencies, self.ends)
        return VersionStatus(self.state, self.reason, traffic)

    def start(self) -> None:
        """Start the process on a free port."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        job = ServeJob(
            model=self.model, host="127.0.0.1", port=port, health_route="/health/ready",
            predict_route="/predict", smoke=bool(self.model.evidence),
        )  # fmt: skip
        words = [sys.executable, "-P", "-m", "rekindle.serve"]
        words.append(TypeAdapter(ServeJob).dump_json(job).decode())
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
            )
        self.client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_SECONDS,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )  # fmt: skip

    async def look(self) -> None:
        """Notice that the process is ready, or has ended. A version that was ready once is started
        again, after a pause that doubles; another one has failed."""
        if self.process is None:
            if self.state == "starting" and time.monotonic() >= self.start_at:
                try:
                    self.start()
                except OSError as error:  # the other versions go on
                    self.state, self.reason = "failed", f"it cannot be started: {error}"
        elif self.process.poll() is not None:
            self.process, was_ready = None, self.state == "ready" or self.restarts
            self.reason = self._tail()
            self.state = "starting" if was_ready and self.state != "stopping" else "failed"
            self.start_at = time.monotonic() + min(2.0**self.restarts - 1, MOST_RESTART_SECONDS)
            self.restarts, self.ends = self.restarts + 1, self.ends + 1
        elif self.state == "starting":
            with contextlib.suppress(httpx.TransportError):
                if (await self.client.get("/health/ready", timeout=5)).status_code == 200:
                    self.state, self.reason = "ready", ""

    async def stop(self) -> None:
        """Let it answer what it was given, and end it."""
        self.state = "stopping"
        give_up = time.monotonic() + PATIENCE_SECONDS
        while self.inflight and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        if self.process is not None:
            self.process.terminate()
            while self.process.poll() is None:
                await asyncio.sleep(0.02)
        await self.client.aclose()

    def _tail(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return ""


class Router:
    """The HTTP side, and the loop that makes what is wanted so."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wanted = folder, WANTED_JSON.validate_json((folder / WANTED).read_bytes())
        self.backends: dict[str, Backend] = {}
        self.stopping: set[asyncio.Task[None]] = set()
        self.draining, self.accepted, self.answered = False, 0, 0
        routes = [
            Route(STATUS, self._status, methods=["GET"]),
            Route("/{path:path}", self._forward, methods=["GET", "POST"]),
        ]
        self.uvicorn = http_server(routes)

    async def run(self, listening: socket.socket) -> None:
        """Route until a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: loop.create_task(self._drain()))
        following = loop.create_task(self._follow())
        following.add_done_callback(lambda _: setattr(self.uvicorn, "should_exit", True))
        await self.uvicorn.serve([listening])
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following

    async def _follow(self) -> None:
        while True:
            self._read()
            await asyncio.gather(*(backend.look() for backend in self.backends.values()))
            await asyncio.sleep(LOOK_SECONDS)

    def _read(self) -> None:
        try:
            wanted = WANTED_JSON.validate_json((self.folder / WANTED).read_bytes())
        except (OSError, ValueError):  # what was wanted before goes on
            log.exception("%s cannot be read", self.folder / WANTED)
            return
        models = {model.version: model for model in wanted.models}
        for version, backend in [*self.backends.items()]:
            if models.get(version) != backend.model:
                task = asyncio.get_running_loop().create_task(self.backends.pop(version).stop())
                self.stopping.add(task)
                task.add_done_callback(self.stopping.discard)
        for version, model in models.items():
            if version not in self.backends:
                self.backends[version] = Backend(model, self.folder)
            if self.backends[version].number != wanted.number:
                self.backends[version].count(wanted.number)
        self.wanted = wanted

    async def _drain(self) -> None:
        self.draining = True
        give_up = time.monotonic() + PATIENCE_SECONDS
        while self.accepted and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        await asyncio.gather(*(b.stop() for b in self.backends.values()), *self.stopping)
        self.uvicorn.should_exit = True

    async def _status(self, request: Request) -> Response:
        if request.client is None or not ip_address(request.client.host).is_loopback:
            return Response(status_code=404)
        versions = {version: backend.status for version, backend in self.backends.items()}
        status = Status(str(self.folder), os.getpid(), self.wanted.number, self.answered, versions)
        return Response(STATUS_JSON.dump_json(status), media_type="application/json")

    async def _forward(self, request: Request) -> Response:
        if self.draining:
            headers = {"retry-after": "1"}
            return JSONResponse({"error": "the router is stopping"}, 503, headers)
        self.accepted += 1
        try:
            body = await read_body(request)
            answer = await self._answered(request, body)
            self.answered += request.method == "POST"
            return answer
        except RefusedError as error:
            return JSONResponse({"error": str(error)}, error.status)
        except ClientDisconnect:
            return Response(status_code=499)
        finally:
            self.accepted -= 1

    async def _answered(self, request: Request, body: bytes) -> Response:
        """The answer of a version; of another one where that failed. Raises RefusedError 503 where
        none is ready in time."""
        asked, failed = request.headers.get(VERSION, ""), collections.Counter[str]()
        give_up, last = time.monotonic() + PATIENCE_SECONDS, None
        while time.monotonic() < give_up:
            backend = self._chosen(asked, failed)
            if backend is None:
                if last is not None:
                    return last
                await asyncio.sleep(0.02)
                continue
            answer = await self._asked(backend, request, body)
            if answer is not None and answer.status_code < 500:
                return answer
            if answer is None:
                failed[backend.model.version] += 1
                await backend.look()
            elif answer.status_code != 503:  # it is not merely ending
                failed[backend.model.version], last = _TRIES, answer
        if last is not None:
            return last
        what = f"version {asked}" if asked else "no version of the model"
        raise RefusedError(503, f"{what} is ready to answer", "not_ready")

    def _chosen(self, asked: str, failed: Mapping[str, int]) -> Backend | None:
        """A version that is ready, by the shares; one without a share only for requests that
        ask for it, or that another one failed; one that failed only where there is no other."""
        ready = [
            backend for version, backend in self.backends.items()
            if backend.state == "ready" and asked in ("", version) and failed[version] < _TRIES
        ]  # fmt: skip
        ready = [one for one in ready if not failed[one.model.version]] or ready
        shares = [self.wanted.shares.get(backend.model.version, 0) for backend in ready]
        if not any(shares):
            return ready[0] if ready and (asked or failed) else None
        return random.choices(ready, shares)[0]  # noqa: S311 - no secret

    async def _asked(self, backend: Backend, request: Request, body: bytes) -> Response | None:
        """The answer of a version, None where it gives none."""
        headers = [(k, v) for k, v in request.headers.items() if k not in _OURS]
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = backend.client.build_request(request.method, url, headers=headers, content=body)
        number, began = backend.number, time.perf_counter()
        backend.inflight += 1
        answer: Response | None = None
        try:
            response = await backend.client.send(asked, stream=True)
            if response.status_code >= 500:
                answer = Response(await response.aread(), response.status_code)
        except httpx.TransportError:
            response = None
        except BaseException:
            backend.inflight -= 1
            raise
        if response is None or answer is not None:
            backend.inflight -= 1
        if number == backend.number and backend.state == "ready" and request.method == "POST":
            taken = (time.perf_counter() - began) * 1000
            backend.counted(response.status_code if response else 500, taken)
        if response is None:
            return None
        if answer is None:
            answer = StreamingResponse(_pieces(backend, response), response.status_code)
        kept = [(k, v) for k, v in response.headers.raw if k.decode().lower() not in _OURS]
        answer.raw_headers = [*kept, (VERSION.encode(), backend.model.version.encode())]
        return answer


async def _pieces(backend: Backend, response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in response.aiter_raw():
            yield piece
    finally:
        backend.inflight -= 1
        await response.aclose()


def main() -> int:
    """Route what `wanted.json` says; exit code 0 after SIGTERM."""
    folder = Path(sys.argv[1]).resolve()
    wanted = WANTED_JSON.validate_json((folder / WANTED).read_bytes())
    asyncio.run(Router(folder).run(listen(wanted.host, wanted.port)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
