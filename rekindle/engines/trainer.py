"""The Trainer of transformers, with its own loop, order of examples and checkpoints; on text
classification and language models.

`train.engine_config` holds TrainingArguments by their names. What rekindle's fields decide is
absent there, "auto" or equal. The program is train/hf_trainer.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.engines.base import AUTO, CONFIG, Engine, Finding, contradictions, untaken
from rekindle.errors import did_you_mean
from rekindle.tables import rows

if TYPE_CHECKING:
    from rekindle.spec.model import Spec, TrainSpec

TASKS = ("text_classification", "causal_lm")
LARGEST_MICRO_BATCH = 32
_TABLES = rows(Path(__file__).with_suffix(".yaml"))
_TAKEN, _SCHEDULES = _TABLES["taken"], _TABLES["schedules"]


class Trainer(Engine):
    package = "accelerate"
    program = "rekindle.train.hf_trainer"

    def refuse(self, spec: Spec) -> Iterator[Finding]:
        """Tasks and fields that it does not know, and arguments that rekindle decides."""
        train = spec.train
        if spec.task not in TASKS:
            yield ("task",), "the engine trainer knows text_classification and causal_lm only", ""
        for field in ("lora", "teacher"):
            if getattr(spec.model, field) is not None:
                what = f"the engine trainer does not take model.{field}"
                yield ("model", field), what, "remove it, or use rekindle's engine"
        yield from untaken("trainer", train, _TABLES["fields"])
        if train.lr_schedule not in _SCHEDULES:
            what = f"the engine trainer has no schedule {train.lr_schedule}"
            yield ("train", "lr_schedule"), what, f"one of {', '.join(_SCHEDULES)}"
        given = train.engine_config or {}
        owned = _owned(train)
        for key in sorted(set(given) - set(_TAKEN) - set(owned)):
            fix = did_you_mean(key, (*_TAKEN, *owned)) or "remove it"
            yield (*CONFIG, key), f"rekindle does not hand on `{key}`", fix
        yield from contradictions(given, {(name,): rule for name, rule in owned.items()}, train)

    def config(self, train: TrainSpec, world: int) -> dict[str, Any]:
        """Arguments without "auto"; those of paths, steps and devices are the program's."""
        given = {k: v for k, v in (train.engine_config or {}).items() if v != AUTO}
        each = train.global_batch_size // world
        wanted = train.micro_batch_size
        most = LARGEST_MICRO_BATCH if wanted == AUTO else int(wanted)
        micro = next(size for size in range(min(most, each), 0, -1) if each % size == 0)
        decided = {key: value for key, (_, value) in _owned(train).items() if value is not None}
        return {
            **given,
            **decided,
            "lr_scheduler_type": _SCHEDULES[train.lr_schedule],
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": each // micro,
        }


def _owned(train: TrainSpec) -> dict[str, tuple[str, Any]]:
    """What its arguments may say only as rekindle does."""
    return {
        "per_device_train_batch_size": ("", None),
        "gradient_accumulation_steps": ("", None),
        "lr_scheduler_type": ("lr_schedule", None),
        "learning_rate": ("lr", train.lr),
        "weight_decay": ("weight_decay", train.weight_decay),
        "seed": ("seed", train.seed),
        "adam_beta1": ("betas", train.betas[0]),
        "adam_beta2": ("betas", train.betas[1]),
        "adam_epsilon": ("eps", train.eps),
        "max_grad_norm": ("clip_norm", train.clip_norm or 0.0),
        "label_smoothing_factor": ("label_smoothing", train.label_smoothing),
        "bf16": ("precision", train.precision == "bf16"),
        "fp16": ("precision", False),
        "gradient_checkpointing": (
            "activation_checkpointing",
            train.activation_checkpointing == "full",
        ),
    }
