"""Attention that keeps packed documents apart, that works on a divided sequence, and whose dropout
does not depend on who holds which head.

Registered with transformers under `NAME`, so that every architecture's own forward calls it. What
it needs of a sequence travels where transformers carries a ready mask: a 4-D integer tensor
`sequence_B12S` of document numbers (0 = padding) and positions in the whole sequence, of all S
tokens, in the order in which context-parallel ranks hold them. A boolean mask or none is treated as
transformers' own.

Shapes: B rows, H heads, G key-value heads, T local tokens, S tokens of all context-parallel ranks,
D head size. Context parallelism gathers keys and values (Llama 3, arXiv 2407.21783, 3.3.2)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.functional import scaled_dot_product_attention as sdpa

NAME = "rekindle"
PEERS = "rekindle_peers"


@dataclasses.dataclass
class Peers:
    """How heads and tokens are divided: this rank's place among its tp and cp peers."""

    tp_rank: int = 0
    cp_rank: int = 0
    cp_group: dist.ProcessGroup | None = None


def install(network: nn.Module, peers: Peers) -> None:
    """Make the network's attention modules use `attend` with these peers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _padding_mask)
    config: Any = network.config
    config._attn_implementation = NAME
    for module in network.modules():
        if hasattr(module, "is_causal"):
            setattr(module, PEERS, peers)


def _padding_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """A mask where there is padding to hide. transformers would make one, too, when position ids
    start anew in a sequence; but what keeps documents apart here is `sequence_B12S`."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def attend(
    module: nn.Module,
    query_BHTD: torch.Tensor,
    key_BGTD: torch.Tensor,
    value_BGTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """[B, T, H, D], as transformers' attention functions return it, and no weights."""
    peers: Peers = getattr(module, PEERS)
    causal = bool(module.is_causal) if is_causal is None else is_causal
    sequence = attention_mask if _is_sequence(attention_mask) else None
    if peers.cp_group is not None:
        assert sequence is not None
        mask = _mask(sequence, causal, query_BHTD.shape[2], peers.cp_rank)
        key_BGTD, value_BGTD = (_gathered(x, peers.cp_group) for x in (key_BGTD, value_BGTD))
        out = _one(query_BHTD, key_BGTD, value_BGTD, mask, False, scaling, dropout, peers)
    elif sequence is None:
        causal = causal and attention_mask is None and query_BHTD.shape[2] > 1
        out = _one(
            query_BHTD, key_BGTD, value_BGTD, attention_mask, causal, scaling, dropout, peers
        )
    elif query_BHTD.is_cuda or dropout or torch.compiler.is_compiling():
        mask = _mask(sequence, causal, query_BHTD.shape[2], 0)
        out = _one(query_BHTD, key_BGTD, value_BGTD, mask, False, scaling, dropout, peers)
    else:
        out = _by_document(query_BHTD, key_BGTD, value_BGTD, sequence, causal, scaling)
    return out.transpose(1, 2), None


def _is_sequence(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.int64


def _mask(sequence_B12S: torch.Tensor, causal: bool, local: int, cp_rank: int) -> torch.Tensor:
    """bool [B, 1, T, S]: same document, and not later."""
    documents_BS, positions_BS = sequence_B12S[:, 0, 0], sequence_B12S[:, 0, 1]
    mine = slice(cp_rank * local, (cp_rank + 1) * local)
    mask = documents_BS[:, mine, None] == documents_BS[:, None, :]
    if causal:
        mask = mask & (positions_BS[:, None, :] <= positions_BS[:, mine, None])
    return mask[:, None]


def _gathered(x_BGTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered: torch.Tensor = all_gather_tensor_autograd(x_BGTD.contiguous(), 2, group)
    return gathered


def _by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence_B12S: torch.Tensor,
    causal: bool, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """One document after the other: no work is spent between documents, which a mask would only
    throw away. For the CPU, where a call costs little."""
    documents_BS = sequence_B12S[:, 0, 0]
    gqa = query.shape[1] != key.shape[1]
    rows = []
    for b in range(query.shape[0]):
        changes = torch.nonzero(documents_BS[b, 1:] != documents_BS[b, :-1]).flatten() + 1
        ends = [*changes.tolist(), documents_BS.shape[1]]
        pieces, start = [], 0
        for end in ends:
            span = (slice(b, b + 1), slice(None), slice(start, end))
            pieces.append(
                sdpa(
                    query[span], key[span], value[span],
                    is_causal=causal and end - start > 1, scale=scaling, enable_gqa=gqa,
                )
            )  # fmt: skip
            start = end
        rows.append(torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0])
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    causal: bool, scaling: float | None, dropout: float, peers: Peers,
) -> torch.Tensor:  # fmt: skip
    gqa = query.shape[1] != key.shape[1]
    if not dropout:
        return sdpa(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=gqa
        )
    return _with_dropout(query, key, value, mask, causal, scaling, dropout, peers)


def _with_dropout(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    causal: bool, scaling: float | None, dropout: float, peers: Peers,
) -> torch.Tensor:  # fmt: skip
    """Written out, because the mask of each head has to be the same whichever rank holds it."""
    heads = query.shape[1]
    if key.shape[1] != heads:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores_BHTS = query @ key.transpose(-1, -2)
    scores_BHTS = scores_BHTS * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if causal:
        size = scores_BHTS.shape[-1]
        mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores_BHTS = scores_BHTS.masked_fill(~mask, float("-inf"))
    weights_BHTS = torch.softmax(scores_BHTS, dim=-1, dtype=torch.promote_types(
        scores_BHTS.dtype, torch.float32
    )).to(query.dtype)  # fmt: skip
    keep_BHTS = _keep(weights_BHTS, dropout, peers)
    return (weights_BHTS * keep_BHTS) @ value


def _keep(weights_BHTS: torch.Tensor, dropout: float, peers: Peers) -> torch.Tensor:
    """0 or 1 / (1 - dropout), drawn head by head from the state of the default generator, which tp
    peers share, and the head's number in the whole layer."""
    heads = weights_BHTS.shape[1]
    base = int(torch.randint(2**62, (1,)))
    keep_BHTS = torch.empty_like(weights_BHTS)
    generator = torch.Generator(weights_BHTS.device)
    for head in range(heads):
        place = (peers.cp_rank << 20) + peers.tp_rank * heads + head
        generator.manual_seed((base + place * 0x9E3779B97F4A7C15) % 2**63)
        keep_BHTS[:, head].bernoulli_(1 - dropout, generator=generator)
    return keep_BHTS.div_(1 - dropout)
