"""`python -m rekindle.serve JOB`: the server process, JOB a ServeJob as JSON. `rekindle
serve` becomes it, so that it holds neither the registry's client nor the command line."""

import sys
from collections.abc import Callable

import uvloop
from pydantic import TypeAdapter

from rekindle.errors import RekindleError
from rekindle.serve.listening import listen
from rekindle.serve.messages import ServeJob


def serve(job: ServeJob) -> None:
    """Serve until a signal. Raises RekindleError."""
    listening = listen(job.host, job.port)
    from rekindle.serve.server import Server  # once the port is known to be free

    # a thread that comes back from torch waits so long at most for the other to let go
    sys.setswitchinterval(0.000_5)
    uvloop.run(Server(job, listening).run())


def main(job: Callable[[], ServeJob]) -> int:
    """Serve; returns the exit code."""
    try:
        serve(job())
    except RekindleError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(lambda: TypeAdapter(ServeJob).validate_json(sys.argv[1])))
