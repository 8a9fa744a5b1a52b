"""A process that has imported what most steps import, and forks into the steps of a run:
`python -m rekindle.launch.nursery LINK MODULE...`.

Importing KFP's executor and MLflow takes a processor two to three seconds, and most steps of a run
do it; here it happens once. LINK is the descriptor of a socket. A message there brings two more:
for what the step prints, and a connection, on which `{"task": path of TASK.json, "env": {...}}` is
answered with the process id of a shim and, when that has ended, its exit status, a line each. When
the link closes this process ends, and the shims with it.

Whoever finds nobody here starts a process of its own: where the system has no `pidfd`, and where an
import started a thread, because what has several cannot be forked safely. A step whose environment
is not the one of the imports executes a Python of its own, too."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rekindle.launch import shim

EXECUTOR = shim.EXECUTOR[-1]
_THREADLESS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # pyarrow's allocator has one


# From outside


class Nursery:
    """The process; `adopt` may be called from several threads."""

    def __init__(self, env: Mapping[str, str], modules: Sequence[str]) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            return
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = ["-m", "rekindle.launch.nursery", str(theirs.fileno()), EXECUTOR, *modules]
            self.process = subprocess.Popen(
                [sys.executable, *words],
                env={**env, "PYTHONUNBUFFERED": "1", "_KFP_RUNTIME": "true", **_THREADLESS},
                pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def adopt(self, task: Path, env: Mapping[str, str]) -> Adopted | None:
        """A shim at work on `task`, whose parent is `self.process`; None where there is nobody."""
        if self.process is None:
            return None
        connection, theirs = socket.socketpair()
        reading, writing = os.pipe()
        answers = connection.makefile("rb")
        try:
            socket.send_fds(self.link, [b"."], [theirs.fileno(), writing])
            theirs.close()
            connection.sendall(json.dumps({"task": str(task), "env": dict(env)}).encode())
            connection.shutdown(socket.SHUT_WR)
            pid = answers.readline()
        except OSError:
            pid = b""
        finally:
            theirs.close()
            os.close(writing)
        if not pid:
            os.close(reading)
            connection.close()
            return None
        return Adopted(int(pid), os.fdopen(reading, "rb", 0), connection, answers)

    def close(self) -> None:
        """End it, and what it still has at work."""
        if self.process is not None:
            self.link.close()
            self.process.wait()


@dataclasses.dataclass
class Adopted:
    """What `subprocess.Popen` has, of a child of the nursery's."""

    pid: int
    stdout: IO[bytes]
    connection: socket.socket
    answers: IO[bytes]
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises TimeoutExpired."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            said = self.answers.readline()  # nothing, if the nursery died and took it along
            self.returncode = int(said) if said else -signal.SIGKILL
            self.answers.close()
            self.connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens once it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


# From inside


def main() -> None:
    """Import, then fork until nobody is there to ask for it."""
    link, *modules = sys.argv[1:]
    env = {name: value for name, value in os.environ.items() if name not in _THREADLESS}
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if not _can_fork():
        return
    gc.collect()
    gc.freeze()  # a collection would copy the pages that all share
    become = _serve(socket.socket(fileno=int(link)), env)
    if become is not None:
        sys.exit(become())


def _can_fork() -> bool:
    """Whether no thread lives through a fork in this process (numpy's end before one, and start
    again when they are needed), and the kernel tells how a fork ended."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    try:
        os.close(os.pidfd_open(pid))
    except OSError:  # an old kernel, or a container that forbids it
        return False
    finally:
        os.waitpid(pid, 0)
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _serve(link: socket.socket, env: Mapping[str, str]) -> Callable[[], int] | None:
    """What this process is to do from now on: nothing, or if it is a fork a step."""
    working: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not link:
                    selector.unregister(key.fileobj)
                    _tell_end(key.fd, key.data, working.pop(key.fd))
                    continue
                message, descriptors, _, _ = socket.recv_fds(link, 1, 2)
                if not message:
                    return None
                connection, output = socket.socket(fileno=descriptors[0]), descriptors[1]
                try:
                    with connection.makefile("rb") as file:
                        request = json.loads(file.read())
                    pid = os.fork()
                except (OSError, ValueError):  # other steps go on, and whoever asked does without
                    os.close(output)
                    connection.close()
                    continue
                if not pid:
                    _let_go([link, connection, *working.values()], working, output)
                    return functools.partial(_step, request, env)
                os.close(output)
                handle = os.pidfd_open(pid)
                working[handle] = connection
                selector.register(handle, selectors.EVENT_READ, pid)
                with contextlib.suppress(OSError):
                    connection.sendall(b"%d\n" % pid)


def _tell_end(handle: int, pid: int, connection: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(handle)
    with contextlib.suppress(OSError), connection:
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _let_go(sockets: Sequence[socket.socket], handles: Mapping[int, Any], output: int) -> None:
    """Become a process of its own: of what the parent had open, keep the output only."""
    os.setsid()
    for one in sockets:
        one.close()
    for handle in handles:
        os.close(handle)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _step(request: Mapping[str, Any], env: Mapping[str, str]) -> int:
    """Be the shim of a task."""
    _environ(request["env"])
    return shim.main(["shim", request["task"]], _executor(env))


def _executor(imported_in: Mapping[str, str]) -> shim.Fork:
    """KFP's executor as a fork of the shim, for steps that have the environment of the imports."""

    def fork(command: Sequence[str], env: Mapping[str, str], cwd: str) -> Callable[[], int] | None:
        words = list(command)
        if words[:3] != shim.EXECUTOR:
            return None
        names = env.keys() | imported_in.keys()
        if {n for n in names if env.get(n) != imported_in.get(n)} - shim.ADDED:
            return None
        return lambda: _execute(words[3:], env, cwd)

    return fork


def _execute(words: Sequence[str], env: Mapping[str, str], cwd: str) -> int:
    """What `python -m kfp.dsl.executor_main` does, without its imports."""
    _environ(env)
    os.chdir(cwd)
    module = sys.modules[EXECUTOR]
    sys.path[0], sys.argv = cwd, [str(module.__file__), *words]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # forks would all draw the same
    try:
        module.executor_main()
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - as Python does at its outermost
        traceback.print_exc()
        return 1
    return 0


def _environ(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


if __name__ == "__main__":
    main()
