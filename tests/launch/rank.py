"""A rank without torch: `torchrun rank.py FOLDER SCENARIO`, or `-m tests.launch.rank`, which is forked. It beats, and then
something happens. Used by test_torchrun.py."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rekindle.errors import DataError
from rekindle.launch.process import die_with_parent
from rekindle.spec.identity import file_sha256
from rekindle.train.vitals import Vitals

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD)


def say(word):
    draft = STATUS / "status.draft"  # as rekindle's ranks do: the supervisor may look at any moment
    draft.write_text(json.dumps({"status": word}))
    draft.rename(STATUS / "status.json")


def notice(number, frame):
    """What gloo says when torchrun ends the peers of a lost rank."""
    raise RuntimeError("[gloo] Connection closed by peer [10.0.0.2]:4711")


def killed():
    if RESTART == 0 and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5 if RESTART else 30)
    say("done")


def always_killed():
    os.kill(os.getpid(), signal.SIGKILL) if RANK == 0 else time.sleep(30)


def raised():
    ready = FOLDER / "ready-1"
    if RANK == 0:  # notices that its peer is gone before the peer has said why
        while not ready.exists():
            time.sleep(0.01)
        notice(0, None)
    with contextlib.suppress(RuntimeError):
        ready.touch()
        time.sleep(30)
    raise DataError("the shard is torn", where="shard-3.arrow", fix="run `shard` again")


def out_of_memory():
    raise MemoryError if RANK == 1 else RuntimeError("Connection reset")


def silent():
    os._exit(3 if RANK == 1 else 0)


def wedged():
    def wait_for_a_lock_that_nobody_holds():
        time.sleep(600)

    if RANK == 1:
        wait_for_a_lock_that_nobody_holds()
    else:
        time.sleep(0.5)
        vitals.beat(5, "step")
        time.sleep(600)


def frozen():
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(0.05)
        vitals.beat(6, "step")


def parent():
    code = "import time; time.sleep(600)"
    for new_session in (False, True):
        subprocess.Popen([sys.executable, "-c", code], start_new_session=new_session)
    (FOLDER / f"ready-{RANK}").touch()
    time.sleep(600)


def saves_on_sigterm():
    def on(number, frame):
        if RANK == 0:
            say("preempted")
        os._exit(0)

    signal.signal(signal.SIGTERM, on)
    (FOLDER / f"ready-{RANK}").touch()
    while True:
        time.sleep(0.05)
        vitals.beat(6, "step")


def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (FOLDER / f"ready-{RANK}").touch()
    while True:
        time.sleep(0.05)
        vitals.beat(6, "step")


def always_deaf_peer():
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deaf()


def greedy():
    if RANK == 1:
        hoard = []
        while True:
            hoard.append(b"x" * (16 << 20))
    time.sleep(30)


def tells():
    standard_input, *others = sorted(Path("/proc/self/fd").iterdir())
    facts = {
        "forked": "rekindle.launch.agent" in Path("/proc/self/cmdline").read_text(),
        "session": os.getsid(0) == os.getpid(),
        "file": Path(sys.argv[0]).name,
        "arguments": sys.argv[2:],
        "world": os.environ["WORLD_SIZE"],
        "input": str(standard_input.readlink()),
        "open": [path.name for path in others],
        "signals": {n.name: getattr(h := signal.getsignal(n), "__name__", str(h)) for n in SIGNALS},
    }
    print("seen at once", end="")
    (FOLDER / f"facts-{RANK}").write_text(json.dumps(facts))
    say("done")


def starts_slowly():
    """Rank 0 hashes for three times what a start may take in silence; rank 1 waits for it, as in a collective."""
    (FOLDER / f"piece-{RANK}").write_bytes(b"x" * 4096)
    ready = FOLDER / "hashed"
    until = time.monotonic() + float((FOLDER / "work-seconds").read_text())
    while time.monotonic() < until if RANK == 0 else not ready.exists():
        if RANK == 0:
            file_sha256(FOLDER / "piece-0")
        time.sleep(0.02)
    ready.touch()
    say("done")
    os._exit(0)


def never_starts():
    def wait_for_a_download_that_stopped():
        time.sleep(600)

    file_sha256(Path(__file__))
    if RANK == 1:
        wait_for_a_download_that_stopped()
    time.sleep(600)


def preload(job):
    """What the agent calls before it forks: this file has imported all."""


def main():
    global FOLDER, SCENARIO, STATUS, RANK, RESTART, vitals
    FOLDER, SCENARIO = Path(sys.argv[1]), sys.argv[2]
    STATUS = FOLDER / "status"
    RANK, RESTART = int(os.environ["RANK"]), int(os.environ["REKINDLE_RESTART"])
    if SCENARIO == "parent":
        parent()  # a script that knows nothing of us
    die_with_parent()
    vitals = Vitals(STATUS, RANK)
    signal.signal(signal.SIGTERM, notice)
    if SCENARIO in ("starts_slowly", "never_starts"):
        globals()[SCENARIO]()
    try:
        for step in range(1, 6):
            vitals.beat(step, "step")
        globals()[SCENARIO]()
    except BaseException as error:  # noqa: BLE001 - whatever it was
        vitals.failed(error)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
