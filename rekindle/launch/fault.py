"""A fault on purpose, for a rehearsal: what happens, at which step, once.

Decides how a rehearsal reaches the ranks: one variable, read here. The fault is real: a
process is killed, or a signal is sent."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Literal, Self, cast, get_args

from rekindle.errors import RequestError

VARIABLE = "REKINDLE_FAULT"
LAUNCHER = "REKINDLE_LAUNCHER"
Kind = Literal["kill", "term", "hang"]


@dataclasses.dataclass(frozen=True)
class RehearsedFault:
    """`kind` happens while step `step`, counted from 1, is computed: rank 1 is killed
    (`kill`) or sleeps for ever (`hang`), or the launcher gets SIGTERM (`term`). `folder`
    outlives restarts and holds the mark that it has happened."""

    kind: Kind
    step: int
    folder: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """`kill@step=5`; raises RequestError."""
        kind, _, step = text.partition("@step=")
        if kind not in get_args(Kind) or not step.isdecimal() or int(step) < 1:
            fix = f"one of {', '.join(get_args(Kind))}, then @step=N with N from 1: kill@step=5"
            raise RequestError(f"{text!r} is not a fault", where="--rehearse-preemption", fix=fix)
        return cls(cast("Kind", kind), int(step))

    def environment(self) -> dict[str, str]:
        """The variable that hands it to the ranks."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def current(cls, rank: int) -> Self | None:
        """The one that this rank is to cause, if any."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        fault = cls(**json.loads(text))
        is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
        victim = 0 if is_alone or fault.kind == "term" else 1
        if rank != victim or fault.mark.exists():
            return None
        return fault

    @property
    def mark(self) -> Path:
        """The file that says that it has happened."""
        return Path(self.folder) / "fault-happened"

    def happen(self) -> None:
        self.mark.touch(exist_ok=False)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "term":
            os.kill(int(os.environ[LAUNCHER]), signal.SIGTERM)
        else:
            while True:
                time.sleep(3600)
