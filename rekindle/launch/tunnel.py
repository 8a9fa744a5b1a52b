"""torch's store, for the nodes of one job alone, and frames that only these nodes can
write.

The store authenticates no client, and lists, gives and replaces every key: gloo and NCCL
look up there whom to connect to. So it listens on loopback of node rank 0, and each other
node has an entrance on its own loopback, through which its processes reach it in
authentic frames:

    rank -> entrance (127.0.0.1) ==> exit (node rank 0) -> store (127.0.0.1)

Both ends are a thread with an event loop in the supervisor of their node.

Both ends of a connection send a nonce of 32 random bytes first. Each direction has a key
of its own, the HMAC of both nonces, the purpose of the connection and the direction under
the job's secret; each frame carries its length and the HMAC of its number and content
under that key. So a frame of another connection, direction, purpose or place in the order
is not authentic. Content is not encrypted. Authority: RFC 2104; only the standard
library, because foreign images run it."""

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
_HEAD_BYTES = _LENGTH.size + _MAC_BYTES
# the two ways of a connection
_OUT = 0
_IN = 1


class NotAuthenticError(Exception):
    """The peer does not know the secret, or sent more than it may."""


class Seal:
    """One end of a connection for a `purpose`: `accepts` is True at the end that was
    connected to. `nonce` is to be sent first; `proven` once the peer has sent an
    authentic frame."""

    def __init__(self, secret: str, purpose: str, accepts: bool) -> None:
        self.nonce = os.urandom(NONCE_BYTES)
        self.proven = False
        self._secret = secret.encode()
        self._purpose = purpose.encode()
        self._accepts = accepts
        self._unopened = bytearray()
        # of the way out and of the way in
        self._keys = [b"", b""]
        self._counts = [0, 0]

    def sealed(self, content: bytes) -> bytes:
        """A frame, once the peer's nonce is known."""
        assert self._keys[0], "the peer has sent no nonce"
        return _LENGTH.pack(len(content)) + self._mac(_OUT, content) + content

    def opened(self, received: bytes) -> list[bytes]:
        """The content of the frames that `received` completes; raises
        NotAuthenticError."""
        self._unopened += received
        if not self._keys[_OUT]:
            if len(self._unopened) < NONCE_BYTES:
                return []
            self._agree(bytes(self._unopened[:NONCE_BYTES]))
            del self._unopened[:NONCE_BYTES]
        contents = []
        while len(self._unopened) >= _HEAD_BYTES:
            (length,) = _LENGTH.unpack_from(self._unopened)
            longest = LONGEST_FRAME if self.proven else _LONGEST_FIRST
            if length > longest:
                raise NotAuthenticError(f"a frame of {length:,} bytes")
            end = _HEAD_BYTES + length
            if len(self._unopened) < end:
                break
            mac = self._unopened[_LENGTH.size : _HEAD_BYTES]
            content = bytes(self._unopened[_HEAD_BYTES:end])
            # compare_digest: a comparison that stops early tells by its time how much was
            # right
            if not hmac.compare_digest(self._mac(_IN, content), mac):
                raise NotAuthenticError("a frame without the job's secret")
            self.proven = True
            contents.append(content)
            del self._unopened[:end]
        return contents

    def _agree(self, peer_nonce: bytes) -> None:
        """Make the keys: the nonce of the end that connected comes first at both ends."""
        if self._accepts:
            nonces = peer_nonce + self.nonce
            directions = (b"<", b">")  # out, in
        else:
            nonces = self.nonce + peer_nonce
            directions = (b">", b"<")
        self._keys = []
        for direction in directions:
            text = nonces + direction + self._purpose
            self._keys.append(hmac.digest(self._secret, text, "sha256"))

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
    """One end, at work from its making until `close`; `server` is a socket that
    listens."""

    def __init__(
        self, server: socket.socket, serve: Callable[["Tunnel", Ends], Awaitable[None]]
    ) -> None:
        self.port: int = server.getsockname()[1]
        self.unproven: dict[asyncio.StreamWriter, None] = {}
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._serve = serve
        self._started = threading.Event()
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
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
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
            far_reader, far_writer = far
            seal = Seal(secret, purpose, accepts=False)
            far_writer.write(seal.nonce)
            seal.opened(await far_reader.readexactly(NONCE_BYTES))
            far_writer.write(seal.sealed(b""))  # which proves that this end knows the secret
            await _relay(seal, ends, far)

    return Tunnel(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG), serve)


def exit_of(secret: str, purpose: str, host: str, store: int) -> Tunnel:
    """The end that other nodes reach at `host` (all interfaces: ""), before the port
    `store`."""

    async def serve(tunnel: Tunnel, ends: Ends) -> None:
        reader, writer = ends
        tunnel.unproven[writer] = None
        if len(tunnel.unproven) > MOST_UNPROVEN:
            oldest = next(iter(tunnel.unproven))
            del tunnel.unproven[oldest]
            oldest.transport.abort()
        seal = Seal(secret, purpose, accepts=True)
        writer.write(seal.nonce)
        first_content = await asyncio.wait_for(_proof(seal, reader), PROOF_SECONDS)
        tunnel.unproven.pop(writer, None)
        writer.write(seal.sealed(b""))
        async with _connected("127.0.0.1", store) as near:
            _, near_writer = near
            near_writer.write(first_content)
            await _relay(seal, near, ends)

    return Tunnel(socket.create_server((host, 0), backlog=BACKLOG), serve)


async def _proof(seal: Seal, reader: asyncio.StreamReader) -> bytes:
    """What came with the first authentic frame."""
    contents: list[bytes] = []
    while not seal.proven:
        contents += seal.opened(await _some(reader))
    return b"".join(contents)


async def _some(reader: asyncio.StreamReader) -> bytes:
    content = await reader.read(_PIECE)
    if not content:
        raise EOFError
    return content


@contextlib.asynccontextmanager
async def _connected(host: str, port: int) -> AsyncIterator[Ends]:
    ends = await asyncio.open_connection(host, port)
    with contextlib.closing(ends[1]):
        yield ends


async def _relay(seal: Seal, near: Ends, far: Ends) -> None:
    """Hand on between plain bytes (`near`) and frames (`far`) until either end hangs
    up."""
    near_reader, near_writer = near
    far_reader, far_writer = far

    async def seal_all() -> None:
        while True:
            far_writer.write(seal.sealed(await _some(near_reader)))
            await far_writer.drain()

    async def open_all() -> None:
        while True:
            for content in seal.opened(await _some(far_reader)):
                near_writer.write(content)
            await near_writer.drain()

    ways = [asyncio.ensure_future(seal_all()), asyncio.ensure_future(open_all())]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
