"""`python -m rekindle.serve.router FOLDER`: one address for a model's versions here.

It follows `wanted.json` in FOLDER: starts a server process for each version, restarts
those that die, drains those that are no longer wanted, and shares requests among them. A
request that a version fails is given to another one, so that clients do not see a bad
canary or a roll back; so is one that it refuses (4xx), while a canary is under way. A
version that says that it is not ready any more is started again. SIGTERM: what was
accepted is answered, the servers end, and the router does. The servers die with it."""

import asyncio
import bisect
import collections
import contextlib
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web
from multidict import CIMultiDict
from pydantic import TypeAdapter

from rekindle.launch.process import die_with_parent
from rekindle.serve import messages
from rekindle.serve.listening import listen
from rekindle.serve.messages import BOUNDS_MS, VERSION, ServedModel, ServeJob, Traffic, Wanted
from rekindle.serve.wire import BODY_SECONDS, MOST_BYTES, TOO_LARGE, TOO_SLOW

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
PATIENCE_SECONDS = 30.0
MOST_RESTART_SECONDS = 30.0
READY_SECONDS = 1.0  # between two questions whether a version is still ready
LOOK_TIMEOUT = aiohttp.ClientTimeout(total=2)  # of a server that starts, and may not answer yet
ANSWER_SECONDS = 600.0  # to the next part of an answer, as OpenAI's clients wait; then it failed
_TRIES = 2  # of a request at a process that gives no answer, and processes of a version
Process = tuple[str, int]  # of a version, how many ended before it
_TAIL_BYTES = 2_000
_PINNED = re.compile(r"/v2/models/[^/]+/versions/([^/]+)")
# headers of one connection, which are not passed
# on to the next (RFC 9110, 7.6.1), and the host
_OURS = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"}


class Backend:
    """The server process of a version."""

    def __init__(self, model: ServedModel, folder: Path) -> None:
        self.model = model
        self.log = folder / f"version-{model.version}.txt"
        self.state = "starting"
        self.reason = ""
        self.restarts = 0
        self.start_at = 0.0  # in time.monotonic()
        self.inflight = 0
        self.watching: asyncio.Task[None] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.client: aiohttp.ClientSession | None = None
        self.reset_counts(0)

    def reset_counts(self, number: int) -> None:
        """Count requests from zero, from the change of shares with this number on."""
        self.number = number
        self.requests = 0
        self.errors = 0
        self.ends = 0
        self.refused = 0
        self.latencies: collections.Counter[int] = collections.Counter()

    def count(self, status: int, took_ms: float) -> None:
        """Count a request. One that came while the version ends (503) is another's."""
        if status == 503:
            return
        self.requests += 1
        if status >= 500:
            self.errors += 1
        elif messages.is_refusal(status):
            self.refused += 1
        else:
            self.latencies[bisect.bisect_left(BOUNDS_MS, took_ms)] += 1

    @property
    def status(self) -> messages.VersionStatus:
        latencies = tuple(self.latencies[i] for i in range(len(BOUNDS_MS) + 1))
        traffic = Traffic(self.requests, self.errors, latencies, self.ends, self.refused)
        return messages.VersionStatus(self.state, self.reason, traffic)

    def start(self) -> None:
        """Start the process on a free port."""
        # the kernel names a port that is free; the server takes it a moment later
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        job = ServeJob(self.model, "127.0.0.1", port, smoke=bool(self.model.evidence))
        # -P: a file of the working directory must not stand in for a module
        command = [sys.executable, "-P", "-m", "rekindle.serve"]
        command.append(TypeAdapter(ServeJob).dump_json(job).decode())
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
        self.client = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}",
            auto_decompress=False,
            # an answer may take long, as long as its parts come
            timeout=aiohttp.ClientTimeout(total=None, sock_read=ANSWER_SECONDS),
            # the server closes connections that were idle for 5 s
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
        )
        self.watching = asyncio.get_running_loop().create_task(self._watch(self.process))

    async def look(self) -> None:
        """Notice that the process is ready, or has ended. A version that was ready once
        is started again, after a pause that doubles; another one has failed."""
        if self.process is None:
            if self.state == "starting" and time.monotonic() >= self.start_at:
                try:
                    self.start()
                except OSError as error:  # the other versions go on
                    self.state = "failed"
                    self.reason = f"it cannot be started: {error}"
        elif self.process.poll() is not None:
            # all before the first await: until then requests are given to what is ready
            self.process = None
            was_ready_once = self.state == "ready" or self.restarts > 0
            self.reason = self._tail()
            starts_again = was_ready_once and self.state != "stopping"
            self.state = "starting" if starts_again else "failed"
            # at once the first time, then after 1, 3, 7, ... seconds
            self.start_at = time.monotonic() + min(2**self.restarts - 1, MOST_RESTART_SECONDS)
            self.restarts += 1
            self.ends += 1
            await self._close()
        elif self.state == "starting" and self.client is not None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self.client.get("/health/ready", timeout=LOOK_TIMEOUT) as response:
                    if response.status == 200:
                        self.state = "ready"
                        self.reason = ""

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """End a process that says that it is not ready any more;
        the next look restarts it."""
        while self.process is process:
            await asyncio.sleep(READY_SECONDS)
            if self.state == "ready" and await self._says_not_ready() and self.process is process:
                log.warning("version %s is not ready any more", self.model.version)
                process.terminate()
                return

    async def _says_not_ready(self) -> bool:
        """Whether it answers so; one that is too busy to answer is asked again later."""
        if self.client is None:
            return False
        try:
            async with self.client.get("/health/ready", timeout=LOOK_TIMEOUT) as response:
                return response.status == 503
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def stop(self) -> None:
        """Let it answer what it was given, and end it."""
        self.state = "stopping"
        give_up = time.monotonic() + PATIENCE_SECONDS
        while self.inflight and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        process = self.process  # which a request that fails may set to None meanwhile
        if process is not None:
            process.terminate()
            while process.poll() is None:
                await asyncio.sleep(0.02)
        await self._close()

    async def _close(self) -> None:
        client = self.client
        self.client = None
        if client is not None:
            await client.close()

    def _tail(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return ""


class Router:
    """The HTTP side, and the loop that makes what is wanted so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wanted = Wanted.read(folder)
        self.backends: dict[str, Backend] = {}
        self.stopping: set[asyncio.Task[None]] = set()
        self.draining = False
        self.unread = False  # whether `wanted.json` could not be read
        self.accepted = 0
        self.answered = 0
        self.ended = asyncio.Event()
        self.app = web.Application(client_max_size=4 * MOST_BYTES)
        self.app.router.add_get(messages.STATUS, self._status)
        self.app.router.add_route("*", "/{path:.*}", self._forward)

    async def run(self, listening: socket.socket) -> None:
        """Route until a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: loop.create_task(self._drain()))
        # bodies pass as they came; a handler ends with
        # its client, which ends the server's work
        runner = web.AppRunner(
            self.app, access_log=None, handler_cancellation=True, auto_decompress=False
        )
        await runner.setup()
        await web.SockSite(runner, listening).start()
        following = loop.create_task(self._follow())
        following.add_done_callback(lambda _: self.ended.set())
        await self.ended.wait()
        following.cancel()
        await runner.cleanup()
        with contextlib.suppress(asyncio.CancelledError):
            await following

    async def _follow(self) -> None:
        while True:
            self._read()
            await asyncio.gather(*(backend.look() for backend in self.backends.values()))
            await asyncio.sleep(LOOK_SECONDS)

    def _read(self) -> None:
        try:
            wanted = Wanted.read(self.folder)
        except (OSError, ValueError):  # what was wanted before goes on
            if not self.unread:
                log.exception("%s cannot be read", self.folder / messages.WANTED)
            self.unread = True
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
                # one with requests was ready once, before this router
                if wanted.shares.get(version):
                    self.backends[version].restarts = 1
            if self.backends[version].number != wanted.number:
                self.backends[version].reset_counts(wanted.number)
        self.wanted = wanted
        self.unread = False

    async def _drain(self) -> None:
        self.draining = True
        give_up = time.monotonic() + PATIENCE_SECONDS
        while self.accepted and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        try:
            await asyncio.gather(*(b.stop() for b in self.backends.values()), *self.stopping)
        finally:
            self.ended.set()

    async def _status(self, request: web.Request) -> web.Response:
        if not ip_address(request.remote or "0.0.0.0").is_loopback:  # noqa: S104 - none is bound
            return web.Response(status=404)
        status = messages.Status(
            folder=str(self.folder),
            pid=os.getpid(),
            number=self.wanted.number,
            answered=self.answered,
            versions={version: backend.status for version, backend in self.backends.items()},
        )
        body = messages.STATUS_JSON.dump_json(status)
        return web.Response(body=body, content_type="application/json")

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if self.draining:
            refusal = _unavailable("the router is stopping")
            refusal.force_close()
            return refusal
        self.accepted += 1
        try:
            try:
                body = await asyncio.wait_for(request.read(), BODY_SECONDS)
            except TimeoutError:
                return web.json_response({"error": TOO_SLOW}, status=408)
            answer = await self._answer(request, body)
            if request.method == "POST" and VERSION not in request.headers:
                self.answered += 1
            if self.draining:  # the client's next request needs another connection
                answer.force_close()
            return answer
        except web.HTTPRequestEntityTooLarge:
            return web.json_response({"error": TOO_LARGE}, status=413)
        finally:
            self.accepted -= 1

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """The answer of a version, or of another if it failed;
        503 if none is ready in time."""
        version = self._version_for(request)
        failures = collections.Counter[Process]()
        failed_answer: web.StreamResponse | None = None
        give_up = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < give_up and (not version or version in self.backends):
            backend = self._choose(version, failures)
            if backend is None:
                if failed_answer is not None:
                    return failed_answer
                await asyncio.sleep(0.02)
                continue
            process = (backend.model.version, backend.restarts)
            answer = await self._forward_to(backend, request, body, is_first=not failures)
            if answer is not None and answer.status < 500:
                is_refused = not version and messages.is_refusal(answer.status)
                if is_refused and request.method == "POST":
                    return await self._second_opinion(backend, answer, request, body)
                return answer
            if answer is None:
                failures[process] += 1
                await backend.look()
            elif answer.status == 503:  # it is merely ending
                await asyncio.sleep(0.02)
                continue
            else:
                # its process lives, and would fail the request again
                failures[process] = _TRIES
                failed_answer = answer
            give_up = time.monotonic() + PATIENCE_SECONDS
        if version and version not in self.backends:
            return web.json_response({"error": f"there is no version {version}"}, status=404)
        if failed_answer is not None:
            return failed_answer
        return _unavailable(f"version {version} is not ready" if version else "no version is ready")

    def _version_for(self, request: web.Request) -> str:
        """The version that has to answer, by the path or a header; "" for any."""
        pinned = _PINNED.match(request.path)
        if pinned and pinned[1] in self.backends:
            return pinned[1]
        return request.headers.get(VERSION, "")

    async def _second_opinion(
        self, first: Backend, refusal: web.StreamResponse, request: web.Request, body: bytes
    ) -> web.StreamResponse:
        """The answer of the other version that has a share of requests, if it answers
        what the first one refused: a canary may read other inputs. What both refuse is a
        bad request, to which the version before says what is wrong."""
        sharing = list[Backend]()
        for model in self.wanted.models:
            if self.wanted.shares.get(model.version) and model.version in self.backends:
                sharing.append(self.backends[model.version])
        others = [backend for backend in sharing if backend is not first]
        if len(sharing) != 2 or len(others) != 1 or others[0].state != "ready":
            return refusal
        other = others[0]
        answer = await self._forward_to(other, request, body, is_first=False)
        if answer is None or answer.status >= 500:
            return refusal
        is_version_before = other is sharing[0]
        if messages.is_refusal(answer.status) and not is_version_before:
            return refusal
        return answer

    def _choose(self, version: str, failures: Mapping[Process, int]) -> Backend | None:
        """A version that is ready, by the shares; one without a share only for requests
        that ask for it, or that another one failed; one that failed only where there is
        no other. One that is killed may refuse for a while before its process is seen to
        be gone, so the next process is asked again, but not if the request may have
        killed two."""
        unfailed = list[Backend]()
        retriable = list[Backend]()
        for name, backend in self.backends.items():
            if backend.state != "ready" or version not in ("", name):
                continue
            # how often each process of this version
            # failed the request, by how many ended before
            failures_by_process = dict[int, int]()
            for (failed_name, process), count in failures.items():
                if failed_name == name:
                    failures_by_process[process] = count
            failures_here = failures_by_process.pop(backend.restarts, 0)
            if failures_here >= _TRIES or len(failures_by_process) >= _TRIES:
                continue
            if failures_here or failures_by_process:
                retriable.append(backend)
            else:
                unfailed.append(backend)
        ready = unfailed or retriable
        # drawn for each request, so that both versions get the same mix
        shares = [self.wanted.shares.get(backend.model.version, 0) for backend in ready]
        if any(shares):
            return random.choices(ready, shares)[0]  # noqa: S311 - no secret
        if ready and (version or failures):
            return ready[0]
        return None

    async def _forward_to(
        self, backend: Backend, request: web.Request, body: bytes, *, is_first: bool
    ) -> web.StreamResponse | None:
        """The answer of a version, None where it gives none. Only the first one asked is
        judged by it: what fails anywhere would weigh more on a version with a small
        share."""
        headers = _passed_headers(request.headers)
        number = backend.number
        began = time.perf_counter()
        is_sending = False

        def count(status: int) -> None:
            is_same = number == backend.number and backend.state == "ready"
            if is_first and is_same and request.method == "POST":
                backend.count(status, (time.perf_counter() - began) * 1000)

        backend.inflight += 1
        try:
            assert backend.client is not None  # as it is ready
            async with backend.client.request(
                request.method, request.rel_url, headers=headers, data=body, allow_redirects=False
            ) as response:
                status = response.status
                answer_headers = CIMultiDict(_passed_headers(response.headers))
                answer_headers.add(VERSION, backend.model.version)
                # what is read whole before it is passed
                # on can still be asked of another version
                if response.content_length is not None or status >= 400:
                    content = await response.read()
                    count(status)
                    return web.Response(body=content, status=status, headers=answer_headers)
                answer = web.StreamResponse(status=status, headers=answer_headers)
                is_sending = True
                await answer.prepare(request)
                async for piece in response.content.iter_any():
                    if messages.STREAM_FAILED.search(piece):
                        status = 500
                    await answer.write(piece)
                await answer.write_eof()
                count(status)
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            # while an answer is sent, other errors are those of the client's connection
            if not is_sending or isinstance(error, aiohttp.ClientPayloadError | TimeoutError):
                count(500)
            if is_sending:
                raise  # a part is with the client already
            return None
        finally:
            backend.inflight -= 1


def _passed_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _OURS]


def _unavailable(reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=503, headers={"retry-after": "1"})


def main() -> int:
    """Route what `wanted.json` says; exit code 0 after SIGTERM."""
    router = Router(Path(sys.argv[1]).resolve())
    uvloop.run(router.run(listen(router.wanted.host, router.wanted.port)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
