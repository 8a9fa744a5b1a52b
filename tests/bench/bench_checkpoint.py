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
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOALS = {"call": 0.1, "slowed": 0.5}
LAYERS, WIDTH, BATCH = 12, 1900, 48
# two-sided 95% quantiles of Student's t, by degrees of freedom
T95 = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 11: 2.201, 14: 2.145, 19: 2.093}


def rows(pairs: int = 6, ranks: int = 1, threads: int = 1, folder: str = "") -> list[dict]:
    """Measure in processes of their own; rows `{work, peer, ratio, low, high, goal, met}`."""
    with tempfile.TemporaryDirectory(dir=folder or None) as place:
        command = [sys.executable, __file__, "--measure", place, "--pairs", str(pairs)]
        environment = {
            **os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        gang = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank)})
            for rank in range(ranks)
        ]
        codes = [process.wait(timeout=900) for process in gang]
        if any(codes):
            raise RuntimeError(f"a rank ended with {codes}")
        measured = json.loads(Path(place, "measured.json").read_text())
    size = f"{measured['bytes'] / 1e6:.0f} MB, {ranks} rank(s), {threads} thread(s)"
    return [
        row(f"checkpoint of {size}: {name}", measured[name], measured["peer"], goal)
        for name, goal in GOALS.items()
    ]


def row(work: str, ours: list[float], peer: list[float], goal: float) -> dict:
    """The mean ratio of the pairs with its 95% t interval; the upper bound has to reach the goal."""
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    middle = statistics.mean(ratios)
    half = T95.get(len(ratios) - 1, 2.776) * statistics.stdev(ratios) / len(ratios) ** 0.5
    return {
        "work": work, "peer": "torch.save, synchronous, fsync", "ratio": round(middle, 3),
        "low": round(middle - half, 3), "high": round(middle + half, 3), "goal": goal,
        "met": middle + half <= goal,
        "seconds_ours": statistics.mean(ours), "seconds_peer": statistics.mean(peer),
    }  # fmt: skip


def measure(place: Path, pairs: int) -> None:
    """One rank's part; rank 0 leaves `measured.json`."""
    import torch
    import torch.distributed as dist

    from rekindle.spec.model import CheckpointSpec
    from rekindle.train.checkpoint import Checkpointer

    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip
    torch.manual_seed(0)
    network = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True)
    inputs = torch.randn(BATCH, WIDTH)

    def step() -> None:
        network(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # ranks stay together, as they do when they share gradients

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - began) / count

    def state() -> dict:
        moments = {
            f"{name}.{key}": value
            for name, parameter in network.named_parameters()
            for key, value in optimizer.state[parameter].items()
        }
        return {"model": network.state_dict(), "optimizer": moments}

    checkpointer = Checkpointer(place / "ours", CheckpointSpec(keep=1), "bench")
    number = 0

    def ours() -> tuple[float, float]:
        nonlocal number
        number += 1
        alone = steps(4)
        began = time.perf_counter()
        checkpointer.save(number, state(), {})
        called = time.perf_counter() - began
        done = 0
        while checkpointer.committed() is None:
            step()
            done += 1
        lasted = time.perf_counter() - began
        alone = (alone + steps(4)) / 2
        return called, lasted - done * alone

    def peer() -> float:
        steps(2)
        began = time.perf_counter()
        if rank == 0:
            with (place / "peer.pt").open("wb") as file:
                torch.save(state(), file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        return time.perf_counter() - began

    steps(2)
    first = ours(), peer()
    figures: dict[str, list[float]] = {"call": [], "slowed": [], "peer": []}
    for pair in range(pairs):
        if pair % 2:
            waited = peer()
            called, slowed = ours()
        else:
            called, slowed = ours()
            waited = peer()
        for name, value in (("call", called), ("slowed", slowed), ("peer", waited)):
            figures[name].append(value)
    if rank == 0:
        size = sum(t.nbytes for part in state().values() for t in part.values())
        (place / "measured.json").write_text(json.dumps(figures | {"bytes": size, "first": first}))
        print(json.dumps({"step": steps(4) if dist.get_world_size() == 1 else None, "first": first,
                          "seconds to commit": list(checkpointer.seconds), **figures}, indent=None))  # fmt: skip
        sys.stdout.flush()
    os._exit(0)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--pairs", type=int, default=6)
    words.add_argument("--ranks", type=int, default=1)
    words.add_argument("--threads", type=int, default=1)
    words.add_argument(
        "--folder", default="", help="where to write; default the system's temporary folder"
    )
    words.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.measure:
        return measure(given.measure, given.pairs)
    for one in rows(given.pairs, given.ranks, given.threads, given.folder):
        print(
            f"{one['work']:<60} {one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]  "
            f"goal <= {one['goal']}  {'met' if one['met'] else 'NOT MET'}"
        )
    return None


if __name__ == "__main__":
    main()
