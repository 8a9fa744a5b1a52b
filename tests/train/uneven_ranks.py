"""Ranks that answer one case after the other: `uneven_ranks.py FOLDER WORLD`, started by test_uneven.py.

This process imports everything and forks the ranks: starting costs more than all cases. Each line of stdin is a case, which all
ranks get; rank 0 answers it with a line on stdout: the largest error of any rank, beside one process.
"""

import datetime
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from rekindle.objectives import tokens as tensors
from rekindle.objectives.tokens import loss as tokens
from rekindle.train.optimizer import _like
from tests.train import differential

HIDDEN = 6
importlib.import_module("transformers.models.llama.modeling_llama")


def main() -> None:
    folder, world = sys.argv[1], int(sys.argv[2])
    differential.made_shards("causal_lm", True)  # pyarrow imports pandas
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "only one thread can be forked"
    pipes = [os.pipe() for _ in range(world)]
    for rank, (cases, _) in enumerate(pipes):
        if not os.fork():
            for _, sent in pipes:
                os.close(sent)  # else no rank would see the end of its cases
            answer(os.fdopen(cases), folder, rank, world)
    senders = [os.fdopen(sent, "w") for _, sent in pipes]
    for line in sys.stdin:
        for sender in senders:
            sender.write(line)
            sender.flush()


def answer(cases: TextIO, folder: str, rank: int, world: int) -> None:
    """Be a rank until there are no more cases; does not return."""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=60),
        )
        # the first ranks of all, for each degree of tensor parallelism
        meshes = {size: DeviceMesh("cpu", list(range(size))) for size in range(1, world + 1)}
        for line in cases:
            error = torch.tensor(error_of(json.loads(line), rank, meshes), dtype=torch.float64)
            dist.all_reduce(error, dist.ReduceOp.MAX)
            if rank == 0:
                print(json.dumps(float(error)), flush=True)
    except Exception:  # noqa: BLE001 - the test shows whatever it was
        print(f"rank {rank}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def error_of(case: dict, rank: int, meshes: dict[int, DeviceMesh]) -> float:
    tensors.LOGITS_BYTES["cpu"] = case["bytes"]
    if case["what"] == "step":
        return error_of_step(case)
    return error_of_loss(case, meshes[case["tp"]]) if rank < case["tp"] else 0.0


def error_of_loss(case: dict, mesh: DeviceMesh) -> float:
    """Of the loss, its gradients and the scores of targets, with the rows of a head divided."""
    torch.manual_seed(case["seed"])
    head_VH = torch.randn(case["vocabulary"], HIDDEN, dtype=torch.float64)
    states_NH = torch.randn(case["targets"], HIDDEN, dtype=torch.float64)
    labels_N = torch.randint(0, case["vocabulary"], (case["targets"],))
    group, scale = mesh.get_group(), torch.tensor(0.25)

    whole_VH, expected_NH = head_VH.clone().requires_grad_(), states_NH.clone().requires_grad_()
    logits_NV = expected_NH @ whole_VH.T
    given = {"label_smoothing": case["smoothing"], "reduction": "sum"}
    expected = F.cross_entropy(logits_NV, labels_N, **given) * scale
    expected.backward()

    divided = torch.nn.Parameter(distribute_tensor(head_VH, mesh, [Shard(0)]))
    found_NH = states_NH.clone().requires_grad_()
    loss, right = tokens.linear_cross_entropy(
        found_NH, divided, labels_N, scale, group, smoothing=case["smoothing"]
    )
    loss.backward()
    assert isinstance(divided.grad, DTensor)
    scores_N2 = tokens.judge_targets(states_NH, divided.detach(), labels_N, group)
    nats_N = F.cross_entropy(logits_NV, labels_N, reduction="none")
    pairs = [
        (loss, expected),
        (right, (logits_NV.argmax(-1) == labels_N).sum()),
        (found_NH.grad, expected_NH.grad),
        (divided.grad.full_tensor(), whole_VH.grad),
        (scores_N2[:, 0], nats_N),
        (scores_N2[:, 1], logits_NV.argmax(-1)),
    ]
    return max(gap(found.detach(), wanted.detach()) for found, wanted in pairs)


def error_of_step(case: dict) -> float:
    """Of a step's loss and gradients, beside transformers' own forward of one document at a time."""
    differential.VOCABULARY, differential.LONGEST = case["vocabulary"], case["longest"]
    torch.manual_seed(0)
    trainer = differential.trainer_of(case)
    work = trainer.batches.make(0)
    loss = trainer._backward(work)[0] / trainer.mesh.layout.tp
    shared = trainer.add_over_ranks(torch.stack([loss, trainer.optimizer.collect()]))
    held = trainer.optimizer.trained
    gradients = differential.whole(
        trainer, {h.name: _like(h.parameter, h.local.grad) for h in held}
    )
    weights = differential.whole(trainer, {h.name: h.parameter.detach() for h in held})

    settings = {**case["model"], "vocab_size": case["vocabulary"]}
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).double()
    network.load_state_dict(weights, strict=False)
    expected, count = torch.zeros((), dtype=torch.float64), 0
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [int(row) for row in work.rows])
    rows = sorted({row for mine in everyone for row in mine})
    texts = trainer.batches.shards.table("train").take(rows).to_pylist()
    for text in texts:
        ids = torch.tensor([text["input_ids"]])
        marks = torch.tensor(text["supervised"][1:], dtype=torch.bool)
        logits = network(input_ids=ids, use_cache=False).logits[0, :-1][marks]
        labels = ids[0, 1:][marks]
        expected = expected + F.cross_entropy(
            logits, labels, label_smoothing=case["smoothing"], reduction="sum"
        )
        count += len(labels)
    expected = expected / count
    expected.backward()
    wanted = {name: p.grad for name, p in network.named_parameters()}
    errors = [gap(gradients[name], wanted[name]) for name in gradients]
    return max(gap(shared[0], expected.detach()), *errors)


def gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2, absolute where next to nothing is wanted; infinite for what is not a number."""
    error = (found.double() - wanted.double()).norm() / max(1e-3, float(wanted.double().norm()))
    return float(error) if torch.isfinite(error) else float("inf")


if __name__ == "__main__":
    main()
