"""Tokens a second, MFU and peak memory on a GPU, against transformers.Trainer in the same run.

    python tests/bench/bench_gpu.py [--only gpt2-1.3b,llama-8b] [--steps 20] [--tiny]

Random weights in the shapes of GPT-2 1.3B (fp32 master weights, bf16 arithmetic) and Llama-3-8B
(bf16 weights and moments in both), full fine-tuning and LoRA, on packs of documents that are kept
apart in both. Contestants take turns; tokens are supervised ones, the first `WARM` steps do not
count; MFU by our formula for both (train/throughput.py). Who runs out of memory has that as a
result. `--tiny` shrinks the shapes, to try the script where there is no GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
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

from rekindle.catalog.gpus import peak_flops
from rekindle.spec.model import ModelSpec
from rekindle.tasks import load_task
from rekindle.train import weights
from rekindle.train.history import read_history
from rekindle.train.throughput import Cost

WARM = 5
GOAL = 1.3
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_positions": 2048,
    "vocab_size": 50257, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 5000},
    "llama": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 5000},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and how it is trained. `recompute`: activation checkpointing, in both contestants;
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


SHAPES = (
    Shape("GPT-2 1.3B, full", GPT2, 2048, 16, 8, "fp32", "none", False, 0.40),
    Shape("GPT-2 1.3B, LoRA", GPT2, 2048, 16, 8, "fp32", "none", True, 0.0),
    Shape("Llama-3-8B, full", LLAMA, 4096, 4, 1, "bf16", "full", False, 0.45),
    Shape("Llama-3-8B, LoRA", LLAMA, 4096, 4, 1, "bf16", "none", True, 12_500),
)


def shrunk(shape: Shape) -> Shape:
    model = shape.model | TINY[shape.model["model_type"]]
    return dataclasses.replace(shape, model=model, length=128, batch=4, micro=2)


def rows(shape: Shape, folder: Path, steps: int, count: int) -> list[Row | str]:
    """The row of a shape; or, where a contestant runs out of memory, what each of them did."""
    given = _prepared(shape, folder)
    contestants = {
        "ours": lambda number: _ours(given, shape, folder / "ours", steps, number),
        "trainer": lambda number: _trainer(given, shape, folder / "trainer", steps, number),
    }
    found = contest.pairs(contestants, count)
    if any("failed" in one for side in found.values() for one in side):
        return [f"{shape.name}: {name}: {side[0]}" for name, side in found.items()]
    rates = {name: [one["tokens_per_second"] for one in side] for name, side in found.items()}
    peak = peak_flops(_device_name(), "bf16")
    cost = _cost(given, shape)
    notes = []
    for name, side in found.items():
        rate = statistics.mean(rates[name])
        mfu = f"{rate * cost / peak:.1%} MFU" if peak else "peak unknown"
        memory = max(one["memory_bytes"] for one in side) / 2**30
        notes.append(f"{name} {rate:,.0f} tokens/s, {mfu}, {memory:.1f} GiB")
    aim = f"{shape.target:.0%} MFU" if shape.target < 1 else f"{shape.target:,.0f} tokens/s"
    row = compared(
        f"GPU: {shape.name}, {shape.length} tokens", "Trainer", rates["ours"], rates["trainer"],
        GOAL, at_least=True, unit="tokens/s",
        gain="; ".join([*notes, *([f"aim {aim}"] if shape.target else [])]),
    )  # fmt: skip
    return [row, row.gain]


def _prepared(shape: Shape, folder: Path) -> Work:
    """Packs of documents that fill sequences of `length` tokens."""
    base = work.documents(folder / "work", count=2000, longest=shape.length)
    train = base.train.model_copy(
        update={
            "global_batch_size": shape.batch, "micro_batch_size": shape.micro, "lr": 1e-5,
            "precision": "bf16", "weights": shape.weights, "compile": True,
            "activation_checkpointing": shape.recompute,
        }
    )  # fmt: skip
    return dataclasses.replace(base, train=train, model=shape.model)


def _spec(shape: Shape) -> ModelSpec:
    lora = {"rank": 16} if shape.lora else None
    return ModelSpec.model_validate({"source": shape.model, "lora": lora})


def _ours(given: Work, shape: Shape, folder: Path, steps: int, number: int) -> dict[str, Any]:
    output = contest.fresh(folder)
    job = given.job(number, output, steps=steps + 10, epochs=None)
    job = dataclasses.replace(job, model=_spec(shape))
    job.write(output / "job.json")
    words = contest.python("-m", "rekindle.train.worker", str(output / "job.json"))
    log = output / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT,
            env=contest.environment(**contest.alone()),
        )  # fmt: skip
        # ended before its last step, which would write 16 bytes a parameter to the disk
        while process.poll() is None and _steps(job.curve) < steps:
            time.sleep(0.1)
        process.kill()
        process.wait()
    done = list(read_history(job.curve))[:steps]
    if len(done) < steps:
        return _failed(log.read_text())
    seconds = sum(row.step_seconds or 0.0 for row in done[WARM:])
    tokens = work.packed_targets(given, number, steps)[WARM:]
    return {"tokens_per_second": sum(tokens) / seconds,
            "memory_bytes": max(row.memory_bytes or 0 for row in done)}  # fmt: skip


def _steps(curve: Path) -> int:
    return sum(1 for _ in read_history(curve)) if curve.exists() else 0


def _trainer(given: Work, shape: Shape, folder: Path, steps: int, number: int) -> dict[str, Any]:
    output = contest.fresh(folder)
    wish = {
        "loop": "on_gpu", "shards": str(given.shards), "output": str(output), "seed": number,
        "packed": True, "tokens": True, "lr": 1e-5, "batch_size": shape.batch,
        "micro": shape.micro, "steps": steps, "model": shape.model, "lora": shape.lora,
        "weights": shape.weights, "recompute": shape.recompute != "none", "warm": WARM,
        "pad_token_id": given.opened().manifest.settings["pad_token_id"],
    }  # fmt: skip
    (output / "wish.json").write_text(json.dumps(wish))
    peers = str(Path(__file__).with_name("peers.py"))
    try:
        text = contest.finished(contest.python(peers, str(output / "wish.json")), output / "log")
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
    cost = Cost.of(network, frozen=shape.lora)
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
