"""Linear layers in 8 bits, by oneDNN: no answer depends on what shares its batch."""

import functools

import torch

# the largest weight of 8 bits, and of 7
FULL = 127
HALF = 63


@functools.cache
def largest_weight() -> int:
    """The largest weight that is multiplied without an error here. x86 without VNNI adds
    each two products of inputs and weights in 16 bits and cuts off what is too large: 2 x
    255 x 127 is, 2 x 255 x 63 is not (oneDNN, "Nuances of int8 computations"). This
    processor is asked."""
    width = 64
    weight = torch.full((1, width), FULL, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    inputs = torch.full((1, width), 255, dtype=torch.uint8)
    scale = torch.ones(1)
    zero = torch.zeros(1, dtype=torch.int32)
    product = _qlinear(inputs, 0, packed, scale, zero)
    return FULL if float(product) == 255 * FULL * width else HALF


def _qlinear(
    inputs: torch.Tensor,
    zero: int,
    packed: torch.Tensor,
    scales_O: torch.Tensor,
    zeros_O: torch.Tensor,
) -> torch.Tensor:
    """[..., O], float32: oneDNN's product of weights and uint8 inputs,
    whose zero is `zero`."""
    # after the weights: no bias, the outputs' scale
    # and zero, their type, and nothing behind it
    outputs: tuple[object, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
    product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        inputs, 1.0, zero, packed, scales_O, zeros_O, *outputs
    )
    return product


class Int8Linear(torch.nn.Module):
    """A linear layer in 8 bits, by oneDNN: weights are scaled a row each, and so is what
    it is given, that no answer depends on what shares its batch. Weights have 7 bits
    where a processor needs that. Shapes: I inputs, O outputs."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight_OI = linear.weight.detach()
        self.bias = linear.bias
        # a row of zeros has no scale: the bound keeps it from a division by zero
        self.scales_O = weight_OI.abs().amax(1).clamp(min=1e-12) / largest_weight()
        self.zeros_O = torch.zeros(len(weight_OI), dtype=torch.int32)
        weight_OI = (weight_OI / self.scales_O[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(weight_OI, None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., O] of [..., I]."""
        scale = inputs.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        # oneDNN takes inputs without a sign: -127..127 become 1..255 around 128
        whole = (inputs / scale).round_().add_(128).to(torch.uint8)
        outputs = _qlinear(whole, 128, self.packed, self.scales_O, self.zeros_O)
        outputs *= scale
        return outputs if self.bias is None else outputs + self.bias


def in_int8(network: torch.nn.Module) -> torch.nn.Module:
    """The network with its linear layers in 8 bits, replaced in place."""
    # a class derived from it may compute otherwise
    if type(network) is torch.nn.Linear:
        return Int8Linear(network)
    for name, part in network.named_children():
        setattr(network, name, in_int8(part))
    return network
