"""DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054), stages 0 to 3, offload to
the host.

DeepSpeed reduces gradients, clips, updates, and divides weights and moments among the
ranks; the batches, the rate of each step, saves and restarts are rekindle's. Its state is
saved as fragments of flattened tensors in rekindle's own checkpoints, so any number of
ranks and any stage resume it.

DeepSpeed averages gradients over the ranks, and a loss here is a rank's share: it is
multiplied by their number. Here is what can be known without the package;
deepspeed_stepper.py runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.engines.base import (
    AUTO,
    CONFIG,
    Engine,
    EngineConfig,
    Finding,
    at,
    contradictions,
    untaken,
)
from rekindle.errors import did_you_mean
from rekindle.tables import rows

if TYPE_CHECKING:
    from rekindle.spec.model import Spec, TrainSpec

OFFLOADED = ("optimizer", "param")
"""What `zero_optimization` can hold in the host's memory: `offload_optimizer`, `offload_param`."""
NO_FULL_PRECISION = "stage 0 in bf16 keeps no weights in full precision that could be saved"

# sections that would take over what is rekindle's, or that no test has seen: what to do instead
_REFUSED = {
    "scheduler": "rekindle sets the rate of each step (train.lr_schedule)",
    "fp16": "use train.precision: bf16 or fp32",
    "amp": "use train.precision: bf16 or fp32",
    "elasticity": "rekindle resumes on any number of ranks by itself",
    "autotuning": "rekindle plan chooses the layout",
    "curriculum_learning": "rekindle decides the order of examples",
    "data_efficiency": "rekindle decides the order of examples",
    "compression_training": "rekindle does not export what it makes",
    "pipeline": "use rekindle's engine with train.layout",
    "compile": "use rekindle's engine with train.compile",
    "checkpoint": "rekindle saves and resumes",
    "activation_checkpointing": "use train.activation_checkpointing",
    "torch_autocast": "use train.precision",
    "gradient_allreduce_op": "losses are shares of the whole batch's",
    "communication_data_type": "no test has trained with it",
    "data_types": "no test has trained with it",
    "sparse_gradients": "no test has trained with it",
}
# fields of rekindle's that it takes with this value alone
_FIELDS = {"weights": "fp32", "compile": False, "optimizer": "adamw"}

_TABLES = rows(Path(__file__).with_suffix(".yaml"))
_DEFAULTS: Mapping[str, object] = _TABLES["defaults"]
_KNOWN = (*_REFUSED, *_TABLES["known"])
# keys that a test has trained with, by the path of their section
_SEEN = {tuple(path.split(".")): tuple(keys) for path, keys in _TABLES["seen"].items()}


class DeepSpeed(Engine):
    """`train.engine: deepspeed`; `train.engine_config` is a `ds_config.json`."""

    package = "deepspeed"
    aside = ("zero_optimization",)

    def refuse(self, spec: Spec) -> Iterator[Finding]:
        """What DeepSpeed does not know, and keys that rekindle decides: absent, "auto" or equal."""
        train = spec.train
        yield from _layout(spec)
        yield from untaken("deepspeed", train, _FIELDS)
        settings = train.engine_config or {}
        if train.precision == "bf16" and at(settings, "zero_optimization", "stage") == 0:
            path = (*CONFIG, "zero_optimization", "stage")
            yield path, NO_FULL_PRECISION, "stage: 1, or precision: fp32"
        yield from _refused(settings)
        yield from contradictions(settings, _owned(train), train)
        optimizer = at(settings, "optimizer", "type")
        if optimizer not in (None, AUTO, "Adam", "AdamW"):
            message = f"rekindle cannot save and resume the state of {optimizer}"
            yield (*CONFIG, "optimizer", "type"), message, "AdamW"
        for part in OFFLOADED:
            section = ("zero_optimization", f"offload_{part}")
            if at(settings, *section, "device") == "nvme":
                yield (*CONFIG, *section), "offload to NVMe is not supported", "device: cpu"

    def programs(self, train: TrainSpec) -> tuple[str, ...]:
        """The compiler of its CPU Adam."""
        settings = train.engine_config or {}
        offloads = at(settings, "zero_optimization", "offload_optimizer", "device") == "cpu"
        if offloads or at(settings, "optimizer", "params", "torch_adam") is False:
            return ("g++",)
        return ()

    def config(self, train: TrainSpec, world: int) -> EngineConfig:
        """`ds_config.json` without "auto".

        Batches are of one row here, because the loop decides what a micro-batch holds and
        which is a step's last. The stepper adds the rate, and what tp ranks divide."""
        settings = _without_auto(train.engine_config or {})
        for section in (*_REFUSED, "train_batch_size", "tensor_parallel"):
            settings.pop(section, None)
        zero = dict(settings.get("zero_optimization") or {})
        zero["stage"] = int(zero.get("stage", 1))
        params = {}
        for key, value in (at(settings, "optimizer", "params") or {}).items():
            if key in _SEEN["optimizer", "params"]:
                params[key] = value
        params |= _adamw(train)
        offloads = at(zero, "offload_optimizer", "device") == "cpu"
        if not offloads and "torch_adam" not in params:
            # DeepSpeed's own is compiled on each machine
            params["torch_adam"] = True
            params["fused"] = True
        return {
            **settings,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": params},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": train.clip_norm or 0.0,
            "bf16": {**(settings.get("bf16") or {}), "enabled": train.precision == "bf16"},
        }


def _layout(spec: Spec) -> Iterator[Finding]:
    """Axes that DeepSpeed does not divide by, and what its tensor parallelism is not known with."""
    settings = spec.train.engine_config or {}
    tp = getattr(spec.train.layout, "tp", 1)
    for axis in ("shard", "pp", "cp"):
        if getattr(spec.train.layout, axis, 1) > 1:
            message = f"DeepSpeed does not divide by {axis}"
            yield ("train", "layout", axis), message, "remove it; ZeRO's stages divide"
    autotp_size = at(settings, "tensor_parallel", "autotp_size")
    if autotp_size not in (None, AUTO, tp):
        message = f"`autotp_size` is {json.dumps(autotp_size)} here, and train.layout.tp is {tp}"
        fix = "remove it here, and set train.layout.tp"
        yield (*CONFIG, "tensor_parallel", "autotp_size"), message, fix
    if tp > 1 and at(settings, "zero_optimization", "stage") == 0:
        message = "stage 0 clips each tp rank alone"
        yield (*CONFIG, "zero_optimization", "stage"), message, "stage: 1"
    if tp > 1 and (spec.model.lora is not None or spec.task == "image_classification"):
        message = "DeepSpeed divides neither adapters nor networks of images"
        yield ("train", "layout", "tp"), message, "use rekindle's engine"


def _adamw(train: TrainSpec) -> dict[str, object]:
    """What our fields say of AdamW, by DeepSpeed's names."""
    return {"betas": list(train.betas), "eps": train.eps, "weight_decay": train.weight_decay}


def _refused(settings: Mapping[str, object]) -> Iterator[Finding]:
    """Sections of a `ds_config.json` that DeepSpeed does not have, or rekindle does not take."""
    for key in sorted(set(settings) - set(_KNOWN)):
        fix = did_you_mean(key, _KNOWN) or "remove it: DeepSpeed drops what it does not know"
        yield (*CONFIG, key), f"DeepSpeed has no `{key}`", fix
    yield from _misshapen(settings)
    for section, seen_keys in _SEEN.items():
        values = at(settings, *section)
        if not isinstance(values, Mapping):
            continue
        for key in sorted(set(values) - set(seen_keys)):
            is_left_open = values[key] is None and key.isidentifier()  # `stage:3` is a key, to YAML
            if not is_left_open and values[key] not in (_DEFAULTS.get(key, False), AUTO):
                fix = did_you_mean(key, seen_keys) or "remove it"
                yield (*CONFIG, *section, key), f"no test has trained with `{key}`", fix
    for key in sorted(set(settings) & set(_REFUSED)):
        if _asks_for_something(settings[key]):
            yield (*CONFIG, key), f"`{key}` is not for rekindle", _REFUSED[key]


def _misshapen(settings: Mapping[str, object]) -> Iterator[Finding]:
    """Sections that are no mappings, stages that are none, and offload that a stage ignores."""
    for key in ("zero_optimization", "optimizer", "bf16", "tensor_parallel"):
        if not isinstance(settings.get(key, {}), Mapping):
            yield (*CONFIG, key), f"`{key}` is a mapping of settings", "write {...}"
    stage = at(settings, "zero_optimization", "stage")
    if stage not in (None, AUTO, 0, 1, 2, 3) or isinstance(stage, bool):
        message = f"there is no stage {json.dumps(stage)}"
        yield (*CONFIG, "zero_optimization", "stage"), message, "0, 1, 2 or 3, without quotes"
    stage_in_effect = 1 if stage in (None, AUTO) else stage
    yield from _misplaced_offload(settings, "param", stage_in_effect, least_stage=3)
    yield from _misplaced_offload(settings, "optimizer", stage_in_effect, least_stage=1)


def _misplaced_offload(
    settings: Mapping[str, object], part: str, stage: object, least_stage: int
) -> Iterator[Finding]:
    """Offload of a part that is no mapping, goes nowhere, or that the stage ignores."""
    path = ("zero_optimization", f"offload_{part}")
    section = at(settings, *path)
    device = at(section, "device")
    if section is not None and not isinstance(section, Mapping):
        yield (*CONFIG, *path), f"`{path[-1]}` is a mapping of settings", "{device: cpu}"
    elif device not in (None, "none", AUTO, "cpu", "nvme"):
        yield (*CONFIG, *path, "device"), f"nothing can be offloaded to `{device}`", "cpu"
    elif device == "cpu" and stage in range(least_stage):
        message = f"stage {stage} leaves {part}s where they are"
        yield (*CONFIG, *path), message, f"stage: {least_stage}, or remove it"


def _owned(train: TrainSpec) -> dict[tuple[str, ...], tuple[str, object]]:
    """What DeepSpeed's config may say only as rekindle does (see `contradictions`)."""
    owned: dict[tuple[str, ...], tuple[str, object]] = {
        ("train_batch_size",): ("global_batch_size", train.global_batch_size),
        ("train_micro_batch_size_per_gpu",): ("micro_batch_size", train.micro_batch_size),
        ("gradient_accumulation_steps",): ("", None),
        ("gradient_clipping",): ("clip_norm", train.clip_norm or 0.0),
        ("bf16", "enabled"): ("precision", train.precision == "bf16"),
        ("optimizer", "params", "lr"): ("lr", train.lr),
    }
    for name, value in _adamw(train).items():
        owned["optimizer", "params", name] = (name, value)
    return owned


def _without_auto(settings: Mapping[str, object]) -> EngineConfig:
    """Settings without those that are "auto", at any depth."""
    decided: EngineConfig = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            decided[key] = _without_auto(value)
        elif value != AUTO:
            decided[key] = value
    return decided


def _asks_for_something(section: object) -> bool:
    """Whether a section asks for something: it is neither disabled nor all "auto"."""
    if not isinstance(section, Mapping):
        return section not in (None, False, AUTO)
    if section.get("enabled", True) in (False, AUTO):
        return False
    params = section.get("params")
    is_left_open = isinstance(params, Mapping) and all(value == AUTO for value in params.values())
    return not is_left_open
