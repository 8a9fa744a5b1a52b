"""What a training minimises: the loss with its class weights and its teacher, a frozen
network in the precision of the forward pass. The blocks of a large one are sharded with
FSDP2 over all ranks, which all run it: a student with a teacher is never divided by tp,
pp or cp. The root is the backbone, because the loss calls backbone and head apart."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rekindle.data.manifest import Shards
from rekindle.errors import UnsupportedError
from rekindle.objectives.loss import Goal
from rekindle.plan.tensors import WHOLE_TEACHER_BYTES
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import TASKS, Task
from rekindle.train import attention, kernels, modelfolder, modules, parallel, weights
from rekindle.train.batches import TRAIN
from rekindle.train.job import Job
from rekindle.train.mesh import Mesh
from rekindle.train.parts import HALVES


def load_teacher(folder: Path, job: Job, task: Task, shards: Shards, mesh: Mesh) -> nn.Module:
    """The network in `folder`, ready for the loss of a student on `mesh`."""
    large = divides(modelfolder.count_parameters(folder), job.train, mesh)
    if large and job.task in TASKS and (folder / "config.json").exists():
        network = _sharded(folder, job.train, task, shards, mesh)
    else:
        network = task.load(folder)
        arrange(network, job.train, mesh, divided=False)
    return ready(network, job.train, mesh)


def divides(parameters: int, train: TrainSpec, mesh: Mesh) -> bool:
    """Whether ranks divide the blocks of a teacher of so many parameters."""
    width = 2 if train.precision in HALVES else 4
    return mesh.layout.world > 1 and parameters * width > WHOLE_TEACHER_BYTES


def ready(network: nn.Module, train: TrainSpec, mesh: Mesh) -> nn.Module:
    if modules.known(network) is not None:
        computed = HALVES.get(train.precision, torch.float32)
        kernel = kernels.kernel_for(network, mesh.device, computed)
        groups = kernels.takes_groups(mesh.device)
        attention.install(network, attention.AttentionPeers(kernel=kernel, groups=groups))
    return network.eval().requires_grad_(False)


def _sharded(folder: Path, train: TrainSpec, task: Task, shards: Shards, mesh: Mesh) -> nn.Module:
    """Built without values, divided, then filled: no rank holds the whole, not even on its host."""
    manifest = shards.manifest
    with weights.deferred() as recorder:
        spec = ModelSpec(source=str(folder))
        network = task.build(spec, manifest.labels, manifest.settings, shards.assets)
    source = weights.WeightSource(network, recorder, 0, folder)
    origins = modules.unfused(network)
    arrange(network, train, mesh, divided=True)
    weights.fill([network], source, origins)
    return network


def arrange(network: nn.Module, train: TrainSpec, mesh: Mesh, divided: bool) -> None:
    """In the forward pass's precision, on the device, blocks `divided` among ranks or not."""
    if train.precision in HALVES:
        weights.convert(network, HALVES[train.precision])
    if divided:  # under one root, so that a block's weights are gathered while the one before works
        ranks = init_device_mesh(mesh.device.type, (dist.get_world_size(),))
        shard = functools.partial(fully_shard, mesh=ranks)
        for _, block in modules.blocks(network):
            shard(block)
        whole = {p for p in network.parameters() if not isinstance(p, DTensor)}
        shard(modules.backbone(network), ignored_params=whole)
    parallel.put(network, mesh.device)


def goal_of(job: Job, task: Task, shards: Shards, mesh: Mesh) -> Goal:
    """What the job minimises. UnsupportedError for a teacher in a layout that splits examples."""
    teacher = job.model.teacher
    layout = mesh.layout
    counts = class_weights(job, shards, mesh.device)
    plain = Goal(job.train.label_smoothing, class_weights=counts)
    if teacher is None:
        return plain
    if layout.tp * layout.pp * layout.cp > 1:
        message = f"a teacher needs whole examples and scores, which no rank of {layout} has"
        raise UnsupportedError(message, where="model.teacher", fix="use dp and shard")
    folder = task.weights(ModelSpec(source=teacher.source)) or Path(teacher.source)
    if (folder / modelfolder.DESCRIPTION).exists():
        modelfolder.check_start(folder, shards, "model.teacher.source", job.code)
    network = load_teacher(folder, job, task, shards, mesh)
    return dataclasses.replace(
        plain, teacher=network, temperature=teacher.temperature, teacher_weight=teacher.weight
    )


def class_weights(job: Job, shards: Shards, device: torch.device) -> torch.Tensor | None:
    """[C], on the device; a class without examples counts 1."""
    wanted = job.train.class_weights
    labels = shards.manifest.labels
    if wanted is None or not labels:
        return None
    if isinstance(wanted, dict):
        weights = np.array([wanted.get(label, 1.0) for label in labels])
    else:
        of_label = shards.manifest.class_rows.get(TRAIN, {})
        counts = np.array([of_label.get(label, 0) for label in labels])
        weights = np.where(counts, counts.sum() / (counts > 0).sum() / np.maximum(counts, 1), 1.0)
    return torch.from_numpy(weights).to(device)
