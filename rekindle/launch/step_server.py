"""A process that has imported what most steps import, and forks into the steps of a run:
`python -m rekindle.launch.step_server LINK MODULE...`.

Importing KFP's executor and MLflow takes a processor two to three seconds, and most steps of a run
do it; here it happens once. A request is `{"task": path of TASK.json, "env": {...}}`, and what is
forked is that task's shim. A step whose environment is not the one of the imports executes a Python
of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from rekindle.launch import fork_server, shim

EXECUTOR = "kfp.dsl.executor_main"


@contextlib.contextmanager
def fork_server_for(
    env: Mapping[str, str], modules: Sequence[str]
) -> Iterator[fork_server.ForkServer | None]:
    """That process, as long as the block lasts; None where the system has no `pidfd`."""
    if not hasattr(os, "pidfd_open"):
        yield None
        return
    link, theirs = fork_server.link()
    with theirs:
        words = ["-P", "-m", "rekindle.launch.step_server", str(theirs.fileno()), EXECUTOR]
        process = subprocess.Popen(
            [sys.executable, *words, *modules],
            env={**env, "PYTHONUNBUFFERED": "1", "_KFP_RUNTIME": "true", **fork_server.THREADLESS},
            pass_fds=[theirs.fileno()], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        with link:
            yield fork_server.ForkServer(link, process.pid)
    finally:
        process.wait()


def main() -> None:
    """Import, then fork until the process that asks for forks is gone."""
    link, *modules = sys.argv[1:]
    env = {name: value for name, value in os.environ.items() if name not in fork_server.THREADLESS}
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if fork_server.can_fork():
        request = fork_server.serve(socket.socket(fileno=int(link)))
        if request is not None:  # be the shim of a task
            _environ(request["env"])
            sys.exit(shim.main(["shim", request["task"]], _executor(env)))


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


def _execute(words: Sequence[str], env: Mapping[str, str], cwd: str) -> NoReturn:
    """What `python -m kfp.dsl.executor_main` does, without its imports."""
    _environ(env)
    os.chdir(cwd)
    module = sys.modules[EXECUTOR]
    sys.path.append(cwd)  # last, so that modules of the user's hide nothing
    sys.argv = [str(module.__file__), *words]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # forks would all draw the same
    fork_server.leave(fork_server.exit_status(module.executor_main))


def _environ(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


if __name__ == "__main__":
    main()
