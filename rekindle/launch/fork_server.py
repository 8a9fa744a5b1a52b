"""Fork server: forks children from a process that has done its imports.

A message over the link brings three descriptors: for what the fork prints and for its errors, and a
connection. A request in JSON comes there, and `started PID` and `ended EXIT-STATUS` go back, a line
each. When the link closes the fork server ends; its forks have to see to it that they end with it.

A process with several threads cannot be forked safely, and without `pidfd` the server does not
learn how a fork ended. Then no answer comes, and the caller starts a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

# Environment of a process that is to import pyarrow and fork: its allocator keeps a thread.
THREADLESS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


@dataclasses.dataclass(frozen=True)
class ForkServer:
    """The process at the other end of `link`; `adopt` may be called from several threads."""

    link: socket.socket
    pid: int

    def adopt(
        self, request: Mapping[str, Any], prints_to: tuple[int, int] | None = None
    ) -> Forked | None:
        """A fork at work on `request`, in a session of its own; None where no server answers.

        It prints to these two descriptors, or to its `stdout`."""
        reading, writing = (-1, -1) if prints_to else os.pipe()
        connection, theirs = socket.socketpair()
        answers = connection.makefile("rb")
        started = b""
        try:
            outputs = prints_to or (writing, writing)
            socket.send_fds(self.link, [b"."], [*outputs, theirs.fileno()])
            theirs.close()
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            started = answers.readline()
        except OSError:
            pass
        finally:
            theirs.close()
            if not prints_to:
                os.close(writing)
        stdout = None if prints_to else os.fdopen(reading, "rb", 0)
        if started.startswith(b"started "):
            return Forked(int(started.split()[1]), stdout, connection, answers)
        for one in (stdout, answers, connection):
            if one is not None:
                one.close()
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
            said = self.answers.readline()  # nothing, if the fork server died and took it along
            self.returncode = int(said.split()[1]) if said else -signal.SIGKILL
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


def link() -> tuple[socket.socket, socket.socket]:
    """The end for a `ForkServer`, and the one for `serve`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def can_fork() -> bool:
    """Whether no thread lives through a fork of this process (numpy's end before one, and start
    again when they are needed), and the kernel tells how a fork ended."""
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


def serve(link: socket.socket) -> dict[str, Any] | None:
    """Fork until the link closes. Returns in each fork, with the request it is to work on, and at
    the end with None."""
    gc.collect()
    gc.freeze()  # a collection would copy the pages that all share
    working: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not link:
                    selector.unregister(key.fileobj)
                    _tell_end(key.fd, key.data, working.pop(key.fd))
                    continue
                message, descriptors, _, _ = socket.recv_fds(link, 1, 3)
                if not message:
                    return None
                connection = socket.socket(fileno=descriptors.pop())
                request, pid = _fork(connection)
                if request is not None and not pid:
                    _let_go([link, *working.values()], working, descriptors, connection)
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
    """What a Python process exits with whose outermost call this is; it prints what Python
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
    """End a fork as Python ends a process, but without taking the interpreter apart: a thread of a
    library's that then asks for its lock (pyarrow, reading ahead) aborts the process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit(code)


def _fork(connection: socket.socket) -> tuple[dict[str, Any] | None, int]:
    """The request, None if it broke off or the system refused, and the fork's process id, 0 in
    it."""
    try:
        with connection.makefile("rb") as file:
            return dict(json.loads(file.read())), os.fork()
    except (OSError, ValueError):  # others go on, and this caller does without
        return None, 0


def _let_go(
    sockets: Sequence[socket.socket], handles: Mapping[int, Any], outputs: Sequence[int],
    connection: socket.socket,
) -> None:  # fmt: skip
    """Become a process of its own: of what the parent had open, keep the outputs only."""
    os.setsid()
    for one in sockets:
        one.close()
    for handle in handles:
        os.close(handle)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    with connection:
        connection.sendall(b"started %d\n" % os.getpid())


def _tell_end(handle: int, pid: int, connection: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(handle)
    with contextlib.suppress(OSError), connection:
        connection.sendall(b"ended %d\n" % os.waitstatus_to_exitcode(status))
