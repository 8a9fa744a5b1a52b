"""Looking at something that changes by itself, until it is as wanted or a limit has
passed.

For what waits for nothing but time. A loop that a signal or an event ends as well
(launcher.py, local/process.py, launch/), and one that runs on an event loop
(serve/router.py), has a wait of its own."""

import time
from collections.abc import Iterator


def polls(limit_seconds: float, pause_seconds: float) -> Iterator[None]:
    """Yields once for each look, at least one, and pauses between two of them.

    It ends with the first look that is over after the limit, so what follows the loop (or
    stands in its `else`) says that it took too long."""
    give_up = time.monotonic() + limit_seconds
    while True:
        yield
        if time.monotonic() > give_up:
            return
        time.sleep(pause_seconds)
