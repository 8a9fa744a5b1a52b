"""A checkpoint of more than 500 MB against `torch.save` of the same state, both with fsync.

    python tests/bench/bench_checkpoint.py [--pairs 6] [--ranks 1] [--threads 1] [--folder DIR]

An MLP trains with AdamW; its weights and moments are the state. A pair is one checkpoint of ours and
one `torch.save`, in turns (ABBA), with undisturbed steps before each. Two figures, both over the
seconds that `torch.save` stops training:

    call     what `save` itself takes
    slowed   all that training loses until the commit: the time from the call to the commit, less
             what as many steps take undisturbed. The call is in it.

The first save of a run, which allocates the snapshot, is warm-up and printed apart. Gain: training
waits for a copy in memory, not for a disk. Ceiling of `slowed`: the copy, plus hashing and writing
on a core that training would use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import contest
from contest import Row, compared

GOALS = {"call": 0.1, "slowed": 0.5}
LAYERS, WIDTH, BATCH = 12, 1900, 48


def rows(folder: Path, count: int = 6, ranks: int = 1, threads: int = 1) -> list[Row]:
    """Measured in processes of their own."""
    words = contest.python(__file__, "--measure", str(folder), "--pairs", str(count))
    environment = contest.environment(threads, WORLD_SIZE=str(ranks))
    gang = [
        subprocess.Popen(words, env={**environment, "RANK": str(rank)}) for rank in range(ranks)
    ]
    codes = [process.wait(timeout=900) for process in gang]
    if any(codes):
        raise RuntimeError(f"a rank ended with {codes}")
    found = json.loads((folder / "measured.json").read_text())
    size = f"{found['bytes'] / 1e6:.0f} MB, {ranks} rank(s)"
    return [
        compared(
            f"checkpoint of {size}: {name}",
            "torch.save, synchronous, fsync",
            found[name],
            found["peer"],
            goal,
            at_least=False,
            unit="s",
            gain="training waits for a copy in memory, not for the disk",
        )
        for name, goal in GOALS.items()
    ]


class Bench:
    """One rank: a network in training, and the two ways to save it."""

    def __init__(self, place: Path) -> None:
        import torch
        import torch.distributed as dist

        from rekindle.spec.model import CheckpointSpec
        from rekindle.train.checkpoint import Checkpointer

        self.place, self.rank, self.number = place, int(os.environ["RANK"]), 0
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place}/rendezvous",
            rank=self.rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-5, fused=True)
        self.inputs = torch.randn(BATCH, WIDTH)
        self.barrier, self.dump = dist.barrier, torch.save
        self.checkpointer = Checkpointer(place / "ours", CheckpointSpec(keep=1), "bench")

    def step(self) -> None:
        self.network(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.barrier()  # ranks stay together, as they do when they share gradients

    def steps(self, count: int) -> float:
        """Seconds of one."""
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        return (time.perf_counter() - began) / count

    def state(self) -> dict:
        moments = {
            f"{name}.{key}": value
            for name, parameter in self.network.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }
        return {"model": self.network.state_dict(), "optimizer": moments}

    def ours(self) -> dict[str, float]:
        """Seconds of the call, and seconds that training loses until the commit."""
        self.number += 1
        alone = self.steps(4)
        began = time.perf_counter()
        self.checkpointer.save(self.number, self.state(), {})
        called = time.perf_counter() - began
        done = 0
        while not self.committed():
            self.step()
            done += 1
        lasted = time.perf_counter() - began
        alone = (alone + self.steps(4)) / 2
        return {"call": called, "slowed": lasted - done * alone}

    def committed(self) -> bool:
        """Whether all ranks have written their part; asked as often as the loop asks."""
        import torch
        import torch.distributed as dist

        save, written = self.checkpointer.pending, torch.tensor(float(self.checkpointer.written()))
        dist.all_reduce(written, dist.ReduceOp.MIN)
        if written:
            self.checkpointer.settle(save)
        return bool(written)

    def peer(self) -> dict[str, float]:
        """Seconds that training waits for `torch.save`."""
        self.steps(2)
        began = time.perf_counter()
        if self.rank == 0:
            with (self.place / "peer.pt").open("wb") as file:
                self.dump(self.state(), file)
                file.flush()
                os.fsync(file.fileno())
        self.barrier()
        return {"peer": time.perf_counter() - began}


def measure(place: Path, pairs: int) -> None:
    """One rank's part; rank 0 leaves `measured.json`."""
    bench = Bench(place)
    bench.steps(2)
    first = bench.ours() | bench.peer()
    found = []
    for pair in range(pairs):
        turns = (bench.peer, bench.ours) if pair % 2 else (bench.ours, bench.peer)
        found.append(turns[0]() | turns[1]())
    if bench.rank == 0:
        size = sum(tensor.nbytes for part in bench.state().values() for tensor in part.values())
        figures = {name: [one[name] for one in found] for name in first}
        (place / "measured.json").write_text(json.dumps({"bytes": size, **figures}))
        told = {n: [round(x, 3) for x in [first[n], *figures[n]]] for n in first}
        print("seconds, the first save before the others:", told, flush=True)
    os._exit(0)  # gloo's threads now and then abort an ordinary exit


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--pairs", type=int, default=6)
    words.add_argument("--ranks", type=int, default=1)
    words.add_argument("--threads", type=int, default=1)
    words.add_argument("--folder", help="where to write; default the system's temporary folder")
    words.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.measure:
        return measure(given.measure, given.pairs)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for row in rows(Path(folder), given.pairs, given.ranks, given.threads):
            print(contest.show(row))
    return None


if __name__ == "__main__":
    main()
