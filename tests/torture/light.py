"""Rounds of a pipeline of quick steps, run by forks of this process: a dozen runs in ten seconds."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.errors import RekindleError
from rekindle.ir.compile import compile_pipeline
from rekindle.ir.graph import Graph
from rekindle.ir.read.pipeline import read
from rekindle.records import RunRecord
from tests.platforms.local.runs import run
from tests.torture import chaos
from tests.torture.chaos import Chaos, files_in
from tests.torture.oracle import Failure, nothing_left, readable

PIPELINE = Path(__file__).with_name("pipeline.py")
MOST_SECONDS = 300.0
DISTURBED = (0, 1, 75, 130, -signal.SIGKILL)  # how a run may end that was disturbed


@dataclasses.dataclass
class Fork:
    """A run in a fork of this process, in a session of its own; prints to `out`."""

    pid: int
    out: Path
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float = MOST_SECONDS) -> int:
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise Failure(f"a run hangs: {[p.cmdline() for p in chaos.processes_of(self.pid)]}")
            time.sleep(0.01)
        return code


@functools.cache
def graph() -> Graph:
    return read(compile_pipeline(f"{PIPELINE}:chain"))


def start(home: Path, seed: int, limit: int = 0) -> Fork:
    """One run of the pipeline in `home`."""
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    out = Path(tempfile.gettempdir()) / f"torture-{run_id}.txt"  # home's disk may be full
    pipeline = graph()
    pid = os.fork()
    if pid:
        return Fork(pid, out)
    code = 70
    try:
        os.setsid()
        os.chdir(home.parent)
        for number in (1, 2):
            os.dup2(os.open(out, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644), number)
        if limit:
            chaos.limit_file_size(limit)
        run(pipeline, home, {"seed": seed}, run_id=run_id, grace_seconds=2.0)
        code = 0
    except RekindleError as error:
        code = error.exit_code
        print(error, flush=True)
    except BaseException:  # noqa: BLE001 - the parent reads it
        traceback.print_exc()
    finally:
        os._exit(code)


def contents(record: RunRecord) -> dict[str, Any]:
    """What a run made, by content."""
    return {
        step.name: (dict(step.parameters), {n: a.digest for n, a in step.artifacts.items()})
        for step in record.steps
    }


class Light:
    """Rounds in a folder, held against one undisturbed run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.damaged = folder, 0
        graph()
        began = time.monotonic()
        self.expected = self._final(self._fresh("whole-light"), 7)
        self.seconds = time.monotonic() - began

    def _fresh(self, name: str) -> Path:
        home = self.folder / name / "home"
        home.parent.mkdir(parents=True)
        return home

    def round(self, seed: int, mishaps: Chaos) -> Path:
        """One round; its folder."""
        name = mishaps.random.choice(["kills", "damage", "together", "full", "limit"])
        mishaps.log.append(f"light {name}")
        self.damaged = 0
        home = self._fresh(f"light-{seed}")
        act: Callable[[Path, Chaos], Path] = getattr(self, f"_{name}")
        home = act(home, mishaps)
        nothing_left(home.parent)
        began = time.monotonic()
        found = self._final(home, 7)
        mishaps.counts.recoveries.append(time.monotonic() - began)
        if found != self.expected:
            raise Failure(f"other results than the undisturbed run: {found} != {self.expected}")
        return home.parent

    def _kills(self, home: Path, mishaps: Chaos) -> Path:
        for _ in range(mishaps.random.randint(1, 3)):
            child = start(home, 7)
            mishaps.counts["runs"] += 1
            mishaps.disturb(child, 1.2 * self.seconds)
            ended(child, DISTURBED)
            if home.exists() and mishaps.random.random() < 0.3:
                home = mishaps.moved(home)
        return home

    def _damage(self, home: Path, mishaps: Chaos) -> Path:
        child = start(home, 7)
        if mishaps.random.random() < 0.5:
            mishaps.disturb(child, 1.2 * self.seconds)
        ended(child, DISTURBED)
        if files := files_in(home, "locks", "lock"):
            self.damaged = sum(path.name == "run.json" for path in mishaps.damage(files))
        return home

    def _together(self, home: Path, mishaps: Chaos) -> Path:
        children = [start(home, mishaps.random.choice([7, 7, 8])) for _ in range(3)]
        mishaps.counts["concurrent runs"] += len(children)
        mishaps.disturb(mishaps.random.choice(children), self.seconds)
        for child in children:
            ended(child, DISTURBED)
        return home

    def _full(self, home: Path, mishaps: Chaos) -> Path:
        disk = home.parent / "disk"
        size = mishaps.random.randint(1, 60) * 4096
        with chaos.small_disk(disk, size) as mounted:
            if not mounted:
                mishaps.counts.notes.add("no right to mount a small disk: skipped")
                return home
            mishaps.did("full disks", f"{size:,} bytes")
            child = start(disk / "home", 7)
            code = ended(child, (0, 1))
            if code == 0 and contents(readable(disk / "home")[-1]) != self.expected:
                raise Failure("other results on a full disk, and no error")
            chaos.grow(disk)
            found = self._final(disk / "home", 7)
            if found != self.expected:
                raise Failure("other results once there was room")
        return home

    def _limit(self, home: Path, mishaps: Chaos) -> Path:
        limit = mishaps.random.randint(8_000, 30_000)
        mishaps.did("limits on file size", f"{limit:,} bytes")
        ended(start(home, 7, limit), (0, 1))
        return home

    def _final(self, home: Path, seed: int) -> dict[str, Any]:
        """What an undisturbed run leaves; every record can be read, and no process is left."""
        ended(start(home, seed), (0,))
        record = readable(home, self.damaged)[-1]
        wrong = [step.name for step in record.steps if step.status != "succeeded"]
        if wrong:
            raise Failure(f"{wrong} did not succeed, and the run did")
        for step in record.steps:
            for artifact in step.artifacts.values():
                if not Path(artifact.uri).is_relative_to(home):
                    raise Failure(f"{artifact.uri} lies outside of {home}")
        return contents(record)


def ended(child: Fork, codes: tuple[int, ...]) -> int:
    """How a run ended; a Failure if not so, or with a traceback."""
    code = child.wait()
    said = child.out.read_text(errors="replace") if child.out.exists() else ""
    child.out.unlink(missing_ok=True)
    if code not in codes or "Traceback (most" in said:
        raise Failure(f"a run ended with {code}, not with one of {codes}:\n{said[-3000:]}")
    return code
