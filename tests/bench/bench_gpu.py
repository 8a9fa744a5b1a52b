"""Tokens a second, MFU and peak memory on a GPU, against transformers.Trainer and a
loop written by hand, in the same run.

    python tests/bench/bench_gpu.py [--only gpt-2,llama] [--steps 20] [--tiny]

Random weights in the shapes of GPT-2 1.3B (fp32 weights, bf16 arithmetic) and Llama-3-8B (LoRA and
full on one GPU: bf16 weights and moments; full on eight, where there are eight: fp32 weights in
shards), on packs of documents that all contestants keep apart. They are rekindle's worker,
transformers.Trainer and a loop written by hand (by_hand.py), and take turns, each in a process of
its own. Tokens are supervised ones, the first `WARM` steps do not count; MFU by our formula for all
(train/throughput.py). Who runs out of memory has that as a result. `--tiny` shrinks the shapes and
compiles nothing, to try the script where there is no GPU."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import contest
import torch
import work
from contest import Row, compared
from work import Work

from rekindle.catalog.machines import peak_flops
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import modules, weights
from rekindle.train.history import read_history
from rekindle.train.job import Job
from rekindle.train.throughput import StepCost

WARM = 5
GOALS = {"Trainer": 1.3, "by hand": 1.0}  # rekindle's tokens a second over theirs
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 2048,
    "n_layer": 24,
    "n_head": 16,
    "n_positions": 2048,
    "vocab_size": 50257,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 5000},
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 5000,
    },
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and how it is trained. `recompute`: activation checkpointing, in all contestants;
    `target`: the MFU, or with LoRA the tokens a second, to aim for."""

    name: str
    model: dict[str, Any]
    length: int
    batch: int
    micro: int
    weights: str
    recompute: str
    lora: bool
    target: float
    ranks: int = 1
    compile: bool = True


SHAPES = (
    Shape("GPT-2 1.3B, full", GPT2, 2048, 16, 8, "fp32", "none", False, 0.40),
    Shape("Llama-3-8B, LoRA", LLAMA, 4096, 4, 1, "bf16", "none", True, 12_500),
    Shape("Llama-3-8B, full, one GPU", LLAMA, 4096, 4, 1, "bf16", "full", False, 0.0),
    Shape("Llama-3-8B, full, eight GPUs", LLAMA, 4096, 16, 1, "fp32", "full", False, 0.45, 8),
)


def shrunk(shape: Shape) -> Shape:
    """The same for a CPU."""
    model = shape.model | TINY[shape.model["model_type"]]
    return dataclasses.replace(
        shape, model=model, length=128, batch=4, micro=2, ranks=min(2, shape.ranks), compile=False
    )


def rows(shape: Shape, folder: Path, steps: int, count: int) -> list[Row | str]:
    """A row a peer, and what each contestant reached."""
    sides = turns(shape, folder, steps, count)
    failed = [
        f"{shape.name}: {name}: {one['failed']}"
        for name, side in sides.items()
        for one in side
        if "failed" in one
    ][:1]
    rates = {
        name: [one["tokens_per_second"] for one in side]
        for name, side in sides.items()
        if all("failed" not in one for one in side)
    }
    notes = [f"{name}: {told(_mean(sides[name]))}" for name in rates]
    aim = f"aim: {aim_of(shape)}" if shape.target else ""
    found: list[Row | str] = [
        compared(
            f"GPU: {shape.name}, {shape.length} tokens",
            peer,
            rates["rekindle"],
            rates[peer],
            goal,
            at_least=True,
            unit="tokens/s",
            gain="; ".join(filter(None, [*notes, aim])),
        )
        for peer, goal in GOALS.items()
        if "rekindle" in rates and peer in rates
    ]
    return [*found, *notes, *filter(None, [aim]), *failed]


def aim_of(shape: Shape) -> str:
    """The goal of a shape, in words."""
    return f"{shape.target:.0%} MFU" if shape.target < 1 else f"{shape.target:,.0f} tokens/s"


def turns(shape: Shape, folder: Path, steps: int, count: int) -> dict[str, list[dict[str, Any]]]:
    """What each contestant reached in each of its turns: tokens a second, MFU and bytes, or how it
    failed."""
    given = _prepared(shape, folder)
    contestants = {
        "rekindle": lambda number: _ours(given, shape, folder / "ours", steps, number),
        "Trainer": lambda number: _peer("on_gpu", given, shape, folder / "trainer", steps, number),
        "by hand": lambda number: _peer("by_hand", given, shape, folder / "hand", steps, number),
    }
    found: dict[str, list[dict[str, Any]]] = contest.pairs(contestants, count)
    peak, cost = peak_flops(_device_name(), "bf16"), _cost(given, shape)
    for one in (one for side in found.values() for one in side if "failed" not in one):
        flops = one["tokens_per_second"] * cost
        one["mfu"] = flops / peak / shape.ranks if peak else None
    return found


def told(one: dict[str, Any]) -> str:
    """A turn in words."""
    mfu = f"{one['mfu']:.1%} MFU" if one.get("mfu") else "peak unknown"
    return f"{one['tokens_per_second']:,.0f} tokens/s, {mfu}, {one['memory_bytes'] / 2**30:.1f} GiB"


def _mean(side: list[dict[str, Any]]) -> dict[str, Any]:
    known = [one["mfu"] for one in side if one.get("mfu")]
    return {
        "tokens_per_second": statistics.mean(one["tokens_per_second"] for one in side),
        "mfu": statistics.mean(known) if known else None,
        "memory_bytes": max(one["memory_bytes"] for one in side),
    }


def _prepared(shape: Shape, folder: Path) -> Work:
    """Packs of documents that fill sequences of `length` tokens; some 400 tokens a document."""
    many = 2000 * max(1, shape.batch * shape.length // 32_768)
    base = work.documents(folder / "work", count=many, longest=shape.length)
    train = base.train.model_copy(
        update={
            "global_batch_size": shape.batch,
            "micro_batch_size": shape.micro,
            "lr": 1e-5,
            "precision": "bf16",
            "weights": shape.weights,
            "compile": shape.compile,
            "activation_checkpointing": shape.recompute,
            "clip_norm": 1.0,
        }
    )
    return dataclasses.replace(base, train=train, model=shape.model)


def _job(given: Work, shape: Shape, output: Path, steps: int, number: int) -> Job:
    """Random weights, made on the way: no folder with 8B of them is written."""
    spec = given.train.model_dump() | {"seed": number, "steps": steps + 10, "epochs": None}
    if shape.ranks > 1:
        spec["layout"] = {"shard": shape.ranks}
    lora = {"rank": 16} if shape.lora else None
    return Job.of(
        artifact_root=str(output),
        run_key="bench",
        task=given.task,
        shards=str(given.shards),
        output=str(output / "model"),
        history=str(output / "history"),
        init="",
        init_from="base",
        model=ModelSpec.model_validate({"source": shape.model, "lora": lora}),
        train=TrainSpec.model_validate(spec),
    )


def _command(shape: Shape, *words: str) -> list[str]:
    """Of a contestant's ranks; torchrun where there are several."""
    if shape.ranks == 1:
        return contest.python(*words)
    run = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={shape.ranks}")
    return contest.python(*run, *words)


def _ours(given: Work, shape: Shape, folder: Path, steps: int, number: int) -> dict[str, Any]:
    output = contest.fresh(folder)
    job = _job(given, shape, output, steps, number)
    job.write(output / "job.json")
    log = output / "log"
    alone = contest.alone() if shape.ranks == 1 else {}
    with log.open("w") as out:
        process = subprocess.Popen(
            _command(shape, "-m", "rekindle.train.worker", str(output / "job.json")),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=contest.environment(**alone),
            start_new_session=True,
        )
        # ended before its last step, which would write 16 bytes a parameter to the disk
        while process.poll() is None and _steps(job.curve) < steps:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = list(read_history(job.curve))[:steps] if job.curve.exists() else []
    if len(done) < steps:
        return _failed(log.read_text())
    seconds = sum(row.step_seconds or 0.0 for row in done[WARM:])
    tokens = work.packed_targets(given, number, steps)[WARM:]
    return {
        "tokens_per_second": sum(tokens) / seconds,
        "memory_bytes": max(row.memory_bytes or 0 for row in done),
    }


def _steps(curve: Path) -> int:
    return sum(1 for _ in read_history(curve)) if curve.exists() else 0


def _peer(
    loop: str, given: Work, shape: Shape, folder: Path, steps: int, number: int
) -> dict[str, Any]:
    output = contest.fresh(folder)
    wish = {
        "loop": loop,
        "shards": str(given.shards),
        "output": str(output),
        "seed": number,
        "packed": True,
        "tokens": True,
        "lr": 1e-5,
        "batch_size": shape.batch,
        "micro": shape.micro,
        "steps": steps,
        "model": shape.model,
        "lora": shape.lora,
        "weights": shape.weights,
        "recompute": shape.recompute != "none",
        "warm": WARM,
        "compile": shape.compile,
        "pad_token_id": given.opened().manifest.settings["pad_token_id"],
    }
    (output / "wish.json").write_text(json.dumps(wish))
    peers = str(Path(__file__).with_name("peers.py"))
    try:
        text = contest.finished(_command(shape, peers, str(output / "wish.json")), output / "log")
    except RuntimeError as error:
        return _failed(str(error))
    found: dict[str, Any] = contest.answer(text)
    tokens = work.packed_targets(given, number, steps)[WARM:]
    return {**found, "tokens_per_second": sum(tokens) / found["seconds"]}


def _failed(log: str) -> dict[str, Any]:
    last = [line for line in log.splitlines() if "out of memory" in line.lower()]
    return {"failed": last[-1] if last else log[-500:]}


def _cost(given: Work, shape: Shape) -> float:
    """FLOPs a token of our formula, over the documents of the first epoch."""
    shards = given.opened()
    with weights.deferred():
        network = load_task(work.TOKENS).build(
            ModelSpec(source=shape.model), (), shards.manifest.settings, shards.assets
        )
    modules.unfused(network)  # as the worker does: GPT-2's matrices are no linear layers before
    cost = StepCost.of(network, frozen=shape.lora)
    assert cost is not None
    lengths = shards.lengths("train")
    return cost.per_token + cost.per_square * float((lengths**2).sum() / lengths.sum())


def _device_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "this CPU"


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--only", default="gpt-2,llama", help="beginnings of names")
    words.add_argument("--steps", type=int, default=20)
    words.add_argument("--pairs", type=int, default=3)
    words.add_argument("--tiny", action="store_true")
    words.add_argument("--out", type=Path, default=Path("bench.json"))
    given = words.parse_args()
    if given.pairs < 3:
        words.error("an interval takes three pairs")
    if not torch.cuda.is_available() and not given.tiny:
        raise SystemExit("no GPU here; --tiny tries the script on the CPU")
    for shape in SHAPES:
        if not shape.name.lower().startswith(tuple(given.only.lower().split(","))):
            continue
        if not given.tiny and torch.cuda.device_count() < shape.ranks:
            there = torch.cuda.device_count()
            print(f"{shape.name}: skipped, {there} GPUs of {shape.ranks} are here")
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = rows(
                shrunk(shape) if given.tiny else shape, Path(folder), given.steps, given.pairs
            )
        for row in found:
            print(contest.show(row) if isinstance(row, Row) else f"  {row}", flush=True)
        if not given.tiny:
            contest.write([row for row in found if isinstance(row, Row)], given.out)


if __name__ == "__main__":
    main()
