"""What the proof before the first step costs: seconds and bytes beyond the weights.

    python -m tests.bench.proof_cost [--shapes 124m,1.3b,8b] [--length 2048]

A shape whose weights fit this machine's memory is run with values, on one thread; 8b is traced:
tensors with sizes and without values, which tells bytes and no seconds. Bytes are those of all
living tensors at the worst moment, less weights; what the runtime itself holds is not seen."""

import argparse
import contextlib
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from rekindle.data.manifest import Shards
from rekindle.objectives import loss_of
from rekindle.objectives.loss import Goal
from rekindle.records import ShardManifest
from rekindle.spec.layout import Layout
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import modules, parallel, proof, weights
from rekindle.train.evaluation import Evaluation
from rekindle.train.mesh import Mesh
from rekindle.train.parts import Parts, autocast
from tests.plan.traced import fakes

TASK = load_task("causal_lm")
SHAPES: dict[str, dict[str, Any]] = {
    "124m": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12},
    "1.3b": {"model_type": "gpt2", "n_embd": 2048, "n_layer": 24, "n_head": 16},
    "8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
}
TRACED = ("8b",)
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Costs:
    """`seconds` is None for a trace; `step_seconds` is one text of `tokens` forward and back."""

    shape: str
    weights_mib: float
    seconds: float | None
    beyond_weights_mib: float
    step_seconds: float | None
    tokens: int


def made_shards(vocabulary: int, length: int) -> Shards:
    """A few random texts of that length."""
    random = np.random.default_rng(0)
    texts = random.integers(3, vocabulary, (16, length)).tolist()
    table = pa.table(
        {
            "id": pa.array([str(row) for row in range(len(texts))]),
            "hash": pa.array([bytes(16)] * len(texts), pa.binary(16)),
            "input_ids": pa.array(texts, pa.list_(pa.int32())),
            "supervised": pa.array([[1] * length] * len(texts), pa.list_(pa.uint8())),
        }
    )
    settings = {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": vocabulary,
        "max_length": length,
        "packing": True,
        "form": "text",
    }
    manifest = ShardManifest(
        task="causal_lm", source="random", labels=(), rows={"train": len(texts)}, settings=settings
    )
    return Shards.of_tables(Path(), manifest, {"train": table})


def parts_of(source: dict[str, Any], shards: Shards, train: TrainSpec, fake: bool) -> Parts:
    """One rank's, with random weights or none."""
    real = unset_fake_temporarily if fake else contextlib.nullcontext
    with real(), weights.deferred() as recorder:
        network = TASK.build(ModelSpec(source=source), (), shards.manifest.settings, Path())
    start = weights.WeightSource(network, recorder, 0)
    with real():
        mesh = Mesh.of(Layout(), torch.device("cpu"))
        origins = modules.unfused(network)
        parallel.prepare_network(network, start, origins, train)
    parts = parallel.build(TASK, network, origins, train, Goal(), mesh)
    if not fake:
        weights.fill([parts.network], start, parts.origins)
    return parallel.settle(parts)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """What asks for a value is told that all is well: only sizes are known."""
    with (
        fakes.replaced(proof, "_same_bits", lambda *_: True),
        fakes.replaced(proof, "_agreed", lambda *_: True),
        fakes.replaced(proof, "_agreed_reason", lambda *_: ""),
        fakes.replaced(proof, "_relative_gap", lambda *_: 0.0),
        fakes.replaced(proof._ForwardProbe, "_loss", _loss_without_value),
        fakes.replaced(proof.Batches, "arranged", _with_values),
    ):
        yield


def _with_values(arranged: Any, *given: Any) -> Any:
    with unset_fake_temporarily():
        return arranged(*given)


def _loss_without_value(_: Any, probe: proof._ForwardProbe, joined: bool) -> float:
    probe.evaluation.losses([probe._micro(probe.shards, joined)])
    return 1.0


def proven(parts: Parts, shards: Shards, train: TrainSpec) -> None:
    evaluation = Evaluation(parts, train.precision)
    proof.prove_packing(TASK, shards, parts, train, evaluation)
    said = proof.prove_forward(TASK, shards, parts, train, evaluation, lambda: (_ for _ in ()))
    print(f"  {said}", flush=True)


def cost(name: str, length: int) -> Costs:
    source, fake = SHAPES[name], name in TRACED
    if source["model_type"] == "gpt2":
        source = {**source, "n_positions": length, "vocab_size": 50257}
    halves = {"precision": "bf16", "weights": "bf16"} if fake else {"precision": "fp32"}
    train = TrainSpec(steps=1, global_batch_size=1, **halves)
    shards = made_shards(source["vocab_size"], length)
    live = fakes.Live()
    with contextlib.ExitStack() as stack:
        if fake:
            stack.enter_context(fakes.engine_without_values(live, lambda _: None, fake=True))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(without_values())
        parts = parts_of(source, shards, train, fake)
        held = sum(p.numel() * p.element_size() for _, p in parts.parameters())
        seconds = step_seconds = None
        if not fake:
            began = time.perf_counter()
            proven(parts, shards, train)
            seconds = time.perf_counter() - began
            step_seconds = seconds_of_a_step(parts, shards, train)
        with live.counting():
            for _, parameter in parts.parameters():
                live.note(parameter)
                if parameter.grad is not None:
                    live.note(parameter.grad)
            before = live.bytes
            live.begin()
            proven(parts, shards, train)
    return Costs(name, held / MIB, seconds, (live.peak - before) / MIB, step_seconds, length)


def seconds_of_a_step(parts: Parts, shards: Shards, train: TrainSpec) -> float:
    """One text forward and back, without the optimizer's part."""
    evaluation = Evaluation(parts, train.precision)
    probe = proof._ForwardProbe(TASK, shards, parts, train, evaluation)
    order = shards.order("train", global_batch_size=1, seed=0)
    batches = proof.Batches(loss_of(TASK.objective), TASK, shards, "train", order, parts.mesh, 0)
    (micro,) = probe.evaluation.feed([batches.arranged(np.arange(1), np.arange(1))])
    began = time.perf_counter()
    with autocast(train.precision, parts.mesh.device):
        parts.stages[0].part(micro=micro)[0, 0].backward()
    return time.perf_counter() - began


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--shapes", default=",".join(SHAPES))
    words.add_argument("--length", type=int, default=2048)
    words.add_argument("--out", type=Path)
    given = words.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in given.shapes.split(","):
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            if name in TRACED:
                dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
            else:
                meet = f"file://{folder}/meet"
                dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
            try:
                rows.append(cost(name, given.length))
            finally:
                dist.destroy_process_group()
    print("| shape | weights | proof | beyond weights | one text, forward and back |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        took = "traced" if row.seconds is None else f"{row.seconds:.1f} s"
        step = (
            "" if row.step_seconds is None else f"{row.step_seconds:.1f} s of {row.tokens} tokens"
        )
        print(
            f"| {row.shape} | {math.ceil(row.weights_mib):,} MiB | {took} | "
            f"{math.ceil(row.beyond_weights_mib):,} MiB | {step} |"
        )
    if given.out:
        given.out.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
