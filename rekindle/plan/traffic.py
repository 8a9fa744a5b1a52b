"""What a block moves through the GPU's memory besides products and attention: norms, residual
sums, the activation, rotary positions.

Counted operation by operation, as many numbers as each reads and writes, forward and backward, of 2
bytes (4 where it computes in fp32): an eager block runs one kernel an operation, a fused one a
kernel for each norm, gate and rotary position, a compiled one a kernel for each chain of them."""

from __future__ import annotations

import dataclasses

from rekindle.plan.shape import ModelShape
from rekindle.plan.work import Kernels


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes a token of one block. `stream` is that of the residual stream (norms and sums), `inner`
    that between the divided matrices (activation, rotary positions); each forward, backward."""

    stream: tuple[float, float]
    inner: tuple[float, float]


def traffic(shape: ModelShape, kernels: Kernels, dropout: bool = False) -> Traffic:
    """Of a model in 16 bits. A GPT-2 block, eager, 768 wide: 20 d_model + 16 d_model forward."""
    width, wide = shape.d_model, shape.ffn
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim if shape.norm == "rms" else 0
    norms = 2 * width
    if kernels == "compiled":  # a norm reads the sum that it is fused with, and writes both
        stream = (norms * 8.0, norms * 12.0)
    else:
        # layer norm is one kernel; RMS norm as transformers writes it is six, four of them in fp32
        slow = kernels == "eager" and shape.norm == "rms"
        norm = (34.0, 60.0) if slow else (4.0, 8.0)
        stream = (norms * (norm[0] + 6.0), norms * (norm[1] + 6.0))
    if kernels == "eager":
        gate = (10.0, 18.0) if shape.gated else (4.0, 6.0)
        turn = (20.0, 26.0)
    else:
        gate = (6.0, 10.0) if shape.gated else (4.0, 6.0)
        turn = (4.0, 4.0)
    if dropout:  # fused with the sum it adds a mask of a byte, forward; backward it is a kernel
        once = 5.0 if kernels == "eager" else 1.0
        stream = (stream[0] + norms * once, stream[1] + norms * 5.0)
    biases = sum(2.0 * m.outputs for m in shape.matrices if m.bias)  # their gradients read all
    inner = (gate[0] * wide + turn[0] * rotated, gate[1] * wide + turn[1] * rotated + biases)
    return Traffic(stream, inner)
