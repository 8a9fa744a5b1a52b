"""torch's store, for the nodes of one job alone.

The store authenticates no client, and lists, gives and replaces every key: gloo and NCCL look up
there whom to connect to. So it listens on loopback of node rank 0, and each other node has an
entrance on its own loopback, through which its processes reach it in authentic frames (seal.py):

    rank -> entrance (127.0.0.1) ==> exit (node rank 0) -> store (127.0.0.1)

Both ends are a thread with an event loop in the supervisor of their node."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from rekindle.launch.seal import LONGEST_FRAME, NONCE_BYTES, NotAuthenticError, Seal

PROOF_SECONDS = 10.0  # until a peer has shown that it knows the secret
MOST_UNPROVEN = 64  # such peers at a time; the oldest make room
BACKLOG = 4096
_PIECE = LONGEST_FRAME // 16
_BROKEN = (OSError, EOFError, NotAuthenticError, asyncio.TimeoutError)

Ends: TypeAlias = "tuple[asyncio.StreamReader, asyncio.StreamWriter]"


class Tunnel:
    """One end, at work from its making until `close`; `server` is a socket that listens."""

    def __init__(
        self, server: socket.socket, serve: Callable[[Tunnel, Ends], Awaitable[None]]
    ) -> None:
        self.port: int = server.getsockname()[1]
        self.unproven: dict[asyncio.StreamWriter, None] = {}
        self._serve, self._started = serve, threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(server)), name="tunnel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Cut all connections, and listen no more."""
        self._started.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _main(self, server: socket.socket) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        listening = await asyncio.start_server(self._welcome, sock=server, backlog=BACKLOG)
        await self._over.wait()
        listening.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(self, (reader, writer))
        except (*_BROKEN, asyncio.CancelledError):  # asyncio would print the latter
            pass
        finally:
            self.unproven.pop(writer, None)
            writer.close()


def entrance(secret: str, purpose: str, where: tuple[str, int]) -> Tunnel:
    """The end on this node's loopback of the tunnel whose exit is at `where`."""

    async def serve(_: Tunnel, ends: Ends) -> None:
        async with _connected(*where) as far:
            seal = Seal(secret, purpose, accepts=False)
            far[1].write(seal.nonce)
            seal.opened(await far[0].readexactly(NONCE_BYTES))
            far[1].write(seal.sealed(b""))
            await _relay(seal, ends, far)

    return Tunnel(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG), serve)


def exit_of(secret: str, purpose: str, host: str, store: int) -> Tunnel:
    """The end that other nodes reach at `host` (all interfaces: ""), before the port `store`."""

    async def serve(tunnel: Tunnel, ends: Ends) -> None:
        tunnel.unproven[ends[1]] = None
        if len(tunnel.unproven) > MOST_UNPROVEN:
            oldest = next(iter(tunnel.unproven))
            del tunnel.unproven[oldest]
            oldest.transport.abort()
        seal = Seal(secret, purpose, accepts=True)
        ends[1].write(seal.nonce)
        first = await asyncio.wait_for(_proof(seal, ends[0]), PROOF_SECONDS)
        tunnel.unproven.pop(ends[1], None)
        ends[1].write(seal.sealed(b""))
        async with _connected("127.0.0.1", store) as near:
            near[1].write(first)
            await _relay(seal, near, ends)

    return Tunnel(socket.create_server((host, 0), backlog=BACKLOG), serve)


async def _proof(seal: Seal, reader: asyncio.StreamReader) -> bytes:
    """What came with the first authentic frame."""
    contents: list[bytes] = []
    while not seal.proven:
        contents += seal.opened(await _some(reader))
    return b"".join(contents)


async def _some(reader: asyncio.StreamReader) -> bytes:
    if content := await reader.read(_PIECE):
        return content
    raise EOFError


@contextlib.asynccontextmanager
async def _connected(host: str, port: int) -> AsyncIterator[Ends]:
    ends = await asyncio.open_connection(host, port)
    try:
        yield ends
    finally:
        ends[1].close()


async def _relay(seal: Seal, near: Ends, far: Ends) -> None:
    """Hand on between plain bytes (`near`) and frames (`far`) until either end hangs up."""

    async def seals() -> None:
        while True:
            far[1].write(seal.sealed(await _some(near[0])))
            await far[1].drain()

    async def opens() -> None:
        while True:
            for content in seal.opened(await _some(far[0])):
                near[1].write(content)
            await near[1].drain()

    ways = [asyncio.ensure_future(way) for way in (seals(), opens())]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
