"""A process that has imported torch, and forks the agents of worker groups (agent.py).

Importing torch and transformers takes a processor three to five seconds, and without it
each training, each scoring and each restart begins with that. `python -m
rekindle.launch.preloaded PARENT HANDLE MAY-DIFFER MODULE...` serves the datagram socket
of that descriptor, whose path is in the environment as `REKINDLE_PRELOADED`; requests are
fork_server.py's. An agent whose environment differs in more than the names that match
MAY-DIFFER, a regular expression, is not forked: it executes a Python of its own, as all
do on machines with a GPU and where no process serves.

In 91 tests that train for seconds on CPUs, 493 of 700 processor seconds were imports.
Rejected: a daemon that outlives runs, because it could hold the code of another checkout;
forks on machines with a GPU, because a driver that was touched does not live through a
fork, and ranks are executed there anyway. The cost: a fork shows the command line and the
environment of the process that imported, but for its mark; 470 MB that ranks share stay
until the run ends; a run that is killed (-9) leaves its socket among the temporary files."""

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
# read when ranks start, and by no import
MAY_DIFFER = r"REKINDLE_\w+|TORCH_ELASTIC_\w+|(GLOO|NCCL)_\w+|PATH|_KFP_RUNTIME"
_NO_MARK = "0" * 32  # as long as one; forks write theirs over it


class Preloaded:
    """Such a process and the folder of its socket, from `start` to `close`."""

    def __init__(self, modules: Sequence[str], may_differ: str = MAY_DIFFER) -> None:
        self.modules = modules
        self.may_differ = may_differ
        self.folder = Path(tempfile.gettempdir(), f"rekindle-{uuid.uuid4().hex}")
        self.environment = {SOCKET: str(self.folder / "agents")}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, env: Mapping[str, str]) -> None:
        """Import in the background, for agents in this environment; once, and nothing
        where the temporary folder takes no socket."""
        if self.process is not None or has_gpu() or env[SOCKET] != self.environment[SOCKET]:
            return  # or another serves already
        env = {"OMP_NUM_THREADS": "1", **env, **CONSTANT, MARK: _NO_MARK}
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server,
        ):
            self.folder.mkdir(mode=0o700)  # for our user alone, as what is asked there is done
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
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def fork_agent(
    words: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]
) -> fork_server.Forked | None:
    """The agent that `python -m WORDS` would be, with these descriptors under the same
    numbers; None where no process serves."""
    if not env.get(SOCKET):
        return None
    request = {
        "python": sys.executable,
        "words": words,
        "env": dict(env),
        "cwd": str(Path.cwd()),
        "places": descriptors,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        try:
            link.connect(env[SOCKET])
        except OSError:
            return None
        return fork_server.ForkServer(link, 0).adopt(request, (1, 2), descriptors)


def main() -> None:
    """Import, then fork for those who ask, until the process that started this one is
    gone."""
    parent, handle, may_differ, *modules = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(parent):
        return
    imported_in = dict(os.environ)
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

    def accepts(request: Mapping[str, Any]) -> bool:
        if request["python"] != sys.executable:
            return False
        different_names = {name for name, _ in request["env"].items() ^ imported_in.items()}
        return all(re.fullmatch(may_differ, name) for name in different_names)

    mark = _shown(f"{MARK}={_NO_MARK}")
    if mark and fork_server.can_fork():
        request = fork_server.serve(socket.socket(fileno=int(handle)), accepts)
        if request is not None:  # be the agent
            fork_server.set_environment(request["env"])
            value = request["env"][MARK].encode()
            ctypes.memmove(mark + len(f"{MARK}="), value, len(value))  # for `end_marked`
            os.chdir(request["cwd"])
            agent = importlib.import_module(request["words"][0])
            sys.argv = [str(agent.__file__), *request["words"][1:]]
            fork_server.leave(fork_server.exit_status(agent.main))


def _shown(variable: str) -> int:
    """The address from which /proc shows it, also of forks: where the kernel put the
    environment that this process was executed with (proc(5)). 0 where it does not say, as
    gVisor's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # env_start and env_end, numbers 50 and 51 of proc(5): the first two were cut off
    start = int(fields[47])
    end = int(fields[48])
    if not start:
        return 0
    offset = ctypes.string_at(start, end - start).find(variable.encode())
    return start + offset if offset >= 0 else 0


if __name__ == "__main__":
    main()
