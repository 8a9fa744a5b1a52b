"""One child process a step attempt: start the shim on a task, copy its output to the log,
and stop it when it has to.

The shim runs under this interpreter without site-packages, in a session of its own, so
that a Ctrl-C in the terminal reaches only us. Stopping is SIGTERM, then after a grace
period SIGQUIT, on which the shim kills everything it started.

Each node of a distributed step is a shim of its own, with a Rendezvous in its
environment. When one fails the others are told to end, and the step ends as the first one
that failed. Only node rank 0 has the step's outputs; KFP's executor is told so by
CLUSTER_SPEC, as on Vertex AI."""

import contextlib
import dataclasses
import json
import math
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from rekindle.launch import events, shim
from rekindle.launch.fork_server import Forked, ForkServer
from rekindle.launch.rendezvous import Rendezvous
from rekindle.masking import Masked
from rekindle.protojson import Json

Process = subprocess.Popen[bytes] | Forked

_TICK_SECONDS = 0.1
_LAST_RESORT_SECONDS = 5.0  # for the shim to kill what it started, until we do
# As a module and not as a script, so that its bytecode is cached; our root comes last on
# the path.
_START = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from rekindle.launch.shim import main; sys.exit(main(sys.argv))"
)
_LONGEST_LINE = 1 << 20  # what is kept of a line whose end is still to come
_END_BYTES = 1 << 18  # far more than a traceback
_MARK = events.MARK.encode()


class StepLogFile:
    """Appends what a step prints to a file that may have no room, without secrets; `end`
    is the end of what was written since `begin`: a step that fails for want of room has
    to say so."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._masked = Masked()
        self.end = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._file.close()

    def begin(self) -> None:
        """Forget the end of an earlier attempt."""
        self.flush()
        self.end = b""

    def write(self, chunk: bytes) -> None:
        """Append; never raises for want of room."""
        self._append(self._masked.feed(chunk))

    def flush(self) -> None:
        """Write what was held back as it might be the beginning of a secret."""
        self._append(self._masked.rest())

    def _append(self, chunk: bytes) -> None:
        self.end = (self.end + chunk)[-_END_BYTES:]
        with contextlib.suppress(OSError):
            self._file.write(chunk)


class Control:
    """What threads that watch processes shall do, by `level`: 0 go on, 1 stop in order, 2
    kill. The nodes of a step share one, which stops with that of the `run`, or when
    `failed` names a peer."""

    def __init__(self, run: "Control | None" = None) -> None:
        self.level = 0
        self.run = run
        self.failed: int | None = None

    def stopped(self) -> bool:
        if self.run is not None and self.run.stopped():
            return True
        return self.level > 0 or self.failed is not None

    def killed(self) -> bool:
        return self.level > 1 or (self.run is not None and self.run.killed())

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until a stop."""
        end = time.monotonic() + seconds
        while not self.stopped():
            remaining_seconds = end - time.monotonic()
            if remaining_seconds <= 0:
                return
            time.sleep(min(remaining_seconds, _TICK_SECONDS))


@dataclasses.dataclass(frozen=True)
class Ended:
    """How an attempt ended: `result` is the shim's RESULT.json, or empty; `stopped` says
    that we told it to end before it did, `timed_out` that this was for its time."""

    exit_code: int
    result: Mapping[str, Any]
    stopped: bool
    timed_out: bool


def run_shim(
    task: Json,
    folder: Path,
    log: StepLogFile,
    env: Mapping[str, str],
    control: Control,
    on_event: Callable[[Json], None],
    timeout_seconds: float | None,
    grace_seconds: float,
    fork_server: ForkServer | None,
) -> Ended:
    """Run one task to its end and return how it ended; `log` has each line at once."""
    task_file = folder / "task.json"
    result_file = folder / "result.json"
    result_file.unlink(missing_ok=True)  # of an attempt before
    task = {**task, "result": str(result_file)}
    process: Process | None = None
    if fork_server is not None:
        task_file.write_text(json.dumps({**task, "parent": fork_server.pid}))
        process = fork_server.adopt({"task": str(task_file), "env": dict(env)})
    if process is None:  # there is no fork server, or it has ended
        process = _start(task, task_file, env)
    stopper = _Stopper(process, control, timeout_seconds, grace_seconds)
    try:
        _pump(process, log, on_event, stopper)
        code = process.wait()
    finally:  # leave nothing running, whatever made us stop watching
        if process.poll() is None:
            process.send_signal(signal.SIGQUIT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_RESORT_SECONDS)
        exit_code = process.poll()
        # a shim that was killed could not end what it started
        if exit_code is None or exit_code < 0:
            _kill_session(process)
    result = json.loads(result_file.read_bytes()) if result_file.exists() else {}
    if code < 0:  # by a signal, which is written as shells do
        code = 128 - code
    return Ended(code, result, stopper.asked, stopper.timed_out)


def _start(task: Json, file: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    file.write_text(json.dumps({**task, "parent": os.getpid()}))
    root = str(Path(shim.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START, root, str(file)],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class _Stopper:
    """Decides, tick by tick, whether the process has to go and how hard."""

    def __init__(
        self, process: Process, control: Control, timeout: float | None, grace: float
    ) -> None:
        self.process = process
        self.control = control
        self.grace = grace
        self.deadline = math.inf
        if timeout is not None:
            self.deadline = time.monotonic() + timeout
        self.kill_at = math.inf
        self.give_up_at = math.inf
        self.timed_out = False
        self.asked = False
        self.killed = False

    def tick(self) -> None:
        now = time.monotonic()
        if not self.asked:
            self.timed_out = now >= self.deadline
            if self.timed_out or self.control.stopped():
                self.asked = True
                self.kill_at = now + self.grace
                self.process.send_signal(signal.SIGTERM)
        elif not self.killed and (now >= self.kill_at or self.control.killed()):
            self.killed = True
            self.give_up_at = now + _LAST_RESORT_SECONDS
            self.process.send_signal(signal.SIGQUIT)
        elif now >= self.give_up_at:
            self.give_up_at = math.inf
            _kill_session(self.process)


def _pump(
    process: Process, log: StepLogFile, on_event: Callable[[Json], None], stopper: _Stopper
) -> None:
    """Copy output to the log until it ends, picking out our events."""
    assert process.stdout is not None
    unfinished_line = b""
    with selectors.DefaultSelector() as selector, process.stdout as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if selector.select(_TICK_SECONDS):
                chunk = os.read(pipe.fileno(), 1 << 16)
                if not chunk:
                    break
                log.write(chunk)
                *lines, unfinished_line = (unfinished_line[-_LONGEST_LINE:] + chunk).split(b"\n")
                for line in lines:
                    if _MARK not in line:  # which is quicker than to parse every line
                        continue
                    event = events.parse(line.decode(errors="replace"))
                    if event:
                        on_event(event)
            elif process.poll() is not None:
                break  # something far away holds the pipe open
            stopper.tick()
        log.flush()


def _kill_session(process: Process) -> None:
    """Kill whatever is left of a shim that could not do so itself."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
        process.wait()


def on_nodes(
    count: int, control: Control, run_node: Callable[[int, Control], Ended]
) -> tuple[int, Ended]:
    """Run all nodes side by side; the rank of the node whose end decides, and how it
    ended."""
    shared_control = Control(control)

    def work(node: int) -> Ended:
        has_failed = True
        try:
            ended = run_node(node, shared_control)
            has_failed = ended.exit_code != 0 and not ended.stopped
            return ended
        finally:
            if has_failed and shared_control.failed is None:
                shared_control.failed = node  # the first failure is what counts

    with ThreadPoolExecutor(count) as pool:
        ends = list(pool.map(work, range(count)))
    deciding_node = shared_control.failed or 0
    return deciding_node, ends[deciding_node]


def environments(count: int) -> list[dict[str, str]]:
    """What each node finds in its environment; one rank a node, for they share this
    machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    secret = secrets.token_hex(32)
    environments = []
    for rank in range(count):
        rendezvous = Rendezvous(count, rank, 1, "127.0.0.1", port, secret=secret)
        # the pools of Vertex AI, by which KFP's executor knows who writes outputs
        kind: Json = {"type": "workerpool0"}
        if rank > 0:
            kind = {"type": "workerpool1", "index": rank - 1}
        cluster = json.dumps({"task": kind})
        environments.append({**rendezvous.environment(), "CLUSTER_SPEC": cluster})
    return environments
