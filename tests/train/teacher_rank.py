"""A rank of test_teacher.py: `torchrun teacher_rank.py FOLDER`. Compares a teacher that is divided among the ranks with one that
each holds whole, and leaves `<rank>.json`: by case, the largest difference, the bytes held, and the types."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

from rekindle.spec.layout import Layout
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import modules, teacher, weights
from rekindle.train.job import Job
from rekindle.train.mesh import Mesh
from tests.support.train_layouts import MODELS, NO_DROPOUT, TASKS
from tests.train.differential import made_shards

CASES = {"llama": "tokens", "gpt2": "tokens", "distilbert": "text"}


def job_of(task, precision):
    return Job.of(
        artifact_root="/none",
        run_key="key",
        task=task,
        shards="",
        output="",
        history="",
        init="",
        init_from="base",
        train=TrainSpec(precision=precision),
        model=ModelSpec(),
    )


def scores(network, kind):
    ids = torch.arange(24).reshape(2, 12) + 3
    more = {"attention_mask": torch.ones_like(ids)} if kind == "text" else {}
    with torch.no_grad():
        if kind == "text":
            return network(input_ids=ids, **more).logits
        # as the loss does: the backbone, then the head by itself
        states = modules.backbone(network)(input_ids=ids, use_cache=False).last_hidden_state
        return network.get_output_embeddings()(states)


def held(network):
    return sum(weights.local_of(p).nbytes for p in network.parameters())


def compared(folder, name, kind, precision):
    task, shards = load_task(TASKS[kind]), made_shards(TASKS[kind], packing=True)
    manifest = shards.manifest
    torch.manual_seed(3)
    source = {**MODELS[name], **(NO_DROPOUT["distilbert"] if kind == "text" else {})}
    made = task.build(ModelSpec(source=source), manifest.labels, manifest.settings, Path())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    place = folder / f"{name}-{precision}"
    if dist.get_rank() == 0:
        made.save_pretrained(place)
    dist.barrier()
    job, mesh = job_of(TASKS[kind], precision), Mesh(Layout(dp=2), torch.device("cpu"))
    found = []
    for limit in (1 << 30, 0):
        teacher.WHOLE_TEACHER_BYTES = limit
        network = teacher.load_teacher(place, job, task, shards, mesh)
        assert not network.training
        assert not any(p.requires_grad for p in network.parameters())
        # twice, because what was gathered has to be given back
        found += [(network, scores(network, kind), scores(network, kind))]
    (whole, theirs, _), (divided, ours, again) = found
    return {
        "gap": float((ours.float() - theirs.float()).abs().max()),
        "scale": float(theirs.float().abs().max()),
        "again": torch.equal(ours, again),
        "types": sorted({str(p.dtype) for p in divided.parameters()}),
        "whole": held(whole),
        "divided": held(divided),
        "roots": sum(
            isinstance(m, FSDPModule) and fully_shard.state(m)._is_root for m in divided.modules()
        ),
        "streams": len(
            {id(fully_shard.state(block)._comm_ctx) for _, block in modules.blocks(divided)}
        ),
        "blocks": sum(p.nbytes for _, block in modules.blocks(whole) for p in block.parameters()),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {
        f"{name} {precision}": compared(Path(sys.argv[1]), name, kind, precision)
        for name, kind in CASES.items()
        for precision in ("fp32", "bf16")
    }
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
