"""Trainers of any size on any device, without a job and without files: models, shards, steps."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rekindle.data.manifest import Shards
from rekindle.objectives.loss import Goal
from rekindle.records import ShardManifest
from rekindle.spec.layout import Layout
from rekindle.spec.model import LoraSpec, ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import modules, parallel, weights
from rekindle.train.loop import RunLength, StopFlag, Trainer
from rekindle.train.mesh import Mesh
from rekindle.train.parts import DTYPES, Parts
from tests.gpu.here import Here

TOKENS, TEXT, IMAGE = "causal_lm", "text_classification", "image_classification"
UNSAVED: Any = types.SimpleNamespace(
    pending=None, written=lambda: True, settle=lambda save: None
)  # no save is ever in flight
LABELS = ("a", "b")
_PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def model(kind: str, here: Here, **more: Any) -> dict[str, Any]:
    """A config of an architecture: 512 wide with heads of 64, or 32 wide with heads of 8."""
    width, layers, heads = (32, 2, 4) if here.tiny else (512, 4, 8)
    if kind == "gpt2":
        found = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    elif kind == "distilbert":
        found = {"dim": width, "n_layers": layers, "n_heads": heads, "hidden_dim": 3 * width}
    else:
        found = {
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
        }
        if kind != "bert":
            found |= {"num_key_value_heads": heads // 2, "max_position_embeddings": 4096}
    return {"model_type": kind, **found, **more}


def plain(kind: str, here: Here) -> dict[str, Any]:
    """The same without dropout."""
    more = {
        "gpt2": _PLAIN,
        "distilbert": {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
        "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    }
    return model(kind, here, **more.get(kind, {}))


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train. Rows have mixed lengths up to `length`, or fill it where `full`; `seeded` weights are the same on every device,
    others are drawn on the device, which is quick."""

    model: Mapping[str, Any]
    task: str = TOKENS
    length: int = 128
    rows: int = 4
    micro: int = 2
    packing: bool = True
    full: bool = False
    vocabulary: int = 1000
    lora: Mapping[str, Any] | None = None
    seeded: bool = True
    train: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def shards_of(case: Case, steps: int = 40) -> Shards:
    """Random rows, as many as `steps` take and more."""
    draw = np.random.default_rng(1)
    count = case.rows * steps
    columns = {
        "id": pa.array([str(i) for i in range(count)]),
        "hash": pa.array([bytes(16)] * count, pa.binary(16)),
        "label": pa.array(draw.integers(0, len(LABELS), count), pa.int32()),
    }
    settings: dict[str, Any] = {"image_shape": [case.length, case.length, 3]}
    if case.task == IMAGE:
        size = case.length * case.length * 3
        columns["pixels"] = pa.array([draw.bytes(size) for _ in range(count)], pa.binary())
    else:
        sizes = draw.integers(3, case.length // 2 + 1, count)
        sizes = np.full(count, case.length) if case.full else sizes
        texts = [draw.integers(1, case.vocabulary, int(n)).tolist() for n in sizes]
        columns["input_ids"] = pa.array(texts, pa.list_(pa.int32()))
        if case.task == TOKENS:
            columns["supervised"] = pa.array([[1] * len(t) for t in texts], pa.list_(pa.uint8()))
        settings = {
            "pad_token_id": 0,
            "eos_token_id": 0,
            "vocab_size": case.vocabulary,
            "max_length": case.length,
            "packing": case.packing,
        }
    manifest = ShardManifest(
        task=case.task,
        source="random",
        labels=() if case.task == TOKENS else LABELS,
        rows={"train": count, "validation": 0},
        settings=settings,
    )
    table = pa.table(columns)
    return Shards.of_tables(Path(), manifest, {"train": table})


def trainer_of(case: Case, device: torch.device) -> Trainer:
    """One rank's, as the worker makes it."""
    given = {
        "steps": 1000,
        "lr": 1e-3,
        "warmup": 0,
        "lr_schedule": "constant",
        "precision": "fp32",
        "global_batch_size": case.rows,
        "micro_batch_size": case.micro,
    }
    train = TrainSpec.model_validate({**given, **case.train})
    task, shards = load_task(case.task), shards_of(case)
    with weights.deferred() as recorder:
        network = task.build(
            ModelSpec(source=dict(case.model)),
            shards.manifest.labels,
            shards.manifest.settings,
            Path(),
        )
    source = weights.WeightSource(network, recorder, 0)
    mesh = Mesh.of(Layout(micro_batch_size=case.micro), device)
    origins, lora = modules.unfused(network), None
    if case.lora:
        with weights.deferred(recorder):
            lora = modules.inject(network, LoraSpec(**case.lora), origins)
        source.include(network)
    dtype = DTYPES.get(train.weights)
    if dtype is not None:
        weights.transform(network, lambda t: t.to(dtype) if t.is_floating_point() else t)
    parts = parallel.build(task, network, origins, train, Goal(), mesh, lora)
    if case.seeded:
        weights.fill([stage.part.network for stage in parts.stages], source, parts.origins)
    else:
        _draw(parts)
    parts = parallel.settle(parts)
    packs = case.task == TOKENS and case.packing
    padded = case.task == TEXT and not parts.stages[0].part.joins_texts
    order = shards.order(
        "train",
        global_batch_size=case.rows,
        seed=0,
        by_length=packs or padded,
        pack_length=case.length if packs else None,
    )
    return Trainer(task, shards, train, RunLength.of(train, order), parts, 0)


@torch.no_grad()
def _draw(parts: Parts) -> None:
    torch.manual_seed(0)
    for name, parameter in parts.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.02)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def launched(trainer: Trainer, step: int) -> Any:
    """The step, given to the device."""
    return trainer._launch(step, trainer.batches.make(step), StopFlag(60), UNSAVED)


def step(trainer: Trainer, number: int) -> tuple[float, float]:
    """Loss and gradient norm of a step that is done."""
    loss, norm, *_ = launched(trainer, number).numbers.read()
    return loss, norm


def losses(trainer: Trainer, count: int, first: int = 0) -> list[float]:
    return [step(trainer, number)[0] for number in range(first, first + count)]


def seconds_of_steps(here: Here, trainer: Trainer, first: int, count: int) -> list[float]:
    """Each step's time, waited for."""
    found = []
    for number in range(first, first + count):
        work = trainer.batches.make(number)
        here.synchronise()
        began = time.perf_counter()
        trainer._launch(number, work, StopFlag(60), UNSAVED).numbers.read()
        here.synchronise()
        found.append(time.perf_counter() - began)
    return found
