"""The crash test: `make torture MINUTES=8 [SEED=n]`.

Rounds of random kills, stops, full disks, damaged files, moved homes and concurrent runs, each held
against an undisturbed run: the same weights, one version, a champion by evidence only, every record
readable, no process left. A round has a seed, which decides what is done and when; a round that
fails says how to repeat it, and its folder is kept."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.torture.chaos import Chaos, Counts, left_in, send
from tests.torture.emulated import Emulated
from tests.torture.heavy import Heavy
from tests.torture.light import Light
from tests.torture.oracle import Failure
from tests.torture.store import Store

ROUNDS = {"light": Light, "heavy": Heavy, "store": Store, "emulated": Emulated}
SHOWN = (
    "rounds",
    "runs",
    "kill tree",
    "kill one",
    "kill main",
    "ask to stop",
    "hold up",
    "spot machines taken away",
    "executions stopped",
    "stores held up",
    "concurrent runs",
    "files damaged",
    "full disks",
    "limits on file size",
    "homes moved",
    "homes copied",
    "failures",
)


def main() -> int:
    """Torture until the time is over; 1 if a round failed."""
    parser = argparse.ArgumentParser(prog="make torture")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first round")
    parser.add_argument("--rounds", type=int, default=10**6, help="at most so many")
    parser.add_argument("--only", choices=list(ROUNDS), default="")
    parser.add_argument("--kind", default="", help="of heavy rounds: kills, damage, server ...")
    parser.add_argument("--folder", type=Path, help="keep the undisturbed training here")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    folder = options.folder or Path(tempfile.mkdtemp(prefix="torture-"))
    folder.mkdir(exist_ok=True)
    counts = torture(folder, seed, options.minutes * 60, options.rounds, options.only, options.kind)
    print(table(counts))
    if not counts["failures"] and options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if counts["failures"] else 0


def torture(
    folder: Path, seed: int, seconds: float, rounds: int = 10**6, only: str = "", kind: str = ""
) -> Counts:
    """Rounds from this seed on, each with the next one, for so many seconds."""
    counts, end = Counts(), time.monotonic() + seconds
    made: dict[str, Any] = {}
    for number in range(rounds):
        if time.monotonic() >= end:
            break
        mishaps = Chaos(seed + number, counts)
        drawn = mishaps.random.choices(list(ROUNDS), [10, 8, 2, 1])[0]
        which = only or drawn
        counts["rounds"] += 1
        began = time.monotonic()
        try:
            if which not in made:
                made[which] = ROUNDS[which](folder)
            rounds_of = made[which]
            extra = (kind,) if which == "heavy" else ()
            shutil.rmtree(rounds_of.round(seed + number, mishaps, *extra), ignore_errors=True)
        except (Failure, OSError, ValueError, KeyError) as error:
            counts["failures"] += 1
            for process in left_in(folder):
                send(process, signal.SIGKILL)
            words = f"--only {only} " * bool(only) + f"--kind {kind} " * bool(kind)
            print(
                f"FAILED: {type(error).__name__}: {error}\n  kept in {folder}; repeat it with\n"
                f"  python -m tests.torture --seed {seed + number} --rounds 1 {words}"
            )
        print(
            f"seed {seed + number}, {time.monotonic() - began:.1f} s: {'; '.join(mishaps.log)}",
            flush=True,
        )
    return counts


def table(counts: Counts) -> str:
    """What was done, and how long recovering took."""
    rows = [(name, f"{counts[name]:,}") for name in SHOWN]
    if times := counts.recoveries:
        rows.insert(-1, ("recoveries", f"{len(times):,}"))
        middle = statistics.median(times)
        rows.insert(-1, ("seconds to recover", f"median {middle:.1f}, at most {max(times):.1f}"))
    rows += [("left out", note) for note in sorted(counts.notes)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("REKINDLE_PRELOADED", None)  # runs have their own, which are to be killed, too
    sys.exit(main())
