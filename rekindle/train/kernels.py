"""Which attention kernels a device has: the one that keeps packed documents apart, held against one
call a document before training, and those that take fewer key-value heads than heads."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import nn

from rekindle.errors import UnsupportedError
from rekindle.train import attention
from rekindle.train.micro import Documents

log = logging.getLogger(__name__)

TOLERANCE = 0.05  # of a kernel in half precision, relative to the largest value
# what transformers' configs call the dropout of attention
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def takes_groups(device: torch.device) -> bool:
    """Whether some fast kernel of the device takes fewer key-value heads than heads: flash
    attention does, which needs NVIDIA's compute capability 8.0."""
    if device.type != "cuda" or not torch.cuda.is_available():  # a trace has no device to ask
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def kernel_for(network: nn.Module, device: torch.device, dtype: torch.dtype) -> attention.Kernel:
    """What keeps documents apart on this device: the varlen kernel where it takes the network's
    heads in this type. Raises UnsupportedError where it does but disagrees with one call a
    document.

    To be asked before training: with inference tensors there are no gradients to compare."""
    if device.type != "cuda" or dtype not in attention.HALVES:
        return "sdpa"
    config = network.config.to_dict()  # type: ignore[union-attr, operator]
    heads = next((int(config[n]) for n in ("num_attention_heads", "n_head", "n_heads")
                  if config.get(n)), 1)  # fmt: skip
    groups = int(config.get("num_key_value_heads") or heads)
    width = next((int(config[n]) for n in ("hidden_size", "n_embd", "dim") if config.get(n)), heads)
    size = int(config.get("head_dim") or width // heads)
    windows = (None, 8) if config.get("sliding_window") else (None,)
    try:
        gap = difference(device, dtype, heads // groups * 2, 2, size, windows)
    except (ImportError, RuntimeError, TypeError, ValueError, UnsupportedError) as error:
        reason = str(error).partition("\n")[0]
        log.warning("attention: one call a document, because of the varlen kernel: %s", reason)
        return "sdpa"
    if not gap < TOLERANCE:
        raise UnsupportedError(
            f"the varlen attention of torch {torch.__version__} differs by {gap:.2g} from one call "
            f"a document on {torch.cuda.get_device_name(device)}",
            where="train",
            fix="use another build of torch 2.10 to 2.13; `make test-gpu` shows what differs",
        )
    return "varlen"


def while_training(network: nn.Module, kernel: attention.Kernel) -> attention.Kernel:
    """What keeps documents apart in training steps: `kernel`, but the varlen one has no dropout.

    Logs which it is, and what to set for the varlen kernel."""
    rate = next((name for name in DROPOUTS if getattr(network.config, name, None)), None)
    if kernel == "varlen" and rate is not None:
        log.warning(
            "attention: one call a document (of texts with a class: a group) in training steps, "
            "because the varlen kernel has no dropout; set `%s: 0` in the model's config for one "
            "kernel over all documents", rate,
        )  # fmt: skip
        return "sdpa"
    if kernel == "varlen":
        log.info("attention: one varlen kernel for all documents of a micro-batch")
    return kernel


def difference(
    device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int,
    windows: tuple[int | None, ...],
) -> float:  # fmt: skip
    """How far the varlen kernel is from one call a document, forwards and backwards, relative to
    the largest value. Raises what the kernel raises where it cannot be used."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(2, n, 64, size, generator=draw) for n in (heads, groups, groups)]
    documents = Documents.of(np.array([[1] * 40 + [2] * 24, [1] * 9 + [2] * 55]))
    documents = documents.with_tensors(t.to(device) for t in documents.tensors())
    kernels: tuple[attention.Kernel, ...] = ("varlen", "sdpa")
    worst = 0.0
    for window in windows:
        found = []
        for kernel in kernels:
            call = attention.Call(True, None, 0.0, window, attention.Peers(kernel=kernel))
            with torch.enable_grad():
                q, k, v = (x.to(device, dtype).requires_grad_() for x in made)
                out = attention.apart(q, k, v, documents, call)
                slopes = torch.autograd.grad(out.float().square().sum(), (q, k, v))
            found.append([out.detach(), *slopes])
        for ours, theirs in zip(*found, strict=True):
            gap = float((ours - theirs).abs().max() / theirs.abs().max())
            worst = gap if not gap <= worst else worst  # a gap that is not a number counts
    return worst
