"""The sockets and the HTTP loop of the server and of the router."""

import contextlib
import errno
import socket
from contextlib import AbstractContextManager

import uvicorn
from starlette.routing import Route, Router

from rekindle.errors import RequestError


class _Uvicorn(uvicorn.Server):
    """Signals are ours."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def http_server(routes: list[Route]) -> uvicorn.Server:
    """One that ends when `should_exit` is set, and not by signals; without the layers of
    Starlette and uvicorn that do nothing here, which take a tenth of the loop's time."""
    config = uvicorn.Config(
        Router(routes, redirect_slashes=False),
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )
    return _Uvicorn(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises RequestError where it cannot."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
        # connections inherit it; without it each
        # response waits 40 ms for the client's ACK
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        message = f"cannot listen at {host}:{port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            fix = "pass another --port, or 0 for any free one"
            raise RequestError(message, where="--port", fix=fix) from None
        raise RequestError(message, where="--host", fix="check --host and --port") from None
