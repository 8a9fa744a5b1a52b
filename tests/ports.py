"""Ports for servers that are started a moment later."""

from __future__ import annotations

import random
import socket

# below those that the kernel gives to connections, one of which would take it in between
_PORTS = range(20_000, 30_000)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nothing listens at."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        try:
            with socket.create_server((host, port)):
                return port
        except OSError:
            continue
    raise RuntimeError("a hundred ports are taken")
