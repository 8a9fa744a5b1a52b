"""Trains tiny models in one layout after the other and stores what came out: `differential.py CASES.json OUT`.

Each case is a cell of rekindle/spec/layout_support.py on one model, and forks its ranks from this process, which has imported
everything: starting costs more than training here. Rank 0 stores gradients of the first step (whole, unclipped), weights after five SGD steps, losses and validation as OUT/<name>.pt.
Used by test_layouts.py.
"""

import dataclasses
import faulthandler
import functools
import importlib
import json
import os
import signal
import sys
import traceback
import types
from pathlib import Path

import numpy as np
import peft  # noqa: F401 - like others here for the ranks, which are forks
import pyarrow as pa
import torch
import torch.distributed as dist

from rekindle.data.manifest import Shards
from rekindle.objectives.loss import Goal
from rekindle.objectives.micro import Documents
from rekindle.objectives.tokens import loss as token_loss
from rekindle.records import ShardManifest, write_atomically
from rekindle.spec.layout import Shape, resolve
from rekindle.spec.layout_support import Cell
from rekindle.spec.model import LoraSpec, ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import (
    batches,
    compare,
    modelfolder,
    modules,
    parallel,
    part,
    weights,
)
from rekindle.train.export import export
from rekindle.train.job import Job
from rekindle.train.loop import RunLength, StopFlag, Trainer
from rekindle.train.mesh import Mesh
from rekindle.train.pipeline import Pipeline  # noqa: F401
from rekindle.train.proof import prove_forward, prove_packing

ROWS, VOCABULARY, LONGEST, PACK = 37, 61, 17, 24
STEPS = 5  # with SGD
ADAMW_STEPS = 3  # after them; the third loss shows what the second update made of both moments
GLOBAL = 8  # rows a step
AT_ONCE = 4  # ranks
LABELS = ("a", "b", "c")


def made_shards(task: str, packing: bool) -> Shards:
    """37 random rows, so that the last batch of an epoch is short, of lengths that divide by nothing."""
    rng = np.random.default_rng(1)
    columns = {
        "id": pa.array([str(i) for i in range(ROWS)]),
        "hash": pa.array([bytes(16)] * ROWS, pa.binary(16)),
        "label": pa.array(rng.integers(0, 3, ROWS), pa.int32()),
    }
    settings = {
        "pad_token_id": 0,
        "eos_token_id": 0,
        "vocab_size": VOCABULARY,
        "max_length": PACK,
        "packing": packing,
    }
    if task == "image_classification":
        columns["pixels"] = pa.array([rng.bytes(64) for _ in range(ROWS)], pa.binary())
        settings = {"image_shape": [8, 8, 1]}
    else:
        texts = [
            rng.integers(1, VOCABULARY, int(n)).tolist() for n in rng.integers(3, LONGEST, ROWS)
        ]
        columns["input_ids"] = pa.array(texts, pa.list_(pa.int32()))
        if (
            task == "token_classification"
        ):  # words of one to three tokens, some of them without a place
            places = [
                sorted(rng.choice(len(t), max(1, len(t) // 2), False).tolist()) for t in texts
            ]
            cut = [[p if rng.random() < 0.9 else -1 for p in row] for row in places]
            tags = [rng.integers(0, 3, len(row)).tolist() for row in cut]
            columns["places"] = pa.array(cut, pa.list_(pa.int32()))
            columns["label"] = pa.array(tags, pa.list_(pa.int32()))
        if task == "text_regression":
            columns["label"] = pa.array(rng.normal(1e6, 500.0, ROWS))
            settings |= {"target_mean": 1e6, "target_std": 500.0}
        if task == "causal_lm":
            marks = [(rng.random(len(text)) < 0.7).astype(np.uint8).tolist() for text in texts]
            columns["supervised"] = pa.array(marks, pa.list_(pa.uint8()))
    labels = () if task in ("causal_lm", "text_regression") else LABELS
    manifest = ShardManifest(
        task=task,
        source="random",
        labels=labels,
        rows={"train": ROWS, "validation": ROWS},
        settings=settings,
    )
    table = pa.table(columns)
    return Shards.of_tables(Path(), manifest, {"train": table, "validation": table})


def trainer_of(case: dict) -> Trainer:
    cell = case["cell"]
    degrees = case.get("degrees") or dict.fromkeys(cell["axes"], 2)
    if cell["schedule"]:
        degrees["schedule"] = cell["schedule"]
    precision = "fp64" if case["exact"] else cell["precision"]
    train = TrainSpec(
        steps=STEPS,
        global_batch_size=GLOBAL,
        micro_batch_size=case["micro"],
        lr=1e-2,
        warmup=0,
        lr_schedule="constant",
        clip_norm=None,
        precision=precision,
        layout=degrees or "auto",
        compile=cell["compile"],
        activation_checkpointing=cell["checkpointing"],
        max_bad_steps=100,
        optimizer=case.get("optimizer", "adamw"),
    )
    task, shards = load_task(case["task"]), made_shards(case["task"], case["packing"])
    with weights.deferred() as recorder:
        network = task.build(
            ModelSpec(source=case["model"]),
            shards.manifest.labels,
            shards.manifest.settings,
            Path(),
        )
    source = weights.WeightSource(network, recorder, 0)
    shape = Shape.of(case["model"]) if "model_type" in case["model"] else None
    mesh = Mesh.of(resolve(train, dist.get_world_size(), shape), torch.device("cpu"))
    origins = modules.unfused(network)
    lora = None
    if cell["lora"]:
        with weights.deferred(recorder):
            lora = modules.inject(network, LoraSpec(rank=3), origins)
        source.include(network)
    if case["exact"]:
        weights.transform(network, lambda t: t.double() if t.is_floating_point() else t)
    goal = Goal(case.get("smoothing", 0.0))
    parts = parallel.build(task, network, origins, train, goal, mesh, lora)
    weights.fill([stage.part.network for stage in parts.stages], source, parts.origins)
    parts = parallel.settle(parts)
    order = shards.order(
        "train",
        global_batch_size=GLOBAL,
        seed=0,
        by_length="input_ids" in shards.table("train").column_names,
        pack_length=PACK if case["packing"] else None,
    )
    return Trainer(task, shards, train, RunLength.of(train, order), parts, 0)


def whole(trainer: Trainer, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of all stages under the names they are saved as, whole."""
    tied = trainer.parts.tied
    mine = {tied.get(name, name): weights.whole_of(value).clone() for name, value in values.items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: value for one in everyone for name, value in one.items()}


def proven(trainer: Trainer) -> dict[str, object]:
    """What a training proves before its first step."""
    batches, layout = trainer.batches, trainer.mesh.layout
    given = batches.task, batches.shards, trainer.parts, trainer.spec, trainer.evaluation
    packing = prove_packing(*given)
    cuts = layout.tp * layout.pp * layout.cp > 1  # there a small network is asked, by the worker
    forward = "" if cuts else prove_forward(*given, small=lambda: None)
    return {"packs": packing.packs, "packing": packing.finding, "forward": forward}


def run(case: dict) -> dict:
    from rekindle.train.optimizer import _like

    torch.manual_seed(0)
    trainer = trainer_of(case)
    optimizer = trainer.optimizer
    found: dict = {"losses": [], "norms": [], "proof": proven(trainer)}
    for step in range(STEPS):
        loss = trainer._backward(trainer.batches.make(step))[0] / trainer.mesh.layout.tp
        shared = trainer.add_over_ranks(torch.stack([loss, optimizer.collect()]))
        scale = optimizer.loss_scale
        found["losses"].append(float(shared[0]) / scale)
        found["norms"].append(float(shared[1]) ** 0.5 / scale)
        if step == 0:
            found["gradients"] = whole(
                trainer,
                {h.name: _like(h.parameter, h.local.grad / scale) for h in optimizer.trained},
            )
        for held in optimizer.trained:
            held.local.sub_(held.local.grad, alpha=0.1 / scale)
        optimizer.clear()
    found["weights"] = whole(trainer, {h.name: h.parameter.detach() for h in optimizer.trained})
    found["validation"] = trainer.validate()[0]
    stop, nothing_saved = StopFlag(60), types.SimpleNamespace(pending=None, written=lambda: True)
    found["adamw"] = [
        trainer._launch(step, trainer.batches.make(step), stop, nothing_saved).numbers.read()[0]
        for step in range(ADAMW_STEPS)
    ]
    if case["export"]:
        export(trainer.parts, Path(case["export"]), file_bytes=8_000)
        if dist.get_rank() == 0:
            modelfolder.configure(trainer.parts.network, Path(case["export"]))
    return found


def checked(case: dict) -> dict:
    """What the check of a layout that no test has trained as a whole finds: a small network of the same architecture."""
    cell = Cell(**{**case["cell"], "axes": tuple(case["cell"]["axes"])})
    layout = dict.fromkeys(cell.axes, 2) | ({"schedule": cell.schedule} if cell.schedule else {})
    train = TrainSpec(
        precision=cell.precision,
        layout=layout or "auto",
        compile=cell.compile,
        activation_checkpointing=cell.checkpointing,
        global_batch_size=GLOBAL,
        micro_batch_size=2,
    )
    task, shards = load_task(case["task"]), made_shards(case["task"], case["packing"])
    model = ModelSpec(
        source=case["model"], lora=LoraSpec(rank=3, dropout=0.1) if cell.lora else None
    )
    job = Job.of(
        artifact_root="/tmp",
        run_key="key",
        task=case["task"],
        shards="",
        output="",
        history="",
        init="",
        init_from="base",
        train=train,
        model=model,
    )
    with weights.deferred():
        network = task.build(model, shards.manifest.labels, shards.manifest.settings, Path())
    shape = Shape.of(case["model"]) if "model_type" in case["model"] else None
    mesh = Mesh.of(resolve(train, dist.get_world_size(), shape), torch.device("cpu"))
    gaps = compare.compare_with_one_rank(cell, job, task, shards, network, mesh)
    return {gap.precision: (gap.losses, gap.largest) for gap in gaps}


def sabotage(fault: str) -> None:
    """Faults that the comparison has to notice."""
    if fault == "local mean":
        make = batches.Batches.make
        batches.Batches.make = lambda self, step: _with_local_count(self, make(self, step))
    elif fault == "average instead of sum":
        parallel._sum = lambda state, bucket: _averaged(bucket)
    elif fault in ("half a gradient", "99% of a gradient"):
        divide, wrong = (
            parallel.FSDPModule.set_gradient_divide_factor,
            2 if "half" in fault else 1.01,
        )
        parallel.FSDPModule.set_gradient_divide_factor = lambda module, factor: divide(
            module, wrong * factor
        )
    elif fault == "untied head":
        modules.tied = lambda network: {}
    elif fault == "unshared norm gradients":
        parallel.tensor.shared_by_share = lambda network, tokens: frozenset()
    elif fault == "one document":
        made = Documents.of
        token_loss.Documents = types.SimpleNamespace(
            of=lambda numbers, *place: made(np.ones_like(numbers), *place)
        )
    elif fault == "one dropout seed":
        part._mixed = lambda key, place: int(torch.randint(2**31, (1,))) + dist.get_rank()


def _with_local_count(self, work):
    targets = self.shards.targets(self.split, np.array(work.rows, np.int64))
    local = int(targets.sum()) * self.mesh.layout.data
    count = torch.tensor([float(max(1, local))])
    return dataclasses.replace(
        work, micro=tuple(dataclasses.replace(m, count=count) for m in work.micro)
    )


def _averaged(bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


def rank_of(case: dict, rank: int, out: Path) -> None:
    """One rank of a case, in a process of its own; does not return."""
    faulthandler.enable()  # a crash in C++ says where
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{out}/{case['name']}.meet",
            rank=rank,
            world_size=case["world"],
        )
        sabotage(case["fault"])
        torch.compile = functools.partial(torch.compile, backend=case["backend"])
        found = checked(case) if case["check"] else run(case)
        if rank == 0:
            torch.save(found, out / f"{case['name']}.pt")
        dist.barrier()
    except Exception:  # noqa: BLE001 - the test shows whatever it was
        text = f"rank {rank} in {case['name']}\n{traceback.format_exc()}"
        print(text, flush=True)
        # by whichever ranks come to it, each of which may be killed by another's end
        write_atomically(out / f"{case['name']}.txt", text)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def start(case: dict, out: Path) -> set[int]:
    """The ranks of a case, forked: they need not import anything. Only what has one thread can be
    forked safely, so whoever starts this keeps Arrow's allocator from starting a thread."""
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    pids = set()
    for rank in range(case["world"]):
        pid = os.fork()
        if not pid:
            rank_of(case, rank, out)
        pids.add(pid)
    return pids


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for kind in {case["model"]["model_type"] for case in cases if "model_type" in case["model"]}:
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    for task in {case["task"] for case in cases}:
        made_shards(task, True)  # pyarrow imports pandas
    if any(case["cell"]["compile"] for case in cases):
        importlib.import_module("torch._inductor.compile_fx")
    again: set[str] = set()  # names of cases that were started a second time
    # ranks, each with those of its case, and the case
    running: dict[int, tuple[set[int], dict]] = {}
    while cases or running:
        # as many ranks at once as two cores like, or one large case
        while cases and (not running or len(running) + cases[0]["world"] <= AT_ONCE):
            case = cases.pop(0)
            pids = start(case, out)
            running |= dict.fromkeys(pids, (pids, case))
        pid, status = os.wait()
        peers, case = running.pop(pid)
        peers.discard(pid)
        crashed = os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL
        if crashed and case["name"] not in again:
            # seen twice in some 4,000 cases: glibc finds gloo's heap damaged, and not the next time
            print(f"{case['name']}: signal {os.WTERMSIG(status)}; it is started again", flush=True)
            (out / f"{case['name']}.meet").unlink(missing_ok=True)
            again.add(case["name"])
            cases.append(case)
        if status:  # the others may wait for ever for one that is gone
            for peer in peers:
                os.kill(peer, signal.SIGKILL)


if __name__ == "__main__":
    main()
