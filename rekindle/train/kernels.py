"""Which kernel of attention keeps documents apart on a device, asked of the kernel
itself.

The varlen flash-attention kernel takes all documents of a micro-batch at once, on GPUs in
half precision; elsewhere each document is one call of `scaled_dot_product_attention`
(attention.py)."""

import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from rekindle.errors import UnsupportedError
from rekindle.objectives.micro import Documents
from rekindle.spec.layout import Shape
from rekindle.train import attention
from rekindle.train.attention import Kernel

log = logging.getLogger(__name__)

KERNEL_TOLERANCE = 0.05
"""Most that a kernel in half precision may differ, relative to the largest value."""
# what transformers' configs call the dropout of attention
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def takes_groups(device: torch.device) -> bool:
    """Whether a fast kernel takes fewer key-value heads than query heads.

    Flash attention does, from CUDA's compute capability 8.0 on."""
    if device.type != "cuda" or not torch.cuda.is_available():  # a trace has no device to ask
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def kernel_for(network: nn.Module, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that keeps documents apart on this device: `varlen` where it can run with
    heads of this network's size, else `sdpa`, one call a document.

    Raises UnsupportedError where varlen runs, and its results differ from those of sdpa."""
    if device.type != "cuda" or dtype not in attention.HALVES:
        return "sdpa"
    config: Any = network.config
    shape = Shape.of(config.to_dict())
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // shape.heads)
    # two key-value heads are enough to see that grouping works
    heads = shape.heads // shape.kv_heads * 2
    windows: tuple[int | None, ...] = (None,)
    if getattr(config, "sliding_window", None):
        windows = (None, 8)  # shorter than the documents of the comparison, so that it cuts
    try:
        gap = kernel_difference(device, dtype, heads, 2, head_size, windows)
    except (ImportError, RuntimeError, TypeError, ValueError, UnsupportedError) as error:
        reason = str(error).partition("\n")[0]
        log.warning("attention: one call a document, because of the varlen kernel: %s", reason)
        return "sdpa"
    if not gap < KERNEL_TOLERANCE:  # also where it is not a number
        message = f"the varlen attention of torch {torch.__version__} differs by {gap:.2g} from "
        message += f"one call a document on {torch.cuda.get_device_name(device)}"
        fix = "use another build of torch 2.10 to 2.13; `make test-gpu` shows what differs"
        raise UnsupportedError(message, where="train", fix=fix)
    return "varlen"


def kernel_while_training(network: nn.Module, kernel: Kernel) -> Kernel:
    """The kernel that keeps documents apart in training steps, which it logs.

    `varlen` has no dropout, so `sdpa` takes its place where the network has some."""
    if kernel != "varlen":
        return kernel
    for name in ATTENTION_DROPOUTS:
        if getattr(network.config, name, None):
            log.warning(
                "attention: one call a document (of texts with a class: a group) in training "
                "steps, because the varlen kernel has no dropout; set `%s: 0` in the model's "
                "config for one kernel over all documents",
                name,
            )
            return "sdpa"
    log.info("attention: one varlen kernel for all documents of a micro-batch")
    return kernel


def kernel_difference(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    size: int,
    windows: tuple[int | None, ...],
) -> float:
    """How far the varlen kernel is from one call a document, forwards and backwards,
    relative to the largest value: the worst of all `windows`.

    `groups` is the number of key-value heads, `size` that of a head. Raises what the
    kernel raises where it cannot be used."""
    draw = torch.Generator().manual_seed(0)
    # query, key and value
    inputs = [torch.randn(2, count, 64, size, generator=draw) for count in (heads, groups, groups)]
    documents = Documents.of(np.array([[1] * 40 + [2] * 24, [1] * 9 + [2] * 55]))
    documents = documents.with_each(lambda tensor: tensor.to(device))
    worst = 0.0
    for window in windows:
        varlen = _output_and_gradients("varlen", window, inputs, documents, device, dtype)
        one_by_one = _output_and_gradients("sdpa", window, inputs, documents, device, dtype)
        for ours, theirs in zip(varlen, one_by_one, strict=True):
            gap = float((ours - theirs).abs().max() / theirs.abs().max())
            if not gap <= worst:  # as `gap > worst`, and true for NaN
                worst = gap
    return worst


def _output_and_gradients(
    kernel: Kernel,
    window: int | None,
    inputs: list[torch.Tensor],
    documents: Documents,
    device: torch.device,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    call = attention.Call(True, None, 0.0, window, attention.AttentionPeers(kernel=kernel))
    with torch.enable_grad():
        q, k, v = (tensor.to(device, dtype).requires_grad_() for tensor in inputs)
        output = attention.apart(q, k, v, documents, call)
        gradients = torch.autograd.grad(output.float().square().sum(), (q, k, v))
    return [output.detach(), *gradients]
