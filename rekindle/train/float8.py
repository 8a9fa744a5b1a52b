"""Products of a block's matrices in 8 bits, as torchao trains them: what goes in, weights and
gradients get a scale each and are e4m3 or e5m2 for a product (Micikevicius et al. 2022, arXiv
2209.05433); sums, weights, moments and everything else stay as with bf16.

A GPU does it from compute capability 8.9 on (L4, H100). A CPU emulates it, which is slow and shows
the same numbers. The names of weights stay, so checkpoints and exported models are ordinary."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rekindle.errors import StepError, UnsupportedError
from rekindle.train import modules

if TYPE_CHECKING:
    from rekindle.train.parallel import Parts

_WHERE = "train.precision"
_MULTIPLE = 16  # of both sides of a matrix, or the GPU has no product for it


def convert(network: nn.Module, device: torch.device) -> None:
    """Have the linear layers of a network's blocks multiply in 8 bits. StepError without torchao,
    UnsupportedError where no matrix or no GPU will do."""
    try:
        torchao: Any = importlib.import_module("torchao.float8")
    except ImportError as error:
        what = f"fp8 needs torchao, which is not installed: {error}"
        fix = "pip install 'rekindle[fp8]', in the image of the step where it has one"
        raise StepError(what, where=_WHERE, fix=fix) from None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        what = f"{torch.cuda.get_device_name(device)} does not multiply in fp8"
        fix = "use GPUs that do (NVIDIA's L4, L40S, H100 and later), or bf16"
        raise UnsupportedError(what, where=_WHERE, fix=fix)
    emulated = device.type != "cuda"
    config = torchao.Float8LinearConfig(emulate=emulated, pad_inner_dim=True)
    kind = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    found = [name.removesuffix(".weight") for name in modules.matrices(network)]
    for name in sorted(found):
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if layer.in_features % _MULTIPLE == 0 == layer.out_features % _MULTIPLE:
            made = kind.from_float(layer, config)
            if emulated:  # torchao asks for CUDA's autocast alone
                made.register_forward_pre_hook(_narrowed)
            modules.replace(network, name, made)
    if not count(network):
        raise UnsupportedError(
            "no matrix of a transformer's block has sides that 16 divides, and fp8 multiplies no "
            "others", where=_WHERE, fix="bf16",
        )  # fmt: skip


def count(network: nn.Module) -> int:
    """Matrices that are multiplied in 8 bits."""
    return sum(type(module).__name__ == "Float8Linear" for module in network.modules())


def facts(parts: Parts) -> dict[str, str]:
    """What is in effect, in words for the record; nothing without fp8."""
    if not (matrices := sum(count(stage.part.network) for stage in parts.stages)):
        return {}
    how = "" if parts.mesh.device.type == "cuda" else ", emulated"
    return {"fp8": f"{matrices} matrices, torchao {importlib.metadata.version('torchao')}{how}"}


def _narrowed(module: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    if torch.is_autocast_enabled("cpu"):
        return (given[0].to(torch.get_autocast_dtype("cpu")),)
    return given
