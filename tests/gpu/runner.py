"""Runs checks, each in a process of its own with a limit of seconds, and collects their rows.

A check that crashes, or that breaks the device's context, fails alone; one that is not done in time keeps the rows that it has."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from tests.gpu.here import FAIL, ROOT, Here, Row, TooSmall, facts
from tests.gpu.table import Result

_MARK = "ROW "


@dataclasses.dataclass(frozen=True)
class Check:
    """`module:function` in this folder, and the seconds that it may take on a GPU; together half an hour."""

    title: str
    place: str
    seconds: int

    def rows(self, here: Here) -> Iterator[Row]:
        module, _, function = self.place.partition(":")
        run: Callable[[Here], Iterator[Row]] = getattr(
            importlib.import_module(f"tests.gpu.{module}"), function
        )
        return run(here)


CHECKS = {
    "start": Check("1 start", "start:check_start", 90),
    "optimizer": Check("2 optimizer", "arithmetic:check_optimizer", 45),
    "varlen": Check("3 varlen kernel", "attending:check_varlen", 60),
    "kernels": Check("4 attention kernels", "attending:check_kernels", 90),
    "losses": Check("5 losses", "arithmetic:check_losses", 90),
    "resume": Check("6 kill and resume", "saving:check_resume", 210),
    "saving": Check("7 save and restore", "saving:check_saving", 60),
    "fp16": Check("8 fp16", "arithmetic:check_fp16", 45),
    "compile": Check("9 compile", "arithmetic:check_compile", 180),
    "memory": Check("10 memory", "memory:check_memory", 200),
    "waiting": Check("11 no waiting", "waiting:check_waiting", 90),
    "speed": Check("12 speed", "speed:check_speed", 220),
    "feed": Check("copies to the device", "waiting:check_feed", 40),
    "loss": Check("loss at V = 128k", "memory:check_loss", 40),
    "context": Check("a sequence of 32k tokens", "attending:check_context", 40),
    "deepspeed": Check("DeepSpeed", "stepping:check_deepspeed", 240),
}
TITLES = {name: check.title for name, check in CHECKS.items()}


def here_and_now(name: str, here: Here) -> Iterator[Row]:
    """The rows of a check in this process; an error is a row, too."""
    try:
        yield from CHECKS[name].rows(here)
    except TooSmall as error:
        yield here.skipped("", str(error))
    except Exception as error:  # noqa: BLE001 - whatever it was belongs into the table
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        place = " < ".join(
            f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(frames[-4:])
        )
        first = (str(error).splitlines() or [""])[0][:200]
        yield Row(f"raised at {place}", f"{type(error).__name__}: {first}", FAIL)


def child(names: Sequence[str], here: Here) -> NoReturn:
    """What the process of checks does: a line a row."""
    for name in names:
        for row in here_and_now(name, here):
            print(_MARK + json.dumps({"check": name, **dataclasses.asdict(row)}), flush=True)
    sys.stderr.flush()
    os._exit(0)  # threads of gloo now and then abort the interpreter's own shutdown


def rows_in(text: str) -> dict[str, list[Row]]:
    """The rows of each check in what a child printed."""
    found: dict[str, list[Row]] = {}
    for line in text.splitlines():
        if line.startswith(_MARK):
            given = json.loads(line.removeprefix(_MARK))
            found.setdefault(given.pop("check"), []).append(Row(**given))
    return found


def run(name: str, here: Here, log: Path | None = None) -> Result:
    """A check in a process of its own; everything that it printed goes to `log`."""
    check = CHECKS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = log or Path(folder) / "log"
        path.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with path.open("w") as out:
            process = subprocess.Popen(
                command_of([name], here),
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
                env=_environment(),
            )
            try:
                code: int | None = process.wait(check.seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        seconds = time.perf_counter() - began
        text = path.read_text(errors="replace")
    rows = rows_in(text).get(name, [])
    if code is None:
        rows.append(Row("did not end", f"stopped after {check.seconds} s", FAIL))
    elif code:
        last = (text.strip().splitlines() or [""])[-1][:200]
        rows.append(Row("the process failed", f"exit code {code}: {last}", FAIL))
    return Result(name, round(seconds, 1), tuple(rows), facts(here))


def command_of(names: Sequence[str], here: Here) -> list[str]:
    """Of a process that runs these checks and prints their rows."""
    words = ["-m", "tests.gpu", "--child", ",".join(names), "--device", here.device.type]
    return [sys.executable, *words, *(["--tiny"] if here.tiny else [])]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    threads = str(min(8, os.cpu_count() or 1))  # some checks train on the CPU, to compare
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """And what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
