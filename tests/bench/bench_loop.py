"""What our loop costs over a bare one, in one process.

    python tests/bench/bench_loop.py [--pairs 8]

Both run the same module on the same batches: a block of steps by `Trainer.fit` (data, agreement,
clipping, history, measurements), then one that a hand would write: forward, backward, step. A step
takes 50 ms and more. A ratio of 1 is the ceiling."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import contest
import work
from contest import Row, compared

STEPS = 12
GOAL = 1.03


def rows(folder: Path, count: int = 8) -> list[Row]:
    """Measured in a process of its own."""
    words = contest.python(__file__, "--measure", str(folder), "--pairs", str(count))
    done = subprocess.run(
        words, env=contest.environment(), check=True, capture_output=True, text=True, timeout=900
    )
    found = contest.answer(done.stdout)
    per_step = sum(found["bare"]) / len(found["bare"])
    return [
        compared(
            f"loop overhead, a step of {1000 * per_step:.0f} ms", "hand-written loop",
            found["ours"], found["bare"], GOAL, at_least=False, unit="s a step", ceiling=1.0,
            gain="the next batch is made meanwhile; one small agreement a step",
        )
    ]  # fmt: skip


def measure(folder: Path, count: int) -> None:
    import torch
    import torch.distributed as dist

    from rekindle.spec.model import CheckpointSpec
    from rekindle.tasks import load_task
    from rekindle.train.checkpoint import Checkpointer
    from rekindle.train.history import History
    from rekindle.train.loop import Plan, StopFlag, Trainer
    from rekindle.train.profile import Profiler
    from rekindle.train.throughput import Clock
    from rekindle.train.worker import Start, order_of

    given = work.documents(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    task, shards, cpu = load_task(given.task), given.opened(), torch.device("cpu")
    job = given.job(0, folder / "ours")
    start = Start.of(job, task, shards, cpu)
    parts = start.parts(fresh=True)
    trainer = Trainer(
        task, shards, job.train, Plan(10**6, order_of(job, task, shards, parts)), parts, 0
    )
    made = [m for step in range(STEPS) for m in trainer.feed(trainer.batches.make(step).micro)]
    module = parts.stages[0].module
    adam = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    (folder / "ours").mkdir()

    def ours(number: int) -> float:
        history = History(folder / "ours" / f"{number}.jsonl")
        trainer.plan = dataclasses.replace(trainer.plan, steps=STEPS)
        checkpointer = Checkpointer(
            str(folder / f"saved-{number}"), CheckpointSpec(every=None), "key", history.path
        )
        clock = Clock(STEPS, None, cpu, 1, job.train)
        trainer.fit(checkpointer, history, StopFlag(60), 0, clock, Profiler(0, cpu, folder, {}))
        checkpointer.wait()
        return sum(json.loads(line)["step_seconds"] for line in history.path.open()) / STEPS

    def bare(number: int) -> float:
        began = time.perf_counter()
        for micro in made:
            module(micro=micro)[0, 0].backward()
            adam.step()
            adam.zero_grad()
        return (time.perf_counter() - began) / STEPS

    for warm in (ours, bare):
        warm(-1)
    found = contest.pairs({"ours": ours, "bare": bare}, count)
    print("BENCH", json.dumps(found), flush=True)
    os._exit(0)


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--pairs", type=int, default=8)
    words.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.measure:
        return measure(given.measure, given.pairs)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder), given.pairs):
            print(contest.show(row))
    return None


if __name__ == "__main__":
    main()
