"""The loop that a practitioner writes by hand for one model, as torchtitan's examples do: blocks compiled one by one, bf16 arithmetic,
fused AdamW, packed documents in one varlen call, the loss in chunks of tokens, FSDP2 where there are several ranks.

It knows one model, saves nothing, cannot be interrupted, and asks the device for nothing between two steps: what an engine costs
beyond that shows beside it. Called by peers.py."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORED = -100
CHUNKS = 8  # of the loss
NAME = "by_hand"


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    starts: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One varlen call for all documents of a micro-batch; on a CPU one call a document."""
    rows, heads, length, size = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    assert starts is not None
    if q.is_cuda:
        from rekindle.train.compat import varlen_attn  # torch's, whose keywords differ by version

        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
        out = varlen_attn(
            q,
            k,
            v,
            starts,
            starts,
            length,
            length,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=heads != k.shape[1],
        )
    else:
        pieces = zip(*(x.split(starts.diff().tolist()) for x in (q, k, v)), strict=True)
        done = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in piece),
                is_causal=True,
                scale=scaling,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for piece in pieces
        ]
        out = torch.cat(done)
    return out.view(rows, length, heads, size), None


def starts_of(positions: torch.Tensor) -> torch.Tensor:
    """int32 [documents + 1] on the host, from position ids [B, T] that start anew in each document; padding is many documents of one."""
    firsts = (positions == 0).flatten().nonzero()[:, 0]
    return torch.cat([firsts, torch.tensor([positions.numel()])]).to(torch.int32)


def chunked_loss(hidden: torch.Tensor, head: torch.nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token; logits of one chunk at a time, computed once more in the backward pass."""

    def piece(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(states).float(), targets, ignore_index=IGNORED, reduction="sum")

    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    pairs = zip(hidden.flatten(0, 1).chunk(CHUNKS), targets.chunk(CHUNKS), strict=True)
    parts: list[torch.Tensor] = [checkpoint(piece, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(parts).sum() / (targets != IGNORED).sum()


def prepared(wish: dict[str, Any], device: torch.device) -> tuple[Any, Any, Any]:
    """Model, backbone and head."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(NAME, attend)
    model = dict(wish["model"])
    config = AutoConfig.for_model(model.pop("model_type"), **model, use_cache=False)
    config._attn_implementation = NAME
    dtype = torch.bfloat16 if wish["weights"] == "bf16" else torch.float32
    with device:
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    whole: Any = network
    body, head = network.base_model, network.get_output_embeddings()
    if wish["lora"]:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        whole = get_peft_model(network, adapters)
    if hasattr(body, "warn_if_padding_and_no_attention_mask"):
        body.warn_if_padding_and_no_attention_mask = lambda *_: None  # reads from the device
    blocks = body.h if hasattr(body, "h") else body.layers
    for block in blocks:
        if wish["recompute"]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if wish["compile"]:
            block.forward = torch.compile(block.forward)
    if dist.is_initialized():
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(network, mp_policy=policy)
    return whole.train(), body, head


def batches(
    rows: list[Any], pad: Any, micro: int, each: int, rank: int, world: int
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The micro-batches of this rank, a step at a time, in the memory that a device copies from."""
    for low in range(0, len(rows) - each + 1, each):
        step = []
        for first in range(low + rank * micro, low + each, micro * world):
            batch = pad(rows[first : first + micro])
            batch["starts"] = starts_of(batch["position_ids"])
            pinned = torch.cuda.is_available()
            step.append({name: t.pin_memory() if pinned else t for name, t in batch.items()})
        yield step


def by_hand(wish: dict[str, Any], rows: list[dict[str, Any]], pad: Any) -> dict[str, Any]:
    """Seconds of the steps after the warm ones, and the most bytes of tensors."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    network, body, head = prepared(wish, device)
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=wish["lr"], weight_decay=0.0, fused=True)
    began = 0.0
    steps = batches(rows, pad, wish["micro"], wish["batch_size"], rank, world)
    for number, step in zip(range(wish["steps"]), steps, strict=False):
        for batch in step:
            ids, positions, labels, starts = (
                batch[name].to(device, non_blocking=True)
                for name in ("input_ids", "position_ids", "labels", "starts")
            )
            with torch.autocast(device.type, torch.bfloat16):
                states = body(
                    input_ids=ids, position_ids=positions, starts=starts
                ).last_hidden_state
                loss = chunked_loss(states, head, labels) / len(step)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number + 1 in (wish["warm"], wish["steps"]):
            if cuda:
                torch.cuda.synchronize()
            if number + 1 == wish["warm"]:
                began = time.perf_counter()
    seconds = time.perf_counter() - began
    memory = torch.cuda.max_memory_allocated() if cuda else 0
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"seconds": seconds, "memory_bytes": memory, "loss": float(loss.detach()) * len(step)}
