"""DeepSpeed at work on one rank: compiled, started, asked for updates and for its state.

What is private to DeepSpeed is read here alone."""

from __future__ import annotations

import fcntl
import importlib
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.engines.base import EngineConfig, Fragment, at, by_decay
from rekindle.engines.deepspeed import NO_FULL_PRECISION, OFFLOADED
from rekindle.errors import StepError

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger(__name__)

_EXTENSIONS = "TORCH_EXTENSIONS_DIR"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_COMPARED = 256  # numbers of a weight
_ROUNDED = 2e-2  # bf16 rounds by 0.4 %


def start(
    part: nn.Module,
    config: EngineConfig,
    device: torch.device,
    tp: int,
    divided: Mapping[str, Sequence[str]],
) -> DeepSpeedStepper:
    """Take over the filled part. StepError where what is in effect was not asked for.

    `config` is a whole `ds_config.json`. Tp ranks divide the modules of these names by
    "column" or "row", and add up slopes of "skip"."""
    import torch.distributed as dist

    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except ImportError as error:
        message = f"the engine deepspeed is not installed: {error}"
        fix = "pip install 'rekindle[deepspeed]', in the image of the step where it has one"
        raise StepError(message, where="train.engine", fix=fix) from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if divided:
        config["tensor_parallel"] = _tensor_parallel(tp, divided)
        _keep_shares()
    if config["bf16"]["enabled"] and not config["zero_optimization"]["stage"]:
        fix = "stage: 1, or precision: fp32"
        raise StepError(NO_FULL_PRECISION, where="train.engine_config", fix=fix)
    trained = [parameter for parameter in part.parameters() if parameter.requires_grad]
    _compile(config)
    # an operator for inference, which would be compiled
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    communication.build_shm_op = lambda: None
    exact = {}
    for name, buffer in part.named_buffers():
        if buffer.is_floating_point():
            exact[name] = buffer.clone()
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False
    )
    engine, *_ = deepspeed.initialize(
        model=part,
        model_parameters=[group for group in by_decay(trained) if group["params"]],
        config=config,
        dist_init_required=False,
    )
    if divided:  # it compares what tp ranks get by pickles
        engine.first_dataloader_check.remove()
    for name, buffer in part.named_buffers():
        if name in exact and buffer.dtype != exact[name].dtype:
            buffer.data = exact[name]  # positions, which bf16 would round
    stepper = DeepSpeedStepper(engine, part)
    stepper.require(config)
    return stepper


def _tensor_parallel(tp: int, divided: Mapping[str, Sequence[str]]) -> EngineConfig:
    """DeepSpeed's section of that name: which modules are divided how."""
    specs = []
    for how, names in divided.items():
        specs.append(
            {
                "patterns": [rf".*\.{re.escape(name)}\.weight$" for name in names],
                "partition_type": how,
                "grad_allreduce": how == "skip",
            }
        )
    return {
        "autotp_size": tp,
        "vocab_parallel_lm_head": False,
        "partition_config": {"use_default_specs": False, "layer_specs": specs},
    }


def _keep_shares() -> None:
    """Have DeepSpeed add up a copy of each share: `selective` checkpointing keeps the share."""
    layers: Any = importlib.import_module("deepspeed.module_inject.layers")
    add_up = layers.RowParallel.forward  # in place
    layers.RowParallel.forward = staticmethod(
        lambda ctx, group, share, _: add_up(ctx, group, share.contiguous().clone(), _)
    )


def _beginning(values: torch.Tensor) -> torch.Tensor:
    """The first numbers of a tensor, relative to the largest of them."""
    first = values.detach().flatten()[:_COMPARED].float().cpu()
    return first / first.abs().max().clamp(min=1e-12)


def _compile(config: Mapping[str, object]) -> None:
    """Compile what DeepSpeed would at its first use, once a machine; StepError where it
    fails.

    The lock of torch is a file, which a killed process leaves for ever; ours is the
    kernel's."""
    if at(config, "zero_optimization", "offload_optimizer", "device") == "cpu":
        name = "CPUAdamBuilder"
    elif not at(config, "optimizer", "params", "torch_adam"):
        name = "FusedAdamBuilder"
    else:
        return
    from deepspeed.accelerator import get_accelerator

    tools = str(Path(sys.executable).parent)  # ninja is there
    os.environ["PATH"] = os.pathsep.join([tools, os.environ.get("PATH", "")])
    users_folder = os.environ.get(_EXTENSIONS)
    if users_folder:
        folder = Path(users_folder)
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "rekindle" / "torch_extensions"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[_EXTENSIONS] = str(folder)
    with (folder / "rekindle.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not users_folder:  # in which others may be compiling
            for lock_of_torch in folder.glob("**/lock"):
                lock_of_torch.unlink()
        log.info("compiling DeepSpeed's %s, unless that was done before", name)
        try:
            get_accelerator().create_op_builder(name).load(verbose=False)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            message = f"DeepSpeed cannot compile {name}: {error}"
            fix = "install g++, or remove offload_optimizer"
            raise StepError(message, where="train.engine_config", fix=fix) from error


class DeepSpeedStepper:
    """One rank's side: it takes losses and makes the updates. `module` runs a micro-batch."""

    def __init__(self, engine: Any, part: Any) -> None:
        import torch
        import torch.distributed as dist

        self.module = engine
        self.zero = engine.optimizer
        self.ranks = engine.dp_world_size
        self.world = dist.get_world_size()
        self.tp = self.world // self.ranks
        self.stage = engine.zero_optimization_stage()
        self.trained: dict[str, torch.Tensor] = {}
        for name, parameter in part.network.named_parameters():
            if parameter.requires_grad:
                self.trained[name] = parameter
        self.inner = engine.basic_optimizer
        self.updates = torch.zeros(1)
        is_deepspeeds_own = type(self.inner).__module__.startswith("deepspeed.")
        for flat in self._flat():  # the optimizer would make it at the first update
            moments = {name: torch.zeros_like(flat) for name in _MOMENTS}
            # DeepSpeed's own optimizers count in Python, torch's on the device
            count = 0 if is_deepspeeds_own else torch.zeros((), device=flat.device)
            self.inner.state[flat] = {"step": count, **moments}
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._lazy_init_hp_params_optimizer_state()

    def _flat(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates: this rank's part of each group, flattened."""
        if self.stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return [tensor for group in self.inner.param_groups for tensor in group["params"]]

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradients of a micro-batch; `is_last`: of the last one of a step."""
        self.module.set_gradient_accumulation_boundary(is_last)
        self.module.backward(loss * self.ranks)

    def step(self, rate: float) -> float:
        """Update at this rate, if finite; returns the gradients' norm before clipping."""
        for group in self.zero.param_groups:
            group["lr"] = rate
        if self.zero is not self.inner:  # it looks for numbers that are not finite by itself
            self.module.step()
            return float(self.module.get_global_grad_norm())
        import torch

        gradients = []
        for parameter in self.trained.values():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
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
        fragments = {"updates": Fragment(self.updates, 0, 1)}
        for name, parameter in self.trained.items():
            part = self._part(parameter)
            for key in ("", *_MOMENTS):
                fragment = self._fragment(parameter, key)
                if fragment is not None:
                    tensor_name = f"{name}.{key}" if key else name
                    fragments[tensor_name + part] = fragment
        return fragments

    def _part(self, parameter: Any) -> str:
        """What the name of a tensor ends with of which each tp rank holds another part."""
        if not hasattr(parameter, "gather_params"):
            return ""
        return f"@{self.module.mpu.get_tensor_model_parallel_rank()} of tp {self.tp}"

    def _fragment(self, parameter: Any, key: str) -> Fragment | None:
        """What this rank holds of a moment, or of the weight ("" for its key)."""
        if self.stage == 3:
            local, _ = self.zero._get_fp32_opt_state_partition(parameter, False, key or None)
            start = self.zero._get_param_partition_rank(parameter) * local.numel()
            # the last ranks' partitions are filled up
            count = max(0, min(local.numel(), parameter.ds_numel - start))
            return Fragment(local[:count], start, parameter.ds_numel)
        if not hasattr(parameter, "_hp_mapping"):
            value = self.inner.state[parameter][key] if key else parameter.detach()
            return Fragment(value.view(-1), 0, value.numel())
        mapping = parameter._hp_mapping
        if mapping is None:
            return None  # other ranks hold all of it
        local = mapping.get_hp_fragment(key or None)
        return Fragment(local, mapping.lp_fragment_address.start, parameter.numel())

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

        exact = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        value = self._computed_with(parameter) if exact is None else exact.detach()
        gather = getattr(parameter, "gather_params", None)
        if of_tp and gather is not None:
            value = value.clone()
            gather([value])  # it puts the whole in the tensor's place
        return value

    def _computed_with(self, parameter: torch.Tensor) -> torch.Tensor:
        """The value that a step multiplies with, in its precision."""
        import deepspeed

        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def facts(self) -> Mapping[str, str]:
        """What is in effect, in words for the record: version, stage, optimizer and the like."""
        import deepspeed
        import torch.distributed as dist

        offloaded = []
        for part in OFFLOADED:
            offload = getattr(self.module, f"zero_offload_{part}")()
            if offload and offload.device == "cpu":
                offloaded.append(part)
        facts = {
            "deepspeed": deepspeed.__version__,
            "ZeRO stage": str(self.stage),
            "optimizer": type(self.inner).__name__,
            "backend": dist.get_backend(),
            "ranks": str(self.ranks * self.tp),
            "offload": ", ".join(offloaded) or "none",
            "precision": "bf16" if self.module.bfloat16_enabled() else "fp32",
        }
        if self.tp > 1:
            is_divided = any(self._part(parameter) for parameter in self.trained.values())
            facts["tp"] = str(self.tp if is_divided else 1)
        return facts

    def require(self, config: EngineConfig) -> None:
        """StepError where what is in effect is not what the config asks for, or where
        weights in full precision are found in other places than those that a step
        computes with."""
        for name, parameter in self.trained.items():
            master = _beginning(self.whole(parameter, of_tp=False))
            computed_with = _beginning(self._computed_with(parameter))
            if (master - computed_with).abs().max() > _ROUNDED:
                message = f"DeepSpeed keeps weights of another tensor for {name}"
                fix = "remove what changes the order of its tensors"
                raise StepError(message, where="train.engine_config", fix=fix)
        facts = self.facts()
        for name, value in self._asked_for(config).items():
            if facts[name] != value:
                message = f"DeepSpeed trains with {name} {facts[name]}, not {value}"
                fix = "see the log of the step for its warnings"
                raise StepError(message, where="train.engine_config", fix=fix)

    def _asked_for(self, config: EngineConfig) -> dict[str, str]:
        """What the config asks for, in the words of `facts`."""
        zero = config["zero_optimization"]
        offloaded = [part for part in OFFLOADED if at(zero, f"offload_{part}", "device") == "cpu"]
        facts = {
            "ZeRO stage": str(zero["stage"]),
            "ranks": str(self.world),
            "offload": ", ".join(offloaded) or "none",
            "precision": "bf16" if config["bf16"]["enabled"] else "fp32",
        }
        if self.tp > 1:
            facts["tp"] = str(config["tensor_parallel"]["autotp_size"])
        return facts
