"""The network that a student learns from: frozen, in the precision of the forward pass, and divided
among the ranks where it is large.

In fp32 an 8B teacher took 32 GB of every GPU. In half precision it takes 16, and its blocks, all
but the embeddings and the head of it, are sharded with FSDP2 over all ranks: a student with a
teacher is never divided by tp, pp or cp, so that all ranks run the whole teacher. The root is the
backbone, because the loss calls backbone and head apart."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rekindle.data.manifest import Shards
from rekindle.spec.model import ModelSpec
from rekindle.tasks import TASKS, Task
from rekindle.train import attention, families, modelfolder, weights
from rekindle.train.job import Job
from rekindle.train.mesh import Mesh
from rekindle.train.parallel import DTYPES

# A smaller one is held whole: gathering it in every micro-batch costs more than it saves.
WHOLE_BYTES = 1 << 30


def load_teacher(folder: Path, job: Job, task: Task, shards: Shards, mesh: Mesh) -> nn.Module:
    """The network in `folder`, ready for the loss of a student on `mesh`."""
    half = DTYPES[job.train.precision] if job.train.precision in ("bf16", "fp16") else None
    width = 2 if half is not None else 4
    large = modelfolder.count_parameters(folder) * width > WHOLE_BYTES
    if large and mesh.layout.world > 1 and job.task in TASKS and (folder / "config.json").exists():
        network = _sharded(folder, task, shards, mesh, half)
    else:
        network = task.load(folder)
        if half is not None:
            weights.convert(network, half)
        network = network.to(mesh.device)
    if families.family_of(network) is not None:
        kernel = attention.kernel_for(network, mesh.device, half or torch.float32)
        groups = attention.takes_groups(mesh.device)
        attention.install(network, attention.Peers(kernel=kernel, groups=groups))
    return network.eval().requires_grad_(False)


def _sharded(
    folder: Path, task: Task, shards: Shards, mesh: Mesh, half: torch.dtype | None
) -> nn.Module:
    """Built without values, divided, and then filled: no rank ever holds the whole, not even on its
    host."""
    manifest = shards.manifest
    with weights.deferred() as recorder:
        spec = ModelSpec(source=str(folder))
        network = task.build(spec, manifest.labels, manifest.settings, shards.assets)
    source = weights.Source(network, recorder, 0, folder)
    origins = families.unfused(network)
    if half is not None:
        weights.convert(network, half)
    divide(network, mesh.device)
    weights.transform(network, lambda value: _placed(value, mesh.device))
    weights.fill([network], source, origins)
    return network


def divide(network: nn.Module, device: torch.device) -> None:
    """Shard the blocks over all ranks. Under one root, so that the weights of a block are gathered
    while the one before it computes."""
    shard = functools.partial(
        fully_shard, mesh=init_device_mesh(device.type, (dist.get_world_size(),))
    )
    for _, block in families.blocks(network):
        shard(block)
    whole = {p for p in network.parameters() if not isinstance(p, DTensor)}
    shard(families.backbone(network), ignored_params=whole)


def _placed(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(value, device=device) if value.is_meta else value.to(device)
