"""What a training minimises: the loss with its class weights and its teacher."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from rekindle.data.manifest import Shards
from rekindle.errors import UnsupportedError
from rekindle.spec.model import ModelSpec
from rekindle.tasks import Task
from rekindle.train import modelfolder
from rekindle.train.batches import TRAIN
from rekindle.train.job import Job
from rekindle.train.mesh import Mesh
from rekindle.train.part import Goal
from rekindle.train.teacher import load_teacher


def goal_of(job: Job, task: Task, shards: Shards, mesh: Mesh) -> Goal:
    """What the job minimises; its teacher is loaded. UnsupportedError for a layout that splits
    examples."""
    teacher, layout = job.model.teacher, mesh.layout
    counts = class_weights(job, shards, mesh.device)
    plain = Goal(job.train.label_smoothing, class_weights=counts)
    if teacher is None:
        return plain
    if layout.tp * layout.pp * layout.cp > 1:
        what = f"a teacher needs whole examples and scores, which no rank of {layout} has"
        raise UnsupportedError(what, where="model.teacher", fix="use dp and shard")
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
        counts = np.bincount(labels_of(shards), minlength=len(labels))
        weights = np.where(counts, counts.sum() / (counts > 0).sum() / np.maximum(counts, 1), 1.0)
    return torch.from_numpy(weights).to(device)


def labels_of(shards: Shards) -> np.ndarray:
    """Classes of all training examples, or of all their words."""
    column = shards.table(TRAIN).column("label").combine_chunks()
    return np.asarray(column.flatten() if pa.types.is_list(column.type) else column)
