"""The Trainer of transformers, with its own loop, order of examples and checkpoints; on
text classification and language models.

`train.engine_config` holds TrainingArguments by their names. What rekindle's fields
decide is absent there, "auto" or equal. The program is train/hf_trainer.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rekindle.engines.base import (
    AUTO,
    CONFIG,
    Engine,
    EngineConfig,
    Finding,
    contradictions,
    untaken,
)
from rekindle.errors import did_you_mean

if TYPE_CHECKING:
    from rekindle.spec.model import Spec, TrainSpec

TASKS = ("text_classification", "causal_lm")
LARGEST_MICRO_BATCH = 32
# arguments of transformers' TrainingArguments that are handed on; others are rekindle's,
# or no test has trained with them
_HANDED_ON = (
    "average_tokens_across_devices",
    "data_seed",
    "dataloader_num_workers",
    "dataloader_persistent_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "ddp_broadcast_buffers",
    "ddp_bucket_cap_mb",
    "ddp_static_graph",
    "ddp_timeout",
    "full_determinism",
    "gradient_checkpointing_kwargs",
    "include_num_input_tokens_seen",
    "log_level",
    "log_level_replica",
    "neftune_noise_alpha",
    "optim",
    "optim_args",
    "optim_target_modules",
    "skip_memory_metrics",
    "tf32",
    "torch_empty_cache_steps",
    "use_liger_kernel",
)
# fields that the loop of the Trainer does not have, or that its arguments say otherwise,
# and the value with which it takes them
_FIELDS: Mapping[str, object] = {
    "layout": "auto",
    "optimizer": "adamw",
    "weights": "fp32",
    "compile": False,
    "ledger": False,
    "profile": 0,
    "class_weights": None,
    "sampling": "natural",
    "early_stopping_patience": None,
    "validate_every": None,
    "min_lr_ratio": 0.0,
    "deterministic": False,
    "max_bad_steps": 3,
    "checkpoint.keep_best": False,
    "checkpoint.keep_every_hours": None,
    "budget_hours": None,
}
# train.lr_schedule -> lr_scheduler_type
_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


class TransformersTrainer(Engine):
    """`train.engine: trainer`; `train.engine_config` holds TrainingArguments."""

    package = "accelerate"
    program = "rekindle.train.hf_trainer"

    def refuse(self, spec: Spec) -> Iterator[Finding]:
        """Tasks and fields that it does not know, and arguments that rekindle decides."""
        train = spec.train
        if spec.task not in TASKS:
            yield ("task",), "the engine trainer knows text_classification and causal_lm only", ""
        for field in ("lora", "teacher"):
            if getattr(spec.model, field) is not None:
                message = f"the engine trainer does not take model.{field}"
                yield ("model", field), message, "remove it, or use rekindle's engine"
        yield from untaken("trainer", train, _FIELDS)
        if train.lr_schedule not in _SCHEDULES:
            message = f"the engine trainer has no schedule {train.lr_schedule}"
            yield ("train", "lr_schedule"), message, f"one of {', '.join(_SCHEDULES)}"
        arguments = train.engine_config or {}
        owned = _owned(train)
        for key in sorted(set(arguments) - set(_HANDED_ON) - set(owned)):
            fix = did_you_mean(key, (*_HANDED_ON, *owned)) or "remove it"
            yield (*CONFIG, key), f"rekindle does not hand on `{key}`", fix
        owned_by_path: dict[tuple[str, ...], tuple[str, object]] = {}
        for name, rule in owned.items():
            owned_by_path[name,] = rule
        yield from contradictions(arguments, owned_by_path, train)

    def config(self, train: TrainSpec, world: int) -> EngineConfig:
        """Arguments without "auto"; those of paths, steps and devices are the program's."""
        arguments: EngineConfig = {}
        for name, value in (train.engine_config or {}).items():
            if value != AUTO:
                arguments[name] = value
        for name, (_, value) in _owned(train).items():
            if value is not None:
                arguments[name] = value
        rows_of_rank = train.global_batch_size // world
        micro = _micro_batch_size(train, rows_of_rank)
        arguments["lr_scheduler_type"] = _SCHEDULES[train.lr_schedule]
        arguments["per_device_train_batch_size"] = micro
        arguments["gradient_accumulation_steps"] = rows_of_rank // micro
        return arguments


def _micro_batch_size(train: TrainSpec, rows_of_rank: int) -> int:
    """The largest that divides the rows of a rank, up to what is asked for."""
    most = LARGEST_MICRO_BATCH
    if train.micro_batch_size != AUTO:
        most = int(train.micro_batch_size)
    for size in range(min(most, rows_of_rank), 1, -1):
        if rows_of_rank % size == 0:
            return size
    return 1


def _owned(train: TrainSpec) -> dict[str, tuple[str, object]]:
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
