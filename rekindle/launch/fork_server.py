"""Fork server: forks children from a process that has done its imports.

A message over the link brings three descriptors: for what the fork prints and for its
errors, and a connection. A request in JSON comes there, and `started PID` and `ended
EXIT-STATUS` go back, a line each. When the link closes the fork server ends; its forks
have to see to it that they end with it. Where it cannot fork safely (several threads), or
learn how a fork ended (no `pidfd`), no answer comes, and the caller starts a process of
its own.

multiprocessing's forkserver cannot do this: its forks have the server's environment,
output and session, it forks with threads alive, and only the process that started the
server may ask it, while here the steps of a run ask one that the run started. It would
replace the loop of `serve`; what a fork and its caller do would stay.

`python -m rekindle.launch.fork_server LINK MODULE...` is one that forks into the steps of
a run: importing KFP's executor and MLflow takes a processor two to three seconds, and
most steps do it. A request is `{"task": path of TASK.json, "env": {...}}`, and what is
forked is that task's shim. A step whose environment is not the one of the imports
executes a Python of its own."""

import atexit
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
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias

from rekindle.launch import shim

Request: TypeAlias = dict[str, Any]
_MOST_DESCRIPTORS = 5  # of a request
# Environment of a process that is to import pyarrow and fork: its allocator keeps a
# thread.
THREADLESS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


@dataclasses.dataclass(frozen=True)
class ForkServer:
    """The process at the other end of `link`; `adopt` may be called from several
    threads."""

    link: socket.socket
    pid: int

    def adopt(
        self,
        request: Mapping[str, Any],
        prints_to: tuple[int, int] | None = None,
        others: Sequence[int] = (),
    ) -> "Forked | None":
        """A fork at work on `request`, printing to these descriptors, or into a pipe
        without; None without a server. It has the `others` under the numbers that the
        request's `descriptors` name."""
        stdout: IO[bytes] | None = None
        writing = -1
        outputs = prints_to
        if outputs is None:
            reading, writing = os.pipe()
            stdout = os.fdopen(reading, "rb", 0)
            outputs = (writing, writing)
        connection, theirs = socket.socketpair()
        answers = connection.makefile("rb")
        first_line = b""
        with contextlib.suppress(OSError):
            with theirs:
                socket.send_fds(self.link, [b"."], [*outputs, *others, theirs.fileno()])
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            first_line = answers.readline()
        if writing >= 0:  # or the pipe would not end with the fork
            os.close(writing)
        if first_line.startswith(b"started "):
            return Forked(int(first_line.split()[1]), stdout, connection, answers)
        if stdout is not None:
            stdout.close()
        answers.close()
        connection.close()
        return None


@dataclasses.dataclass
class Forked:
    """What `subprocess.Popen` has, of a child of a fork server's."""

    pid: int
    stdout: IO[bytes] | None
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
            line = self.answers.readline()
            self.returncode = -signal.SIGKILL  # if the fork server died and took it along
            if line:
                self.returncode = int(line.split()[1])
            self.answers.close()
            self.connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens once it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def link() -> tuple[socket.socket, socket.socket]:
    """The end for a `ForkServer`, and the one for `serve`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def can_fork() -> bool:
    """Whether no thread lives through a fork of this process (numpy's end before one, and
    start again when they are needed), and the kernel tells how a fork ended."""
    if not hasattr(os, "pidfd_open"):
        return False
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


def serve(link: socket.socket, accepts: Callable[[Request], bool] = bool) -> Request | None:
    """Fork until the link closes, for requests that it `accepts`. Returns in each fork,
    with its request; at the end None."""
    gc.collect()
    gc.freeze()  # a collection would copy the pages that all share
    working: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not link:
                    selector.unregister(key.fileobj)
                    connection = working.pop(key.fd)
                    _, status = os.waitpid(key.data, 0)
                    os.close(key.fd)
                    with contextlib.suppress(OSError), connection:
                        connection.sendall(b"ended %d\n" % os.waitstatus_to_exitcode(status))
                    continue
                message, descriptors, _, _ = socket.recv_fds(link, 1, _MOST_DESCRIPTORS)
                if not message:
                    return None
                connection = socket.socket(fileno=descriptors.pop())
                request, pid = _fork(connection, accepts)
                if request is not None and not pid:  # this is the fork
                    numbers = (1, 2, *request.get("descriptors", ()))
                    places = dict(zip(numbers, descriptors, strict=True))
                    _let_go([link, *working.values()], working, places, connection)
                    return request
                for output in descriptors:
                    os.close(output)
                if request is None:
                    connection.close()
                    continue
                handle = os.pidfd_open(pid)
                working[handle] = connection
                selector.register(handle, selectors.EVENT_READ, pid)


def exit_status(call: Callable[[], object]) -> int:
    """The exit code of a Python process that makes this call; prints what Python
    would."""
    try:
        call()
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - the outermost
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End a fork as Python ends a process, but without taking the interpreter apart: a
    thread of a library's that then asks for its lock (pyarrow, reading ahead) aborts the
    process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit(code)


def _fork(
    connection: socket.socket, accepts: Callable[[Request], bool]
) -> tuple[Request | None, int]:
    """The request, None if it or the fork failed, and the fork's process id, 0 in the
    fork."""
    try:
        with connection.makefile("rb") as file:
            request = dict(json.loads(file.read()))
        if not accepts(request):
            return None, 0
        return request, os.fork()
    except (OSError, ValueError):  # others go on, and this caller does without
        return None, 0


def _let_go(
    sockets: Sequence[socket.socket],
    handles: Mapping[int, object],
    places: Mapping[int, int],
    connection: socket.socket,
) -> None:
    """Become a process of its own: of what the parent had open, keep what has a place."""
    os.setsid()
    for inherited in sockets:
        inherited.close()
    for handle in handles:
        os.close(handle)
    for number, descriptor in places.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    with connection:
        connection.sendall(b"started %d\n" % os.getpid())


EXECUTOR = "kfp.dsl.executor_main"


@contextlib.contextmanager
def fork_server_for(env: Mapping[str, str], modules: Sequence[str]) -> Iterator[ForkServer | None]:
    """That process, as long as the block lasts; None where the system has no `pidfd`."""
    if not hasattr(os, "pidfd_open"):
        yield None
        return
    own_end, theirs = link()
    with theirs:
        arguments = ["-P", "-m", "rekindle.launch.fork_server", str(theirs.fileno()), EXECUTOR]
        process = subprocess.Popen(
            [sys.executable, *arguments, *modules],
            env={**env, "PYTHONUNBUFFERED": "1", "_KFP_RUNTIME": "true", **THREADLESS},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    try:
        with own_end:
            yield ForkServer(own_end, process.pid)
    finally:
        process.wait()


def main() -> None:
    """Import, then fork until the process that asks for forks is gone."""
    link, *modules = sys.argv[1:]
    env = {name: value for name, value in os.environ.items() if name not in THREADLESS}
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if can_fork():
        request = serve(socket.socket(fileno=int(link)))
        if request is not None:  # be the shim of a task
            set_environment(request["env"])
            sys.exit(shim.main(["shim", request["task"]], functools.partial(_executor, env)))


def _executor(
    imported_in: Mapping[str, str], command: Sequence[str], env: Mapping[str, str], cwd: str
) -> Callable[[], int] | None:
    """KFP's executor as a fork of the shim, for steps that have the environment of the
    imports."""
    different_names = {name for name, _ in env.items() ^ imported_in.items()} - shim.ADDED
    if different_names or list(command[:3]) != shim.EXECUTOR:
        return None
    return lambda: _execute(command[3:], env, cwd)


def _execute(words: Sequence[str], env: Mapping[str, str], cwd: str) -> NoReturn:
    """Do what `python -m kfp.dsl.executor_main` does, without its imports."""
    set_environment(env)
    os.chdir(cwd)
    module = sys.modules[EXECUTOR]
    sys.path.append(cwd)  # last, so that modules of the user's hide nothing
    sys.argv = [str(module.__file__), *words]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # forks would all draw the same
    leave(exit_status(module.executor_main))


def set_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


if __name__ == "__main__":
    main()
