"""Where a local run keeps things under its home folder, and the locks that make sharing
it safe.

    runs/<run_id>/run.json             the run record; `lock` beside it is held while it is alive
    runs/<run_id>/uses                 cache keys and artifacts that it uses, noted before it does
    runs/.gc                           a lock: held while old things leave, shared for such a note
    runs/<run_id>/steps/<path>/        log.txt, and the task and result of the shim
    artifacts/<step>/<key>-<attempt>/  a file or folder an output; never written again once complete
    cache/<key>.json                   a cached result: written last, it is what makes it count
    cache/last/<step>.json             of a config: what the newest result of a step was made of

An attempt marks its folder with `<folder>.partial`, locked for as long as it runs; an
unlocked marker is a killed attempt's, and the next attempt of the same step clears both
away. Folders are not renamed when complete: their paths stand in what steps wrote and
returned."""

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from rekindle.errors import RequestError
from rekindle.launch.process import is_at
from rekindle.platforms.polling import polls
from rekindle.spec.identity import digest

_POLL_SECONDS = 0.05
_GLANCE_SECONDS = 1.0  # far longer than a look at a lock takes


@dataclasses.dataclass(frozen=True)
class HomeStore:
    """The folders of one home."""

    home: Path

    def run(self, run_id: str) -> Path:
        if not re.fullmatch(r"[\w][\w.-]*", run_id):
            raise RequestError(f"{run_id!r} is not a run id")
        return self.home / "runs" / run_id

    def step(self, run_id: str, path: str) -> Path:
        return self.run(run_id) / "steps" / path

    def artifacts(self, slug: str) -> Path:
        return self.home / "artifacts" / slug

    def entry(self, key: str) -> Path:
        return self.home / "cache" / f"{key}.json"

    def last(self, slug: str) -> Path:
        return self.home / "cache" / "last" / f"{slug}.json"

    @contextlib.contextmanager
    def hold_run(self, run_id: str) -> Iterator[None]:
        """Hold the run's lock, with our process id in it; RequestError if another process
        does."""
        path = self.run(run_id) / "lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        # who looks whether it goes on holds the lock for an instant
        for _ in polls(_GLANCE_SECONDS, 0.02):
            with locked(path) as is_held:
                if is_held:
                    path.write_text(f"{os.getpid()}\n")
                    yield
                    return
        raise RequestError(f"the run {run_id} is already going on", where=str(path))

    @contextlib.contextmanager
    def removal(self, how: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Wait for the lock of removals, and hold it: no run notes a use meanwhile."""
        path = self.home / "runs" / ".gc"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            fcntl.flock(file, how)
            yield

    def note_use(self, run_id: str, *names: str) -> None:
        """Note cache keys and artifacts that the run is about to use: a removal leaves
        them."""
        path = self.run(run_id) / "uses"
        with self.removal(fcntl.LOCK_SH), path.open("a", encoding="utf-8") as file:
            file.write(" ".join(names) + "\n")

    @contextlib.contextmanager
    def claim(
        self, key: str, waiting: Callable[[], None], stopped: Callable[[], bool]
    ) -> Iterator[bool]:
        """Hold a cache key's lock; False if `stopped` came first. `waiting` is called
        once."""
        path = self.home / "cache" / "locks" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        is_waiting = False
        while not stopped():
            with locked(path) as is_held:
                if is_held:
                    yield True
                    return
            if not is_waiting:
                waiting()
                is_waiting = True
            time.sleep(_POLL_SECONDS)
        yield False

    @contextlib.contextmanager
    def attempt(self, slug: str, key: str) -> Iterator[Path]:
        """A fresh folder for the outputs of one attempt, removed again if the block
        raises."""
        parent = self.artifacts(slug)
        parent.mkdir(parents=True, exist_ok=True)
        clear_killed_attempts(parent)
        folder = parent / f"{key[:12]}-{uuid.uuid4().hex[:8]}"
        marker = folder.with_name(folder.name + ".partial")
        unseen = folder.with_name(f".{folder.name}.starting")
        with locked(unseen):  # or another attempt might lock the marker before we do
            unseen.rename(marker)
            folder.mkdir()
            try:
                yield folder
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            finally:
                marker.unlink(missing_ok=True)


def clear_killed_attempts(parent: Path) -> None:
    """Remove what attempts left in `parent` whose process is gone."""
    for marker in parent.glob("*.partial"):
        with contextlib.suppress(FileNotFoundError), locked(marker, create=False) as is_held:
            if is_held:
                shutil.rmtree(marker.with_suffix(""), ignore_errors=True)
                marker.unlink(missing_ok=True)


def is_alive(home: Path, run_id: str) -> bool:
    """Whether a process still works on this run; a record that says so may be of a killed
    one."""
    path = HomeStore(home).run(run_id) / "lock"
    try:
        with locked(path, create=False, how=fcntl.LOCK_SH) as is_held:
            return not is_held
    except FileNotFoundError:
        return False


def owner(home: Path, run_id: str) -> int | None:
    """Id of the process that works on this run, to send a SIGINT to; None if no process
    does."""
    if not is_alive(home, run_id):
        return None
    text = (HomeStore(home).run(run_id) / "lock").read_text().strip()
    return int(text) if text else None


def make_home(home: Path) -> None:
    """Make the home unless it is there: for this user alone, since logs, records and the
    registry hold what the data hold. Who shares one made it so."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700)


def slug(*names: str) -> str:
    """Names as one path segment; two that are made alike by that get a hash."""
    name = ".".join(names).replace("/", ".")
    short = re.sub(r"[^\w.-]+", "_", name)[:120].lstrip(".")
    return name if name and short == name else f"{short}-{digest(name)[:8]}".lstrip("-")


@contextlib.contextmanager
def locked(path: Path, *, create: bool = True, how: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Hold the lock on `path` inside the block; False where another process holds it.
    FileNotFoundError where there is none and none is to be created."""
    flags = os.O_RDWR | os.O_CREAT if create else os.O_RDWR
    while True:
        handle = os.open(path, flags, 0o644)
        try:
            try:
                fcntl.flock(handle, how | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if is_at(path, handle):  # and was not removed since it was opened
                yield True
                return
        finally:
            os.close(handle)
