"""The speed of the training engine beside what its users would pick instead, in the same run.

    python tests/bench/bench.py [--pairs 5] [--only text,packed] [--out bench.json]

Prints a table and writes bench.json: rows `{work, peer, ratio, low, high, goal, met, loss_ours,
loss_peer, ...}` as contest.py describes them. Nothing else should run on the machine."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import bench_checkpoint
import bench_deepspeed
import bench_loop
import bench_plan
import bench_resume
import bench_train
import contest

WORKS = {
    "text": bench_train.text,
    "still": bench_train.still,
    "unpacked": bench_train.unpacked,
    "packed": bench_train.packed,
    "ddp": bench_train.ddp,
    "loop": bench_loop.rows,
    "checkpoint": bench_checkpoint.rows,
    "resume": bench_resume.rows,
    "plan": bench_plan.rows,
    "deepspeed": bench_deepspeed.rows,
}


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--pairs", type=int, default=5)
    words.add_argument("--only", default=",".join(WORKS))
    words.add_argument("--out", type=Path, default=Path("bench.json"))
    given = words.parse_args()
    rows = []
    for name in given.only.split(","):
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = WORKS[name](Path(folder), given.pairs)
        contest.write(found, given.out)
        rows += found
    for row in rows:
        print(contest.show(row))


if __name__ == "__main__":
    main()
