"""Linear layers of blocks in fewer bits: the frozen base of adapters in 4, products in 8.

4 bits are QLoRA's (Dettmers et al. 2023, arXiv 2305.14314): nf4 in blocks of 64 that share a scale
in fp32, as bitsandbytes makes it. A layer quantises its weight when it is filled, so no rank has
more than one matrix in full, and brings it back for each product and gradient. Nothing of it is
saved; export merges adapters into what the codes stand for, which is what was trained.

Products in 8 bits are torchao's: what goes in, weights and gradients get a scale each and are e4m3
or e5m2 for a product (Micikevicius et al. 2022, arXiv 2209.05433); everything else stays as with
bf16, checkpoints and exported models included. A GPU does it from compute capability 8.9 on (L4,
H100). A CPU emulates it, which is slow and shows the same numbers."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from rekindle.errors import StepError, UnsupportedError
from rekindle.plan.quantised import BLOCK
from rekindle.train import modules

if TYPE_CHECKING:
    from rekindle.train.parallel import Parts


class FourBit(nn.Module):
    """A linear layer whose frozen weight, `shape` [outputs, inputs], has 4 bits a number."""

    packed: torch.Tensor
    scales: torch.Tensor
    dtype = torch.float32  # of the whole weight

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.shape, self.bias = like.weight.shape, like.bias
        count = self.shape.numel()
        packed = torch.empty(-(-count // 2), 1, dtype=torch.uint8, device="meta")
        scales = torch.empty(-(-count // BLOCK), device="meta")
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def load(self, weight: torch.Tensor) -> None:
        """Quantise a whole weight. StepError where bitsandbytes has nothing for the device."""
        device = self.packed.device
        quantise = torch.ops.bitsandbytes.quantize_4bit
        try:
            codes = quantise(weight.float().contiguous().to(device), BLOCK, "nf4", torch.uint8)
        except (NotImplementedError, RuntimeError) as error:
            what = f"bitsandbytes cannot quantise on {device}: {error}"
            fix = "use a GPU that it supports, or remove `base: 4bit`"
            raise StepError(what, where="model.lora.base", fix=fix) from error
        self.packed.copy_(codes[0])
        self.scales.copy_(codes[1])

    def whole(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight that the codes stand for."""
        restore = torch.ops.bitsandbytes.dequantize_4bit
        found: torch.Tensor = restore(self.packed, self.scales, BLOCK, "nf4", self.shape, dtype)
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind, device = x.dtype, x.device.type
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
        out: torch.Tensor = _Product.apply(x.to(kind), self)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(kind)


class _Product(torch.autograd.Function):
    """x W' of a frozen W: the backward pass brings W back once more, and nothing is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FourBit) -> torch.Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.whole(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.layer.whole(gradient.dtype), None


def replace(network: nn.Module) -> None:
    """Give linear layers of blocks 4 bits, for `load` to fill. StepError without bitsandbytes."""
    version()
    for name in modules.matrices(network):
        if ".lora_" not in name:
            layer = network.get_submodule(name.removesuffix(".weight"))
            assert isinstance(layer, nn.Linear)
            network.set_submodule(name.removesuffix(".weight"), FourBit(layer))


def layers(network: nn.Module) -> Iterator[tuple[str, FourBit]]:
    return ((n, m) for n, m in network.named_modules() if isinstance(m, FourBit))


def codes_of(parts: Parts) -> list[torch.Tensor]:
    """Codes and scales on this rank."""
    found = (layer for stage in parts.stages for _, layer in layers(stage.part.network))
    return [buffer for layer in found for buffer in layer.buffers()]


def facts(parts: Parts) -> dict[str, str]:
    """What is in effect, in words for the record; nothing without 4 or 8 bits."""
    found, four = {}, len(codes_of(parts)) // 2
    if four:
        found["base"] = f"nf4, {four} matrices, bitsandbytes {version()}"
    if eight := sum(count(stage.part.network) for stage in parts.stages):
        how = "" if parts.mesh.device.type == "cuda" else ", emulated"
        torchao = importlib.metadata.version("torchao")
        found["fp8"] = f"{eight} matrices, torchao {torchao}{how}"
    return found


def version() -> str:
    """Of bitsandbytes, whose operations it registers."""
    found = _imported("bitsandbytes", "a base in 4 bits", "qlora", where="model.lora.base")
    return str(found.__version__)


def _imported(module: str, what: str, extra: str, where: str) -> Any:
    """A module that `what` needs; StepError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"{what} needs {module.partition('.')[0]}, which is not installed: {error}"
        fix = f"pip install 'rekindle[{extra}]', in the image of the step where it has one"
        raise StepError(what, where=where, fix=fix) from None


_MULTIPLE = 16  # of both sides of a matrix, or the GPU has no product for it


def convert(network: nn.Module, device: torch.device) -> None:
    """Have the linear layers of a network's blocks multiply in 8 bits. StepError without torchao,
    UnsupportedError where no matrix or no GPU will do."""
    torchao = _imported("torchao.float8", "fp8", "fp8", where="train.precision")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        what = f"{torch.cuda.get_device_name(device)} does not multiply in fp8"
        fix = "use GPUs that do (NVIDIA's L4, L40S, H100 and later), or bf16"
        raise UnsupportedError(what, where="train.precision", fix=fix)
    emulated = device.type != "cuda"
    config = torchao.Float8LinearConfig(emulate=emulated, pad_inner_dim=True)
    kind = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    for name in sorted(each.removesuffix(".weight") for each in modules.matrices(network)):
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if layer.in_features % _MULTIPLE == 0 == layer.out_features % _MULTIPLE:
            made = kind.from_float(layer, config)
            if emulated:  # torchao asks for CUDA's autocast alone
                made.register_forward_pre_hook(_narrowed)
            network.set_submodule(name, made)
    if not count(network):
        what = "no matrix of a transformer's block has sides that 16 divides, and fp8 multiplies no"
        raise UnsupportedError(f"{what} others", where="train.precision", fix="bf16")


def count(network: nn.Module) -> int:
    """Matrices that are multiplied in 8 bits."""
    return sum(type(module).__name__ == "Float8Linear" for module in network.modules())


def _narrowed(module: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    if torch.is_autocast_enabled("cpu"):
        return (given[0].to(torch.get_autocast_dtype("cpu")),)
    return given
