"""Linear layers of blocks in fewer bits: the frozen base of adapters in 4, products in 8.

4 bits are QLoRA's (Dettmers et al. 2023, arXiv 2305.14314): nf4 in blocks of 64 that
share a scale in fp32, as bitsandbytes makes it. A layer quantises its weight when it is
filled, so no rank has more than one matrix in full, and brings it back for each product
and gradient. Nothing of it is saved; export merges adapters into what the codes stand
for, which is what was trained.

Products in 8 bits are torchao's: what goes in, weights and gradients get a scale each and
are e4m3 or e5m2 for a product (Micikevicius et al. 2022, arXiv 2209.05433); everything
else stays as with bf16, checkpoints and exported models included. A GPU does it from
compute capability 8.9 on (L4, H100). A CPU emulates it, which is slow and shows the same
numbers."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rekindle.errors import StepError, UnsupportedError
from rekindle.plan.quantised import BLOCK
from rekindle.train import modules

_MULTIPLE = 16  # of both sides of a matrix, or the GPU has no product for it


class FourBit(nn.Module):
    """A linear layer whose frozen weight, `shape` [outputs, inputs], has 4 bits a number."""

    packed: torch.Tensor
    scales: torch.Tensor
    dtype = torch.float32  # of the whole weight

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.shape = like.weight.shape
        self.bias = like.bias
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
            message = f"bitsandbytes cannot quantise on {device}: {error}"
            fix = "use a GPU that it supports, or remove `base: 4bit`"
            raise StepError(message, where="model.lora.base", fix=fix) from error
        self.packed.copy_(codes[0])
        self.scales.copy_(codes[1])

    def whole(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight that the codes stand for."""
        restore = torch.ops.bitsandbytes.dequantize_4bit
        weight: torch.Tensor = restore(self.packed, self.scales, BLOCK, "nf4", self.shape, dtype)
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        product: torch.Tensor = _Product.apply(x.to(dtype), self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """x W' of a frozen W: the backward pass brings W back once more, and nothing is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FourBit) -> torch.Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.whole(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
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
    """Name and layer of what has 4 bits."""
    for name, module in network.named_modules():
        if isinstance(module, FourBit):
            yield name, module


def codes_of(networks: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Codes and scales of these networks' 4-bit layers."""
    buffers = list[torch.Tensor]()
    for network in networks:
        for _, layer in layers(network):
            buffers += layer.buffers()
    return buffers


def facts(networks: Sequence[nn.Module], device: torch.device) -> dict[str, str]:
    """What is in effect, in words for the record; nothing without 4 or 8 bits."""
    facts_by_name = {}
    # codes and scales: two buffers a matrix
    matrices_of_4_bits = len(codes_of(networks)) // 2
    if matrices_of_4_bits:
        facts_by_name["base"] = f"nf4, {matrices_of_4_bits} matrices, bitsandbytes {version()}"
    matrices_of_8_bits = sum(count(network) for network in networks)
    if matrices_of_8_bits:
        how = "" if device.type == "cuda" else ", emulated"
        torchao = importlib.metadata.version("torchao")
        facts_by_name["fp8"] = f"{matrices_of_8_bits} matrices, torchao {torchao}{how}"
    return facts_by_name


def version() -> str:
    """Of bitsandbytes, whose operations it registers."""
    bitsandbytes = _import("bitsandbytes", "a base in 4 bits", "qlora", where="model.lora.base")
    return str(bitsandbytes.__version__)


def _import(module: str, purpose: str, extra: str, where: str) -> Any:
    """A module that something needs; StepError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        message = f"{purpose} needs {package}, which is not installed: {error}"
        fix = f"pip install 'rekindle[{extra}]', in the image of the step where it has one"
        raise StepError(message, where=where, fix=fix) from None


def convert(network: nn.Module, device: torch.device) -> None:
    """Have the linear layers of a network's blocks multiply in 8 bits.

    StepError without torchao, UnsupportedError where no matrix or no GPU will do."""
    torchao = _import("torchao.float8", "fp8", "fp8", where="train.precision")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        message = f"{torch.cuda.get_device_name(device)} does not multiply in fp8"
        fix = "use GPUs that do (NVIDIA's L4, L40S, H100 and later), or bf16"
        raise UnsupportedError(message, where="train.precision", fix=fix)
    is_emulated = device.type != "cuda"
    config = torchao.Float8LinearConfig(emulate=is_emulated, pad_inner_dim=True)
    kind = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    for name in sorted(weight.removesuffix(".weight") for weight in modules.matrices(network)):
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0:
            converted = kind.from_float(layer, config)
            if is_emulated:  # torchao asks for CUDA's autocast alone
                converted.register_forward_pre_hook(_narrowed)
            network.set_submodule(name, converted)
    if not count(network):
        message = "no matrix of a transformer's block has sides that 16 divides, and fp8 "
        message += "multiplies no others"
        raise UnsupportedError(message, where="train.precision", fix="bf16")


def count(network: nn.Module) -> int:
    """Matrices that are multiplied in 8 bits."""
    return sum(type(module).__name__ == "Float8Linear" for module in network.modules())


def _narrowed(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    if torch.is_autocast_enabled("cpu"):
        return (inputs[0].to(torch.get_autocast_dtype("cpu")),)
    return inputs
