"""torch's store, for the nodes of one job alone, and frames that only these nodes can write.

The store authenticates no client, and lists, gives and replaces every key: gloo and NCCL look up
there whom to connect to. So it listens on loopback of node rank 0, and each other node has an
entrance on its own loopback, through which its processes reach it in authentic frames:

    rank -> entrance (127.0.0.1) ==> exit (node rank 0) -> store (127.0.0.1)

Both ends are a thread with an event loop in the supervisor of their node.

Both ends of a connection send a nonce of 32 random bytes first. Each direction has a key of its
own, the HMAC of both nonces, the purpose of the connection and the direction under the job's
secret; each frame carries its length and the HMAC of its number and content under that key. So a
frame of another connection, direction, purpose or place in the order is not authentic. Content is
not encrypted. Authority: RFC 2104; only the standard library, because foreign images run it."""

import asyncio
import contextlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

NONCE_BYTES = 32
LONGEST_FRAME = 1 << 20
_LONGEST_FIRST = 1 << 10  # what is read of a peer that has not shown that it knows the secret
_LENGTH = struct.Struct("!I")
_MAC_BYTES = 32


class NotAuthenticError(Exception):
    """The peer does not know the secret, or sent more than it may."""


class Seal:
    """One end of a connection for a `purpose`: `accepts` is True at the end that was connected to.
    `nonce` is to be sent first; `proven` once the peer has sent an authentic frame."""

    def __init__(self, secret: str, purpose: str, accepts: bool) -> None:
        self.nonce, self.proven = os.urandom(NONCE_BYTES), False
        self._secret, self._purpose, self._accepts = secret.encode(), purpose.encode(), accepts
        self._rest, self._keys, self._counts = bytearray(), [b"", b""], [0, 0]

    def sealed(self, content: bytes) -> bytes:
        """A frame, once the peer's nonce is known."""
        assert self._keys[0], "the peer has sent no nonce"
        return _LENGTH.pack(len(content)) + self._mac(0, content) + content

    def opened(self, received: bytes) -> list[bytes]:
        """The content of the frames that `received` completes; raises NotAuthenticError."""
        self._rest += received
        if not self._keys[0]:
            if len(self._rest) < NONCE_BYTES:
                return []
            self._agree(bytes(self._rest[:NONCE_BYTES]))
            del self._rest[:NONCE_BYTES]
        contents = []
        while len(self._rest) >= (head := _LENGTH.size + _MAC_BYTES):
            (length,) = _LENGTH.unpack_from(self._rest)
            if length > (LONGEST_FRAME if self.proven else _LONGEST_FIRST):
                raise NotAuthenticError(f"a frame of {length:,} bytes")
            if len(self._rest) < head + length:
                break
            content = bytes(self._rest[head : head + length])
            if not hmac.compare_digest(self._mac(1, content), self._rest[_LENGTH.size : head]):
                raise NotAuthenticError("a frame without the job's secret")
            self.proven = True
            contents.append(content)
            del self._rest[: head + length]
        return contents

    def _agree(self, theirs: bytes) -> None:
        asked, answered = (theirs, self.nonce) if self._accepts else (self.nonce, theirs)
        ways = (b"<", b">") if self._accepts else (b">", b"<")  # out, in
        texts = (asked + answered + way + self._purpose for way in ways)
        self._keys = [hmac.digest(self._secret, text, "sha256") for text in texts]

    def _mac(self, way: int, content: bytes) -> bytes:
        number = struct.pack("!Q", self._counts[way])
        self._counts[way] += 1
        return hmac.digest(self._keys[way], number + content, "sha256")


PROOF_SECONDS = 10.0  # until a peer has shown that it knows the secret
MOST_UNPROVEN = 64  # such peers at a time; the oldest make room
BACKLOG = 4096
_PIECE = LONGEST_FRAME // 16
_BROKEN = (OSError, EOFError, NotAuthenticError, asyncio.TimeoutError)

Ends: TypeAlias = "tuple[asyncio.StreamReader, asyncio.StreamWriter]"


class Tunnel:
    """One end, at work from its making until `close`; `server` is a socket that listens."""

    def __init__(
        self, server: socket.socket, serve: Callable[["Tunnel", Ends], Awaitable[None]]
    ) -> None:
        self.port: int = server.getsockname()[1]
        self.unproven: dict[asyncio.StreamWriter, None] = {}
        self._tasks: set[asyncio.Task[None] | None] = set()
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
        task = asyncio.current_task()
        self._tasks.add(task)  # nothing else holds one that waits while its end's buffer is full
        try:
            await self._serve(self, (reader, writer))
        except (*_BROKEN, asyncio.CancelledError):  # asyncio would print the latter
            pass
        finally:
            self._tasks.discard(task)
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
    with contextlib.closing(ends[1]):
        yield ends


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
