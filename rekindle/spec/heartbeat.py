"""A heartbeat for long work that knows nothing of ranks: hashing, downloading, reading.

Such work calls `beat()` for each piece it has done. A training rank connects it to its
sign file (`connect`), so that its supervisor can tell a long start from a hung one;
elsewhere it does nothing."""

from collections.abc import Callable

_listeners: list[Callable[[], None]] = []


def connect(listener: Callable[[], None]) -> None:
    """Have `beat` call `listener` from now on, for as long as the process lives."""
    _listeners.append(listener)


def beat() -> None:
    """A piece of long work is done. Costs some microseconds; any thread may call it."""
    for listener in _listeners:
        listener()
