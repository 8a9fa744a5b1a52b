"""Frames that only a process with the job's secret can write, over one connection.

Both ends send a nonce of 32 random bytes first. Each direction has a key of its own, the HMAC of
both nonces, the purpose of the connection and the direction under the secret; each frame carries
its length and the HMAC of its number and content under that key. So a frame of another connection,
direction, purpose or place in the order is not authentic. Content is not encrypted.
Authority: RFC 2104; only the standard library, because foreign images run it."""

from __future__ import annotations

import hmac
import os
import struct

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
        self._rest, self._keys, self._counts = bytearray(), (b"", b""), [0, 0]

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
        to_acceptor, to_connector = (
            hmac.digest(self._secret, asked + answered + way + self._purpose, "sha256")
            for way in (b">", b"<")
        )
        both = (to_acceptor, to_connector)
        self._keys = both[::-1] if self._accepts else both

    def _mac(self, way: int, content: bytes) -> bytes:
        number = struct.pack("!Q", self._counts[way])
        self._counts[way] += 1
        return hmac.digest(self._keys[way], number + content, "sha256")
