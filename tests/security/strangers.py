"""What a stranger who reaches a port of a job may send there. Used by test_nodes.py and test_three_nodes.py."""

import contextlib
import json
import os
import socket
import struct
import time

from rekindle.launch.coordination import Connection, Disconnected
from rekindle.launch.tunnel import NONCE_BYTES, Seal


def frame(content, mac=b"\0" * 32):
    return struct.pack("!I", len(content)) + mac + content


JOIN = json.dumps({"kind": "join", "nodes": 3, "node": 1, "restart": 0}).encode()
HUGE = json.dumps({"kind": "join", "nodes": 3, "node": 1, "restart": 10**6}).encode()
NONCE = b"\7" * NONCE_BYTES
NOISE = {
    "a join, as before there was a secret": JOIN + b"\n",
    "a join without a MAC": NONCE + frame(JOIN),
    "a join with a guessed MAC": NONCE + frame(JOIN, os.urandom(32)),
    "a huge restart": NONCE + frame(HUGE),
    "garbage": os.urandom(4096),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "a frame of 4 GB": NONCE + struct.pack("!I", 2**32 - 1) + b"\0" * 32,
    "a frame of 900 kB before it has shown anything": NONCE + frame(b"x" * 900_000),
    "an empty frame": NONCE + frame(b""),
    "nothing": b"",
}


def send(where, noise):
    """Whether the port hung up; it never answers with more than its nonce."""
    with socket.create_connection(where, timeout=20) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(noise)
            peer.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while content := peer.recv(1 << 16):
                answer += content
        return len(answer) <= NONCE_BYTES


def with_another_secret(where):
    """A whole client of another job: whether it is hung up on."""
    line = Connection(socket.create_connection(where, timeout=20), "6" * 64, accepts=False)
    line.send("join", nodes=3, node=1, restart=0)
    return hung_up_on(line)


def hung_up_on(line):
    """Whether the other end hangs up without a message."""
    try:
        while True:
            if line.receive():
                return False
            time.sleep(0.01)
    except Disconnected:
        return True


class Wire:
    """A port in front of another that keeps what a real node sends there, as a host that reads the network does."""

    def __init__(self, where):
        self.where, self.kept = where, []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]

    def hand_on(self, until):
        """Carry one connection until it is over or `until()`; everything that the node sent."""
        near, _ = self.server.accept()
        far = socket.create_connection(self.where)
        near.setblocking(False)
        far.setblocking(False)
        sent = b""
        while not until():
            for source, target, keeps in ((near, far, True), (far, near, False)):
                with contextlib.suppress(BlockingIOError):
                    if not (content := source.recv(1 << 16)):
                        return sent
                    target.sendall(content)
                    sent += content if keeps else b""
            time.sleep(0.001)
        self.ends = near, far
        return sent


def tampered(seal: Seal, content: bytes) -> bytes:
    """An authentic frame with one bit of its content turned."""
    sealed = bytearray(seal.sealed(content))
    sealed[-1] ^= 1
    return bytes(sealed)
