"""What befalls the calls of a played service: tests say what breaks, where, and who is killed."""

from __future__ import annotations

import collections
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


SILENCE = -1
_LONGEST_SECONDS = 20.0  # that silence lasts


@dataclasses.dataclass
class Fault:
    """Answered in place of the next call whose name begins with `call`: HTTP's `status`, 0 for a
    connection that breaks, SILENCE for one that is kept and gets nothing, and the service's `code`;
    `after` lets the call take effect first."""

    call: str
    status: int
    code: str = "InternalFailure"
    after: bool = False
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


class Broken(Exception):
    """The call met a fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def dropped(self) -> bool:
        """Whether there is no answer; waits as long as a fault is silent."""
        if self.fault.status == SILENCE:
            time.sleep(_LONGEST_SECONDS)  # whoever asks has gone by then
        return self.fault.status <= 0


class Troubled:
    """A service that counts its calls and has `faults`; what it refuses stands in `refused`. Whoever
    asks (`whom`) is killed at the n-th call from now, before or after it takes effect (`kill_at`)."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.refused: list[str] = []
        self.calls: collections.Counter[str] = collections.Counter()
        self.lock = threading.RLock()
        self.kill_at: tuple[int, bool] | None = None
        self.whom = 0

    def met(self, name: str, do: Callable[[], T]) -> T:
        """What `do` returns; Broken where the call is to fail."""
        with self.lock:
            self.calls[name] += 1
            fault = next((f for f in self.faults if name.startswith(f.call)), None)
            if fault:
                self.faults.remove(fault)
            if fault and not fault.after:
                raise Broken(fault)
            self._kill(after=False)
            found = do()
            self._kill(after=True)
            if fault:
                raise Broken(fault)
            return found

    def _kill(self, after: bool) -> None:
        if self.kill_at is None or self.kill_at[1] != after:
            return
        count, self.kill_at = self.kill_at[0], None
        if count:
            self.kill_at = count - 1, after
            return
        os.kill(self.whom, signal.SIGKILL)
        raise Broken(Fault("", 0))
