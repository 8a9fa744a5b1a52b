"""DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054), stages 0 to 3, offload to the host.

DeepSpeed reduces gradients, clips, updates, and divides weights and moments among the ranks; the
batches, the rate of each step, saves and restarts are rekindle's. Its state is saved as fragments
of flattened tensors in rekindle's own checkpoints, so any number of ranks and any stage resume it.

DeepSpeed averages gradients over the ranks, and a loss here is a rank's share: it is multiplied by
their number. What is private to DeepSpeed is read by `Zero` alone."""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.engines import base
from rekindle.engines.base import AUTO, CONFIG, Engine, Finding, Fragment, at, untaken
from rekindle.errors import StepError, did_you_mean
from rekindle.tables import rows

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rekindle.spec.model import Spec, TrainSpec

log = logging.getLogger(__name__)

_EXTENSIONS = "TORCH_EXTENSIONS_DIR"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOVED = ("optimizer", "param")
_FEW, _ROUNDED = 256, 2e-2  # bf16 rounds by 0.4 %
_TABLES = rows(Path(__file__).with_suffix(".yaml"))
_REFUSED, _DEFAULTS = _TABLES["refused"], _TABLES["defaults"]
_KNOWN = (*_REFUSED, *_TABLES["known"])
_SEEN = {tuple(place.split(".")): tuple(keys) for place, keys in _TABLES["seen"].items()}
_NARROW = "stage 0 in bf16 keeps no weights in full precision that could be saved"


class DeepSpeed(Engine):
    """`train.engine: deepspeed`; `train.engine_config` is a `ds_config.json`."""

    package = "deepspeed"
    aside = ("zero_optimization",)

    def refuse(self, spec: Spec) -> Iterator[Finding]:
        """What DeepSpeed does not know, and keys that rekindle decides: absent, "auto" or equal."""
        train = spec.train
        yield from _layout(spec)
        yield from untaken("deepspeed", train, _TABLES["fields"])
        given = train.engine_config or {}
        if train.precision == "bf16" and at(given, "zero_optimization", "stage") == 0:
            yield (*CONFIG, "zero_optimization", "stage"), _NARROW, "stage: 1, or precision: fp32"
        yield from _refused(given)
        yield from base.contradictions(given, _owned(train), train)
        kind = at(given, "optimizer", "type")
        if kind not in (None, AUTO, "Adam", "AdamW"):
            what = f"rekindle cannot save and resume the state of {kind}"
            yield (*CONFIG, "optimizer", "type"), what, "AdamW"
        for part in _MOVED:
            place = ("zero_optimization", f"offload_{part}")
            if at(given, *place, "device") == "nvme":
                yield (*CONFIG, *place), "offload to NVMe is not supported", "device: cpu"

    def programs(self, train: TrainSpec) -> tuple[str, ...]:
        """The compiler of its CPU Adam."""
        given = train.engine_config or {}
        moved = at(given, "zero_optimization", "offload_optimizer", "device") == "cpu"
        return ("g++",) if moved or at(given, "optimizer", "params", "torch_adam") is False else ()

    def config(self, train: TrainSpec, world: int) -> dict[str, Any]:
        """`ds_config.json` without "auto". Batches are of one row here, because the loop decides
        what a micro-batch holds and which is a step's last. `start` adds what tp ranks divide."""
        given = _decided(train.engine_config or {})
        left = {*_REFUSED, "train_batch_size", "tensor_parallel"}
        merged = {key: value for key, value in given.items() if key not in left}
        zero = dict(merged.get("zero_optimization") or {})
        zero["stage"] = int(zero.get("stage", 1))
        moved = at(zero, "offload_optimizer", "device") == "cpu"
        asked = at(merged, "optimizer", "params") or {}
        seen = _SEEN["optimizer", "params"]
        params = {k: v for k, v in asked.items() if k in seen} | _adamw(train)
        if not moved and "torch_adam" not in params:
            # DeepSpeed's own is compiled on each machine
            params |= {"torch_adam": True, "fused": True}
        return {
            **merged,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": params},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": train.clip_norm or 0.0,
            "bf16": {**(merged.get("bf16") or {}), "enabled": train.precision == "bf16"},
        }

    def start(
        self,
        part: nn.Module,
        train: TrainSpec,
        rate: float,
        device: torch.device,
        divided: Mapping[str, Sequence[str]],
    ) -> Zero:
        """Take over the filled part. StepError where what is in effect was not asked for. Tp ranks
        divide the modules of these names by "column" or "row", and add up slopes of "skip"."""
        import torch.distributed as dist

        os.environ.setdefault("DS_ACCELERATOR", device.type)
        try:
            import deepspeed
        except ImportError as error:
            what = f"the engine deepspeed is not installed: {error}"
            fix = "pip install 'rekindle[deepspeed]', in the image of the step where it has one"
            raise StepError(what, where="train.engine", fix=fix) from None
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        config = self.config(train, dist.get_world_size())
        if divided:
            specs = [
                {
                    "patterns": [rf".*\.{re.escape(name)}\.weight$" for name in names],
                    "partition_type": how,
                    "grad_allreduce": how == "skip",
                }
                for how, names in divided.items()
            ]
            config["tensor_parallel"] = {
                "autotp_size": getattr(train.layout, "tp", 1),
                "vocab_parallel_lm_head": False,
                "partition_config": {"use_default_specs": False, "layer_specs": specs},
            }
            layers: Any = importlib.import_module("deepspeed.module_inject.layers")
            add_up = layers.RowParallel.forward  # in place, where `selective` keeps the share
            layers.RowParallel.forward = staticmethod(
                lambda ctx, group, share, _: add_up(ctx, group, share.contiguous().clone(), _)
            )
        config["optimizer"]["params"]["lr"] = rate
        if config["bf16"]["enabled"] and not config["zero_optimization"]["stage"]:
            fix = "stage: 1, or precision: fp32"
            raise StepError(_NARROW, where="train.engine_config", fix=fix)
        trained = [p for p in part.parameters() if p.requires_grad]
        _compile(config)
        # an operator for inference, which would be compiled
        communication: Any = importlib.import_module("deepspeed.comm.torch")
        communication.build_shm_op = lambda: None
        exact = {name: b.clone() for name, b in part.named_buffers() if b.is_floating_point()}
        deepspeed.init_distributed(
            dist_backend=dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False
        )
        engine, *_ = deepspeed.initialize(
            model=part,
            model_parameters=[g for g in base.by_decay(trained) if g["params"]],
            config=config,
            dist_init_required=False,
        )
        if divided:  # it compares what tp ranks get by pickles
            engine.first_dataloader_check.remove()
        for name, buffer in part.named_buffers():
            if name in exact and buffer.dtype != exact[name].dtype:
                buffer.data = exact[name]  # positions, which bf16 would round
        stepper = Zero(engine, part)
        stepper.require(config)
        return stepper


def _beginning(values: torch.Tensor) -> torch.Tensor:
    few = values.detach().flatten()[:_FEW].float().cpu()
    return few / few.abs().max().clamp(min=1e-12)


def _compile(config: Mapping[str, Any]) -> None:
    """Compile what DeepSpeed would at its first use, once a machine; StepError where it fails. The
    lock of torch is a file, which a killed process leaves for ever; ours is the kernel's."""
    if at(config, "zero_optimization", "offload_optimizer", "device") == "cpu":
        name = "CPUAdamBuilder"
    elif not at(config, "optimizer", "params", "torch_adam"):
        name = "FusedAdamBuilder"
    else:
        return
    from deepspeed.accelerator import get_accelerator

    tools = str(Path(sys.executable).parent)  # ninja is there
    os.environ["PATH"] = os.pathsep.join([tools, os.environ.get("PATH", "")])
    given = os.environ.get(_EXTENSIONS)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else cache / "rekindle" / "torch_extensions"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[_EXTENSIONS] = str(folder)
    with (folder / "rekindle.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left in [] if given else folder.glob("**/lock"):
            left.unlink()
        log.info("compiling DeepSpeed's %s, unless that was done before", name)
        try:
            get_accelerator().create_op_builder(name).load(verbose=False)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            what = f"DeepSpeed cannot compile {name}: {error}"
            fix = "install g++, or remove offload_optimizer"
            raise StepError(what, where="train.engine_config", fix=fix) from error


class Zero:
    """One rank's side: it takes losses and makes the updates. `module` runs a micro-batch."""

    def __init__(self, engine: Any, part: Any) -> None:
        import torch
        import torch.distributed as dist

        self.module, self.zero, self.ranks = engine, engine.optimizer, engine.dp_world_size
        self.world = dist.get_world_size()
        self.tp = self.world // self.ranks
        self.stage = engine.zero_optimization_stage()
        self.named = {n: p for n, p in part.network.named_parameters() if p.requires_grad}
        self.inner = engine.basic_optimizer
        self.updates = torch.zeros(1)
        own = type(self.inner).__module__.startswith("deepspeed.")
        for flat in self._flat():  # the optimizer would make it at the first update
            moments = {name: torch.zeros_like(flat) for name in _MOMENTS}
            count = 0 if own else torch.zeros((), device=flat.device)
            self.inner.state[flat] = {"step": count, **moments}
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._lazy_init_hp_params_optimizer_state()

    def _flat(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates: this rank's part of each group, flattened."""
        if self.stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return [p for group in self.inner.param_groups for p in group["params"]]

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.module.set_gradient_accumulation_boundary(last)
        self.module.backward(loss * self.ranks)

    def step(self, rate: float) -> float:
        """Update at this rate, if finite; returns the gradients' norm before clipping."""
        for group in self.zero.param_groups:
            group["lr"] = rate
        if self.zero is not self.inner:  # it looks for numbers that are not finite by itself
            self.module.step()
            return float(self.module.get_global_grad_norm())
        import torch

        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm):
            self.module.step()
        else:
            self.module.zero_grad()
        return norm

    def fragments(self) -> Mapping[str, Fragment]:
        """Weights in full precision and moments, by name: this rank's state, in place."""
        counts = [state["step"] for state in self.inner.state.values()]
        self.updates.fill_(float(counts[0]) if counts else 0.0)
        found = {"updates": Fragment(self.updates, 0, 1)}
        for name, parameter in self.named.items():
            part = self._part(parameter)
            for key in ("", *_MOMENTS):
                if fragment := self._fragment(parameter, key):
                    found[(f"{name}.{key}" if key else name) + part] = fragment
        return found

    def _part(self, parameter: Any) -> str:
        """What the name of a tensor ends with of which each tp rank holds another part."""
        if not hasattr(parameter, "gather_params"):
            return ""
        return f"@{self.module.mpu.get_tensor_model_parallel_rank()} of tp {self.tp}"

    def _fragment(self, parameter: Any, key: str) -> Fragment | None:
        if self.stage == 3:
            local, _ = self.zero._get_fp32_opt_state_partition(parameter, False, key or None)
            start = self.zero._get_param_partition_rank(parameter) * local.numel()
            here = max(0, min(local.numel(), parameter.ds_numel - start))
            return Fragment(local[:here], start, parameter.ds_numel)
        if not hasattr(parameter, "_hp_mapping"):
            value = self.inner.state[parameter][key] if key else parameter.detach()
            return Fragment(value.view(-1), 0, value.numel())
        place = parameter._hp_mapping
        if place is None:
            return None  # other ranks hold all of it
        local = place.get_hp_fragment(key or None)
        return Fragment(local, place.lp_fragment_address.start, parameter.numel())

    def restored(self) -> None:
        """To be called when `fragments` have been filled from a checkpoint."""
        import torch

        for state in self.inner.state.values():
            count = float(self.updates)
            step = state["step"]  # a tensor of torch's optimizer, a number of DeepSpeed's own
            state["step"] = torch.full_like(step, count) if torch.is_tensor(step) else int(count)
        if self.stage == 3:
            self.zero.checkpoint_event_prologue()
            for index in range(len(self.zero.fp16_groups)):
                self.zero._reassign_or_swap_out_partitioned_parameters(index)
            self.zero.checkpoint_event_epilogue()
        elif self.zero is not self.inner:
            self.zero.update_lp_params()

    def whole(self, parameter: torch.Tensor, of_tp: bool = True) -> torch.Tensor:
        """The whole value in full precision of a parameter, or of its tp rank; a collective."""
        from deepspeed.utils import safe_get_full_fp32_param

        found = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        part = self._computed_with(parameter) if found is None else found.detach()
        if of_tp and (gather := getattr(parameter, "gather_params", None)):
            gather([part := part.clone()])  # it puts the whole in the tensor's place
        return part

    def _computed_with(self, parameter: torch.Tensor) -> torch.Tensor:
        import deepspeed

        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def facts(self) -> Mapping[str, str]:
        """What is in effect, in words for the record: version, stage, optimizer and the like."""
        import deepspeed
        import torch.distributed as dist

        places = {part: getattr(self.module, f"zero_offload_{part}")() for part in _MOVED}
        offload = [part for part, place in places.items() if place and place.device == "cpu"]
        divided = any(self._part(parameter) for parameter in self.named.values())
        return {
            "deepspeed": deepspeed.__version__,
            "ZeRO stage": str(self.stage),
            "optimizer": type(self.inner).__name__,
            "backend": dist.get_backend(),
            "ranks": str(self.ranks * self.tp),
            "offload": ", ".join(offload) or "none",
            "precision": "bf16" if self.module.bfloat16_enabled() else "fp32",
            **({"tp": str(self.tp if divided else 1)} if self.tp > 1 else {}),
        }

    def require(self, config: Mapping[str, Any]) -> None:
        """StepError where what is in effect is not what the config asks for, or where weights in
        full precision are found in other places than those that a step computes with."""
        for name, parameter in self.named.items():
            pair = self.whole(parameter, of_tp=False), self._computed_with(parameter)
            ours, theirs = map(_beginning, pair)
            if (ours - theirs).abs().max() > _ROUNDED:
                what = f"DeepSpeed keeps weights of another tensor for {name}"
                fix = "remove what changes the order of its tensors"
                raise StepError(what, where="train.engine_config", fix=fix)
        zero = config["zero_optimization"]
        moved = [part for part in _MOVED if at(zero, f"offload_{part}", "device") == "cpu"]
        wanted = {
            "ZeRO stage": str(zero["stage"]),
            "ranks": str(self.world),
            "offload": ", ".join(moved) or "none",
            "precision": "bf16" if config["bf16"]["enabled"] else "fp32",
            **({"tp": str(config["tensor_parallel"]["autotp_size"])} if self.tp > 1 else {}),
        }
        facts = self.facts()
        for name, value in wanted.items():
            if facts[name] != value:
                what = f"DeepSpeed trains with {name} {facts[name]}, not {value}"
                fix = "see the log of the step for its warnings"
                raise StepError(what, where="train.engine_config", fix=fix)


def _layout(spec: Spec) -> Iterator[Finding]:
    """Axes that DeepSpeed does not divide by, and what its tensor parallelism is not known with."""
    given, tp = spec.train.engine_config or {}, getattr(spec.train.layout, "tp", 1)
    for axis in ("shard", "pp", "cp"):
        if getattr(spec.train.layout, axis, 1) > 1:
            what = f"DeepSpeed does not divide by {axis}"
            yield ("train", "layout", axis), what, "remove it; ZeRO's stages divide"
    if (said := at(given, "tensor_parallel", "autotp_size")) not in (None, AUTO, tp):
        what = f"`autotp_size` is {json.dumps(said)} here, and train.layout.tp is {tp}"
        fix = "remove it here, and set train.layout.tp"
        yield (*CONFIG, "tensor_parallel", "autotp_size"), what, fix
    if tp > 1 and at(given, "zero_optimization", "stage") == 0:
        what = "stage 0 clips each tp rank alone"
        yield (*CONFIG, "zero_optimization", "stage"), what, "stage: 1"
    if tp > 1 and (spec.model.lora is not None or spec.task == "image_classification"):
        what = "DeepSpeed divides neither adapters nor networks of images"
        yield ("train", "layout", "tp"), what, "use rekindle's engine"


def _adamw(train: TrainSpec) -> dict[str, Any]:
    return {"betas": list(train.betas), "eps": train.eps, "weight_decay": train.weight_decay}


def _refused(given: Mapping[str, Any]) -> Iterator[Finding]:
    """Sections of a `ds_config.json` that DeepSpeed does not have, or rekindle does not take."""
    for key in sorted(set(given) - set(_KNOWN)):
        fix = did_you_mean(key, _KNOWN) or "remove it: DeepSpeed drops what it does not know"
        yield (*CONFIG, key), f"DeepSpeed has no `{key}`", fix
    yield from _misshapen(given)
    for place, seen in _SEEN.items():
        values = at(given, *place)
        for key in sorted(set(values if isinstance(values, Mapping) else ()) - set(seen)):
            open_ = values[key] is None and key.isidentifier()  # `stage:3` is a key, to YAML
            if not open_ and values[key] not in (_DEFAULTS.get(key, False), AUTO):
                fix = did_you_mean(key, seen) or "remove it"
                yield (*CONFIG, *place, key), f"no test has trained with `{key}`", fix
    for key in sorted(set(given) & set(_REFUSED)):
        if _asks(given[key]):
            yield (*CONFIG, key), f"`{key}` is not for rekindle", _REFUSED[key]


def _misshapen(given: Mapping[str, Any]) -> Iterator[Finding]:
    """Sections that are no mappings, stages that are none, and offload that a stage ignores."""
    for key in ("zero_optimization", "optimizer", "bf16", "tensor_parallel"):
        if not isinstance(given.get(key, {}), Mapping):
            yield (*CONFIG, key), f"`{key}` is a mapping of settings", "write {...}"
    stage = at(given, "zero_optimization", "stage")
    if stage not in (None, AUTO, 0, 1, 2, 3) or isinstance(stage, bool):
        what = f"there is no stage {json.dumps(stage)}"
        yield (*CONFIG, "zero_optimization", "stage"), what, "0, 1, 2 or 3, without quotes"
    for part, least in (("param", 3), ("optimizer", 1)):
        place = ("zero_optimization", f"offload_{part}")
        moved, first = at(given, *place), 1 if stage in (None, AUTO) else stage
        if moved is not None and not isinstance(moved, Mapping):
            yield (*CONFIG, *place), f"`{place[-1]}` is a mapping of settings", "{device: cpu}"
        elif at(moved, "device") not in (None, "none", AUTO, "cpu", "nvme"):
            what = f"nothing can be offloaded to `{at(moved, 'device')}`"
            yield (*CONFIG, *place, "device"), what, "cpu"
        elif at(moved, "device") == "cpu" and first in range(least):
            what = f"stage {first} leaves {part}s where they are"
            yield (*CONFIG, *place), what, f"stage: {least}, or remove it"


def _owned(train: TrainSpec) -> dict[tuple[str, ...], tuple[str, Any]]:
    """What DeepSpeed's config may say only as rekindle does (see `contradictions`)."""
    adamw = {"lr": train.lr, **_adamw(train)}
    return {
        ("train_batch_size",): ("global_batch_size", train.global_batch_size),
        ("train_micro_batch_size_per_gpu",): ("micro_batch_size", train.micro_batch_size),
        ("gradient_accumulation_steps",): ("", None),
        ("gradient_clipping",): ("clip_norm", train.clip_norm or 0.0),
        ("bf16", "enabled"): ("precision", train.precision == "bf16"),
        **{("optimizer", "params", name): (name, value) for name, value in adamw.items()},
    }


def _decided(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that are "auto", at any depth."""
    return {k: _decided(v) if isinstance(v, Mapping) else v for k, v in values.items() if v != AUTO}


def _asks(section: Any) -> bool:
    """Whether a section asks for something: it is neither disabled nor all "auto"."""
    if not isinstance(section, Mapping):
        return section not in (None, False, AUTO)
    params = section.get("params")
    left_open = isinstance(params, Mapping) and all(value == AUTO for value in params.values())
    return section.get("enabled", True) not in (False, AUTO) and not left_open
