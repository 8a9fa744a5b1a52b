"""`python -m rekindle.serve JOB`: the server process, JOB a ServeJob as JSON. `rekindle serve`
becomes it, so that it holds neither the registry's client nor the command line."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys

from pydantic import TypeAdapter

from rekindle.errors import RekindleError, RequestError
from rekindle.serve.model import ServeJob


def main() -> int:
    """Serve; returns the exit code."""
    job = TypeAdapter(ServeJob).validate_json(sys.argv[1])
    try:
        listening = _listen(job.host, job.port)
        from rekindle.serve.server import Server  # once the port is known to be free

        asyncio.run(Server(job, listening).run())
    except RekindleError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises RequestError where it cannot."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
        # connections inherit it; without it each response waits 40 ms for the client's ACK
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        what = f"cannot listen at {host}:{port}: {error.strerror or error}"
        fix = "pass another --port, or 0 for any free one" if taken else "check --host and --port"
        raise RequestError(what, where="--port" if taken else "--host", fix=fix) from None


if __name__ == "__main__":
    sys.exit(main())
