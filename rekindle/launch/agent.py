"""torchrun that says how its ranks ended, and takes them along when its supervisor is gone:
`python -m rekindle.launch.agent LIFELINE REPORT TORCHRUN-ARGUMENTS`.

LIFELINE is the reading end of a pipe that the supervisor holds open; when it closes, whatever
carries the mark of this gang is killed. REPORT receives one JSON line a failed rank, in the order
in which torchrun saw them: `rank`, `exit_code` (negative: the signal), `time` (whole seconds)."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from rekindle.launch.process import MARK, end_marked


def main() -> None:
    """Run torchrun in this process."""
    lifeline, report, *words = sys.argv[1:]
    os.set_inheritable(int(lifeline), False)
    threading.Thread(target=_hold_on, args=(int(lifeline),), daemon=True).start()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(words))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        Path(report).write_text("".join(map(_line, error.failures.items())))
        sys.exit(1)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


def _line(failed: tuple[int, Any]) -> str:
    rank, failure = failed
    facts = {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
    return json.dumps(facts) + "\n"


def _hold_on(lifeline: int) -> None:
    """A thread, because torchrun may wait inside C++ for other nodes."""
    os.read(lifeline, 1)
    end_marked(os.environ[MARK])
    os._exit(1)


if __name__ == "__main__":
    main()
