"""One of two ranks that score every case in its layout: `torchrun two_ranks.py CASES.json OUT`. Rank 0 leaves
`OUT/<case>.npy`, and `OUT/<case>.json` with what a language model writes and where its weights lay."""

import json
import sys
import weakref
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rekindle.data.examples import open_examples
from rekindle.spec.model import TrainSpec
from rekindle.train import score_rank
from rekindle.train.modelfolder import open_model
from rekindle.train.pieces import read_piece
from rekindle.train.score import settings_of
from rekindle.train.score_rank import LoadedModel, TokenWriter, encode, free

SMALL = {"MOST_TOKENS_AT_ONCE": 400, "MOST_ROWS_AT_ONCE": 16}  # several micro-batches
CPU = torch.device("cpu")
PROMPT = [[("user", "Question 3: how large is «3»?")], [("user", "And 4?")]]


def case(model, examples, layout, train):
    """What the ranks make of the first piece of the test split."""
    opened = open_model(Path(model))
    spec = TrainSpec.model_validate({"layout": layout, "global_batch_size": 8, **train})
    loaded = LoadedModel.of(opened, settings_of(spec, "", gpu=False), CPU)
    turns = []
    rows = read_piece(open_examples(Path(examples), "test"), 0)
    sums = loaded.score(encode(opened, rows), lambda done: turns.append(done) or False)
    texts = []
    if opened.task.objective == "tokens":
        writer = TokenWriter(loaded, lambda: None)
        texts = opened.task.generate(writer, PROMPT, opened.settings, opened.path, 5)
    parameters = [p for _, p in loaded.parts.parameters()]
    held = sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel() for p in dict.fromkeys(parameters)
    )
    facts = {"texts": texts, "held": held, "layout": str(loaded.mesh.layout), "turns": len(turns)}
    kept = [weakref.ref(parameter) for parameter in parameters]
    writer = loaded = parameters = None
    free(CPU)
    return sums.numpy(), {**facts, "left": sum(ref() is not None for ref in kept)}


def main():
    for limit, value in SMALL.items():
        setattr(score_rank, limit, value)
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_process_group("gloo")
    for name, words in cases.items():
        sums, facts = case(**words)
        if dist.get_rank() == 0:
            np.save(out / f"{name}.npy", sums)
            (out / f"{name}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
