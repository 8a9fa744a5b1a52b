"""What our loop costs over a bare one, and our seeding over torch's, in one process.

    python tests/bench/bench_loop.py [--pairs 8]

Both run the same module on the same batches: a block of steps by `Trainer.fit` (data, agreement,
clipping, history, measurements), then one that a hand would write: forward, backward, step. A step
takes 50 ms and more. A ratio of 1 is the ceiling. Then a text classifier whose step takes some 5 ms:
dropout is seeded for each block of each micro-batch, once by `part.seed` and once by
`torch.manual_seed`, which a hand would write."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

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
    small = sum(found["generators"]) / len(found["generators"])
    return [
        compared(
            f"loop overhead, a step of {1000 * per_step:.0f} ms",
            "hand-written loop",
            found["ours"],
            found["bare"],
            GOAL,
            at_least=False,
            unit="s a step",
            ceiling=1.0,
            gain="the next batch is made meanwhile; one small agreement a step",
        ),
        compared(
            f"seeding dropout, a step of {1000 * small:.1f} ms",
            "torch.manual_seed",
            found["generators"],
            found["manual_seed"],
            1.0,
            at_least=False,
            unit="s a step",
            gain="only the generators that are drawn from are seeded",
        ),
    ]


def measure(folder: Path, count: int) -> None:
    import torch
    import torch.distributed as dist

    from rekindle.spec.model import CheckpointSpec
    from rekindle.tasks import load_task
    from rekindle.train import part, rank
    from rekindle.train.checkpoint import Checkpointer
    from rekindle.train.history import History
    from rekindle.train.loop import RunLength, StepLog, StopFlag, Trainer
    from rekindle.train.throughput import Clock, Profiler
    from rekindle.train.worker import TrainingStart, order_of

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    cpu = torch.device("cpu")

    def trainer_of(given: work.Work) -> Trainer:
        job = given.job(0, given.folder / "ours")
        job = dataclasses.replace(job, train=rank.with_precision(job.train, cpu, None))
        task, shards = load_task(given.task), given.opened()
        parts = TrainingStart.of(job, task, shards, cpu).parts(fresh=True)
        length = RunLength(10**6, order_of(job, task, shards, parts))
        return Trainer(task, shards, job.train, length, parts, 0)

    trainer = trainer_of(work.documents(folder))
    made = [m for step in range(STEPS) for m in trainer.feed(trainer.batches.make(step).micro)]
    module = trainer.parts.stages[0].module
    adam = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    (folder / "ours").mkdir()

    def ours(number: int) -> float:
        history = History(folder / "ours" / f"{number}.jsonl")
        trainer.length = dataclasses.replace(trainer.length, steps=STEPS)
        checkpointer = Checkpointer(
            str(folder / f"saved-{number}"), CheckpointSpec(every=None), "key", history.path
        )
        clock = Clock(STEPS, None, cpu, 1, trainer.spec)
        profiler = Profiler(0, cpu, folder, {})
        trainer.fit(0, checkpointer, StepLog(0, history, clock), profiler, StopFlag(60))
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

    small = trainer_of(work.reviews(folder / "texts", dim=64, n_layers=2, hidden_dim=256))
    works = [small.batches.make(step) for step in range(100)]

    def seeded(seed: Any, number: int) -> float:
        part.seed = seed
        began = time.perf_counter()
        for each in works:
            small._backward(each)
            small.optimizer.clear()
        return (time.perf_counter() - began) / len(works)

    def by_hand(key: int, device: torch.device) -> None:
        torch.manual_seed(key)

    ways = {
        "generators": functools.partial(seeded, part.seed),
        "manual_seed": functools.partial(seeded, by_hand),
    }
    for way in ways.values():
        way(-1)
    found |= contest.pairs(ways, count)
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
