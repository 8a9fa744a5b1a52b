"""A process that has imported torch, and forks the agents of worker groups (agent.py).

Importing torch and transformers takes three to five processor seconds, with which each
training, each scoring and each restart would begin. `python -m rekindle.launch.preloaded
PARENT HANDLE MAY-DIFFER MODULE...` imports the modules and answers requests
(fork_server.py) on the datagram socket whose descriptor is HANDLE; its path is in the
environment as `REKINDLE_PRELOADED`. MAY-DIFFER is a regular expression. An agent whose
environment differs in a variable that does not match it is not forked, because the
imports may have read that variable: it executes a Python of its own, as all agents do on
machines with a GPU and where no such process runs.

In 91 tests that train for seconds on CPUs, 493 of 700 processor seconds were imports.
Rejected: a daemon that outlives runs, because it could hold the code of another checkout;
forks on machines with a GPU, because a driver that was touched does not live through a
fork, and ranks are executed there anyway. The cost: tools such as ps show for a fork the
command line and the environment of the process that imported, all but its mark; 470 MB
that ranks share stay until the run ends; a run that is killed (-9) leaves its socket
among the temporary files."""

import contextlib
import ctypes
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.launch import fork_server
from rekindle.launch.process import MARK, die_with_parent, has_gpu

SOCKET = "REKINDLE_PRELOADED"
# the environment that every agent of ours has
CONSTANT = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **fork_server.THREADLESS}
# variables that are read when ranks start, and by no import
MAY_DIFFER = r"REKINDLE_\w+|TORCH_ELASTIC_\w+|(GLOO|NCCL)_\w+|PATH|_KFP_RUNTIME"
_NO_MARK = "0" * 32  # as long as a mark, since forks write theirs over it in place


class Preloaded:
    """A process that has imported `modules`, and the folder of its socket; from `start`
    to `close`."""

    environment: dict[str, str]
    """What the steps of the run need in their environment to find the socket."""

    def __init__(self, modules: Sequence[str], may_differ: str = MAY_DIFFER) -> None:
        self.modules = modules
        self.may_differ = may_differ
        self.folder = Path(tempfile.gettempdir(), f"rekindle-{uuid.uuid4().hex}")
        self.environment = {SOCKET: str(self.folder / "agents")}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, env: Mapping[str, str]) -> None:
        """Start the process, for agents with the environment `env`. It does nothing if it
        was started before, or where forks are not possible."""
        if self.process is not None or has_gpu():
            return
        # the environment names another such process, which serves this run, too
        if env[SOCKET] != self.environment[SOCKET]:
            return
        env = {"OMP_NUM_THREADS": "1", **env, **CONSTANT, MARK: _NO_MARK}
        with (
            contextlib.suppress(OSError),  # the temporary folder takes no socket
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server,
        ):
            # for our user alone, because the process runs whatever a request asks for
            self.folder.mkdir(mode=0o700)
            server.bind(self.environment[SOCKET])
            arguments = ["-P", "-m", "rekindle.launch.preloaded", str(os.getpid())]
            self.process = subprocess.Popen(
                [sys.executable, *arguments, str(server.fileno()), self.may_differ, *self.modules],
                env=env,
                pass_fds=[server.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def close(self) -> None:
        """End the process, and remove the folder of its socket."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def fork_agent(
    arguments: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]
) -> fork_server.Forked | None:
    """A fork that does what `python -m ARGUMENTS` would do. It has these open
    descriptors, under the same numbers. None where no process can fork it."""
    if not env.get(SOCKET):
        return None
    request = {
        "python": sys.executable,
        "arguments": arguments,
        "env": dict(env),
        "cwd": str(Path.cwd()),
        "descriptors": descriptors,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        try:
            link.connect(env[SOCKET])
        except OSError:
            return None
        return fork_server.ForkServer(link, 0).adopt(request, (1, 2), descriptors)


def main() -> None:
    """Import the modules, then fork an agent for each request, until the process that
    started this one is gone. Returns in that process only; a fork ends in here."""
    parent, handle, may_differ, *modules = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(parent):  # it was gone before that took effect
        return
    imported_in = dict(os.environ)
    for module in modules:
        with contextlib.suppress(ImportError):  # an agent that needs it says so, in its log
            importlib.import_module(module)

    def accepts(request: Mapping[str, Any]) -> bool:
        if request["python"] != sys.executable:
            return False
        different_names = {name for name, _ in request["env"].items() ^ imported_in.items()}
        return all(re.fullmatch(may_differ, name) for name in different_names)

    # Without its own mark in /proc a fork could not be found and ended when its step is
    # over (`process.end_marked`), so there are no forks where it cannot be written.
    mark = _address_in_environment(f"{MARK}={_NO_MARK}")
    if mark and fork_server.can_fork():
        request = fork_server.serve(socket.socket(fileno=int(handle)), accepts)
        if request is not None:  # this is a fork, and becomes the agent
            fork_server.set_environment(request["env"])
            value = request["env"][MARK].encode()
            ctypes.memmove(mark + len(f"{MARK}="), value, len(value))
            os.chdir(request["cwd"])
            module, *arguments = request["arguments"]
            agent = importlib.import_module(module)
            sys.argv = [str(agent.__file__), *arguments]
            fork_server.leave(fork_server.exit_status(agent.main))


def _address_in_environment(variable: str) -> int:
    """The address of `NAME=VALUE` in the memory that /proc/PID/environ shows, also of
    forks: there the kernel put the environment that this process was executed with
    (proc(5)). 0 where the kernel does not give the address, such as gVisor's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # env_start and env_end, fields 50 and 51 of proc(5) counted from 1; the first two,
    # pid and comm, were cut off
    start = int(fields[47])
    end = int(fields[48])
    if not start:
        return 0
    offset = ctypes.string_at(start, end - start).find(variable.encode())
    return start + offset if offset >= 0 else 0


if __name__ == "__main__":
    main()
