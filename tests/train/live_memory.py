"""What ranks that really train hold in memory: `live_memory.py CASES.json OUT`.

Forks the ranks of each case like differential.py. A rank trains two steps, counts the storages of the third (Live, which the trace
uses, too, but on real tensors), and lets torch's own allocator report the fourth, which nobody of ours counts. Rank r writes
OUT/<name>-<r>.json. Used by test_live_memory.py.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from rekindle.data.manifest import Shards
from rekindle.objectives.loss import Goal
from rekindle.records import ShardManifest
from rekindle.spec.layout import Layout
from rekindle.spec.model import CheckpointSpec, LoraSpec, ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import modules, parallel, teacher, weights
from rekindle.train.checkpoint import Checkpointer
from rekindle.train.loop import RunLength, StopFlag, Trainer
from rekindle.train.mesh import Mesh
from tests.plan.traced.fakes import Live, engine_without_values


def made_shards(task: str, rows: int, length: int, vocabulary: int) -> Shards:
    """Rows that fill a sequence each."""
    rng = np.random.default_rng(1)
    texts = rng.integers(1, vocabulary, (rows, length)).tolist()
    columns = {
        "id": pa.array([str(i) for i in range(rows)]),
        "hash": pa.array([bytes(16)] * rows, pa.binary(16)),
        "label": pa.array(np.arange(rows, dtype=np.int32) % 2),
        "input_ids": pa.array(texts, pa.list_(pa.int32())),
        "supervised": pa.array([[1] * length] * rows, pa.list_(pa.uint8())),
    }
    settings = {
        "pad_token_id": 0,
        "eos_token_id": 0,
        "vocab_size": vocabulary,
        "max_length": length,
        "packing": task == "causal_lm",
    }
    manifest = ShardManifest(
        task=task,
        source="random",
        labels=() if task == "causal_lm" else ("a", "b"),
        rows={"train": rows, "validation": 0},
        settings=settings,
    )
    table = pa.table(columns)
    return Shards.of_tables(Path(), manifest, {"train": table})


def trainer_of(case: dict, live: Live) -> Trainer:
    layout = Layout(**case["layout"])
    size = layout.micro_batch_size * case["accumulation"] * layout.data
    degrees = {axis: getattr(layout, axis) for axis in ("dp", "shard", "tp", "pp", "cp")}
    train = TrainSpec(
        steps=4,
        global_batch_size=size,
        micro_batch_size=layout.micro_batch_size,
        layout={**degrees, "schedule": layout.schedule},
        **case["train"],
    )
    task = load_task(case["task"])
    shards = made_shards(case["task"], 4 * size, case["sequence"], case["config"]["vocab_size"])
    with weights.deferred() as recorder:
        network = task.build(
            ModelSpec(source=case["config"]),
            shards.manifest.labels,
            shards.manifest.settings,
            Path(),
        )
    source = weights.WeightSource(network, recorder, 0)
    mesh = Mesh.of(layout, torch.device("cpu"))
    origins, lora = modules.unfused(network), None
    if case["lora"]:
        with weights.deferred(recorder):
            lora = modules.inject(network, LoraSpec(**case["lora"]), origins)
        source.include(network)
    goal = Goal()
    if case["teacher"]:
        with weights.deferred():
            taught = task.build(
                ModelSpec(source=case["teacher"]),
                shards.manifest.labels,
                shards.manifest.settings,
                Path(),
            )
        modules.unfused(taught)
        teacher.arrange(taught, train, mesh, divided=False)
        for parameter in taught.parameters():
            torch.nn.init.zeros_(parameter)
        goal = Goal(0.0, teacher.ready(taught, train, mesh), 2.0, 0.5)
    parts = parallel.build(task, network, origins, train, goal, mesh, lora)
    weights.fill([stage.part.network for stage in parts.stages], source, parts.origins)
    with live.counting():
        taught = [p for network in parts.stages[-1].part.teachers for p in network.parameters()]
        for parameter in [*(p for _, p in parts.parameters()), *taught]:
            live.note(getattr(parameter, "_local_tensor", parameter))
        parts = parallel.settle(parts)
        order = shards.order(
            "train",
            global_batch_size=size,
            seed=0,
            by_length=True,
            pack_length=case["sequence"] if case["task"] == "causal_lm" else None,
        )
        return Trainer(task, shards, train, RunLength.of(train, order), parts, 0)


def run(case: dict) -> dict:
    live, stop = Live(), StopFlag(60)
    with engine_without_values(live, None, fake=False):
        trainer = trainer_of(case, live)
        checkpointer = Checkpointer(tempfile.gettempdir(), CheckpointSpec(), "key")  # saves nothing
        for step in range(3):
            work = trainer.batches.make(step)
            with live.counting():
                live.phase = "backward"
                live.begin()
                trainer._read(trainer._launch(step, work, stop, checkpointer), checkpointer)
    static, peak = live.bytes, live.peak
    work = trainer.batches.make(3)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        trainer._read(trainer._launch(3, work, stop, checkpointer), checkpointer)
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return {"peak": peak, "static": static, "phases": live.peaks, "allocated": static + most}


def rank_of(case: dict, rank: int, out: Path) -> None:
    try:
        world = Layout(**case["layout"]).world
        meet = f"file://{out}/{case['name']}.meet"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
        (out / f"{case['name']}-{rank}.json").write_text(json.dumps(run(case)))
        dist.barrier()
    except Exception:  # noqa: BLE001 - the test shows whatever it was
        print(f"rank {rank} in {case['name']}\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    import peft  # noqa: F401 - for the ranks, which are forks
    from transformers.models.distilbert import modeling_distilbert  # noqa: F401
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from rekindle.train import pipeline  # noqa: F401

    made_shards("causal_lm", 1, 4, 8)
    for case in cases:
        assert len(list(Path("/proc/self/task").iterdir())) == 1
        pids = {}
        for rank in range(Layout(**case["layout"]).world):
            pid = os.fork()
            if not pid:
                rank_of(case, rank, out)
            pids[pid] = rank
        while pids:
            pid, status = os.wait()
            pids.pop(pid, None)
            if status:
                for other in pids:
                    os.kill(other, 9)


if __name__ == "__main__":
    main()
