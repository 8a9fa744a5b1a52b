"""torchrun that says how its ranks ended, and takes them along when its supervisor is
gone: `python -m rekindle.launch.agent LIFELINE REPORT MODULE TORCHRUN-ARGUMENTS`.

LIFELINE is the reading end of a pipe that the supervisor holds open; when it closes,
whatever carries the mark of this worker group is killed. REPORT receives one JSON line a
failed rank, in the order in which torchrun saw them: `rank`, `exit_code` (negative: the
signal), `time` (seconds).

Where there is no GPU, and MODULE is not empty, the ranks are forks that call `main()` of
it: importing torch takes a processor three seconds, and they share its pages. With a GPU
each rank is a Python of its own, because a driver that was touched does not live through
a fork."""

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rekindle.launch import fork_server, meeting
from rekindle.launch.process import MARK, dying_with_parent, end_marked, has_gpu, leave


def main() -> None:
    lifeline, report, module, *arguments = sys.argv[1:]
    os.set_inheritable(int(lifeline), False)
    ranks: fork_server.ForkServer | None = None
    if module and not has_gpu():
        job = arguments[-1]  # the script's last argument
        ranks = _fork_server(module, job, int(lifeline))  # before a thread: it has to fork
    threading.Thread(target=hold_on, args=(int(lifeline),), daemon=True).start()
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.run import parse_args, run

    class ForkedRank(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            assert ranks is not None
            script_arguments = args[args.index(module) + 1 :]
            forked = ranks.adopt({"arguments": script_arguments, "env": env}, (1, 2))
            return forked or super()._popen(args, env)

    if ranks is not None:
        api.get_subprocess_handler = ForkedRank  # type: ignore[attr-defined,assignment]
    meeting.offer()
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        lines = []
        for rank, failure in error.failures.items():
            facts = {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            lines.append(json.dumps(facts) + "\n")
        Path(report).write_text("".join(lines))
        leave(1)
    except api.SignalException as stopped:
        leave(128 + stopped.sigval)
    leave(0)


def _fork_server(module: str, job: str, lifeline: int) -> fork_server.ForkServer | None:
    """A fork of this process that has imported `module`, and whatever its ranks import
    for the `job`; None where that is not safe."""
    with dying_with_parent():  # there is nothing to tidy up yet
        try:
            importlib.import_module(module).preload(job)
        except Exception:  # noqa: BLE001 - a rank of its own says better what is wrong
            return None
        if not fork_server.can_fork():
            return None
        own_end, theirs = fork_server.link()
        pid = os.fork()
    if not pid:
        own_end.close()
        os.close(lifeline)
        _be_rank(module, fork_server.serve(theirs))
    theirs.close()
    return fork_server.ForkServer(own_end, pid)


def _be_rank(module: str, request: Mapping[str, Any] | None) -> NoReturn:
    """Do what `python -m MODULE` does, without its imports; nothing if there is no
    request."""
    if request is None:
        os._exit(0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        # torchrun handles them, so that a rank it executes does not ignore them, as we
        # may (nohup)
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    fork_server.set_environment(request["env"])
    sys.argv = [str(sys.modules[module].__file__), *request["arguments"]]
    leave(fork_server.exit_status(sys.modules[module].main))


def hold_on(lifeline: int) -> None:
    """End the worker group when its supervisor is gone; in a thread, because torchrun may
    wait inside C++ for other nodes."""
    os.read(lifeline, 1)
    end_marked(os.environ[MARK])
    os._exit(1)


if __name__ == "__main__":
    main()
