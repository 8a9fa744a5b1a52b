"""Engines: whose arithmetic trains the network, one file each, by the name in `train.engine`.

`rekindle` is the loop's own (train/optimizer.py). A new engine is a file here with a class that is
an `Engine`, and a row of this table."""

from __future__ import annotations

from rekindle.engines.base import Engine
from rekindle.engines.deepspeed import DeepSpeed
from rekindle.engines.trainer import Trainer

ENGINES: dict[str, Engine] = {"deepspeed": DeepSpeed(), "trainer": Trainer()}

_SCRIPT = "start it from a script of yours: train.entrypoint"
_SMDDP = (
    "its last release (2.5, October 2024) is for torch 2.4, which rekindle does not run on: use "
    "rekindle's own engine, whose NCCL uses EFA; an image that has it can start it from a script "
    "(train.entrypoint)"
)
# what people ask for by name and what to use in its place
ELSEWHERE = {
    "ddp": "leave it out: rekindle's own engine replicates the model (train.layout: {dp: N})",
    "fsdp": "leave it out: rekindle's own engine shards with FSDP2 (train.layout: {shard: N})",
    "smdistributed": _SMDDP, "smddp": _SMDDP, "smdataparallel": _SMDDP,
    "accelerate": _SCRIPT, "horovod": _SCRIPT, "keras": _SCRIPT, "lightning": _SCRIPT,
    "megatron": _SCRIPT, "ray": _SCRIPT, "tensorflow": _SCRIPT,
}  # fmt: skip


def engine_of(name: str) -> Engine | None:
    """The engine of that name; None for rekindle's own arithmetic."""
    return ENGINES.get(name)
