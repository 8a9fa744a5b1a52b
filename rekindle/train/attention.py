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
import functools
import itertools
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.nn.functional import scaled_dot_product_attention as sdpa

log = logging.getLogger(__name__)

NAME = "rekindle"
PEERS = "rekindle_peers"
DOCUMENTS = "rekindle_documents"
HALVES = (torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Peers:
    """How heads and tokens are divided: this rank's place among its tp and cp peers."""

    tp_rank: int = 0
    cp_rank: int = 0
    cp_group: dist.ProcessGroup | None = None


@dataclasses.dataclass(frozen=True)
class Documents:
    """Document n is tokens `bounds[n]` to `bounds[n + 1]` of the rows one after the other; padding
    counts as one. `starts` int32 [documents + 1] is the same on the device."""

    bounds: list[int]
    starts: torch.Tensor
    longest: int

    @classmethod
    def of(cls, sequence_B12S: torch.Tensor) -> Documents:
        numbers_BS = sequence_B12S[:, 0, 0]
        begins_BS = torch.ones_like(numbers_BS, dtype=torch.bool)
        begins_BS[:, 1:] = numbers_BS[:, 1:] != numbers_BS[:, :-1]
        bounds = [*torch.nonzero(begins_BS.flatten()).flatten().tolist(), numbers_BS.numel()]
        starts = torch.tensor(bounds, dtype=torch.int32).to(sequence_B12S.device)
        return cls(bounds, starts, max(b - a for a, b in itertools.pairwise(bounds)))


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


def mark(attention_mask: torch.Tensor | None) -> None:
    """Note on a sequence where its documents lie: once for all layers, because a GPU has to be
    waited for, and before any of them, whose recomputation must do what their first pass did."""
    if attention_mask is not None and _is_sequence(attention_mask):
        setattr(attention_mask, DOCUMENTS, Documents.of(attention_mask))


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
    if sequence is not None and peers.cp_group is None and not dropout:
        apart = _apart(query_BHTD, key_BGTD, value_BGTD, sequence, causal, scaling)
        if apart is not None:
            return apart, None
    if sequence is not None:
        attention_mask = _mask(sequence, causal, query_BHTD.shape[2], peers.cp_rank)
        if peers.cp_group is not None:
            key_BGTD, value_BGTD = (_gathered(x, peers.cp_group) for x in (key_BGTD, value_BGTD))
    if attention_mask is not None or query_BHTD.shape[2] == 1:
        causal = False
    out = _one(query_BHTD, key_BGTD, value_BGTD, attention_mask, causal, scaling, dropout, peers)
    return out.transpose(1, 2), None


def _is_sequence(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.ndim == 4 and mask.dtype == torch.int64


def _mask(sequence_B12S: torch.Tensor, causal: bool, local: int, cp_rank: int) -> torch.Tensor:
    """bool [B, 1, T, S]: same document, and not later."""
    documents_BS, positions_BS = sequence_B12S[:, 0, 0], sequence_B12S[:, 0, 1]
    mine = slice(cp_rank * local, (cp_rank + 1) * local)
    mask = documents_BS[:, mine, None] == documents_BS[:, None, :]
    if causal:
        mask = mask & (positions_BS[:, None, :] <= positions_BS[:, mine, None])
    return mask[:, None]


def _gathered(x_BGTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered: torch.Tensor = all_gather_single_autograd(x_BGTD.contiguous(), 2, group)
    return gathered


# not compiled, because the number of documents differs from batch to batch
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apart(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence_B12S: torch.Tensor,
    causal: bool, scaling: float | None,
) -> torch.Tensor | None:  # fmt: skip
    """[B, T, H, D] without any work between documents, which a mask would only throw away; None
    where this device has no kernel for it."""
    if query.is_cuda and not (query.dtype in HALVES and _varlen_works(query.device)):
        return None
    documents: Documents = getattr(sequence_B12S, DOCUMENTS)
    if query.is_cuda:
        return _varlen(query, key, value, documents, causal, scaling)
    return _by_document(query, key, value, documents, causal, scaling)


def _by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents,
    causal: bool, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """One document after the other: for the CPU, where a call costs little."""
    rows, heads, length, size = query.shape
    lengths = [b - a for a, b in itertools.pairwise(documents.bounds)]
    gqa, pieces = heads != key.shape[1], []
    # one split, whose backward pass is one concatenation; that of a slice is as large as the whole
    parts = (torch.split(x.transpose(1, 2).flatten(0, 1), lengths) for x in (query, key, value))
    for document in zip(*parts, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in document)
        out = sdpa(q, k, v, is_causal=causal and q.shape[2] > 1, scale=scaling, enable_gqa=gqa)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces).view(rows, length, heads, size)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents,
    causal: bool, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """All documents in one flash-attention kernel (Dao 2023, arXiv 2307.08691)."""
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, length, size = query.shape
    q, k, v = (x.transpose(1, 2).reshape(rows * length, -1, size) for x in (query, key, value))
    out = varlen_attn(
        q, k, v, documents.starts, documents.starts, documents.longest, documents.longest,
        scale=scaling, window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=heads != key.shape[1],
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out.view(rows, length, heads, size)


@functools.cache
def _varlen_works(device: torch.device) -> bool:
    """Whether the kernel is there and agrees, forwards and backwards, with one call a document."""
    draw = torch.Generator().manual_seed(0)
    found = []
    try:
        numbers_BS = torch.tensor([[1] * 40 + [2] * 24, [1] * 9 + [2] * 55])
        sequence = torch.stack([numbers_BS, numbers_BS], dim=1)[:, None].to(device)
        documents = Documents.of(sequence)
        made = [torch.randn(2, heads, 64, 64, generator=draw) for heads in (4, 2, 2)]
        for kernel in (_varlen, _by_document):
            q, k, v = (x.to(device, torch.bfloat16).requires_grad_() for x in made)
            out = kernel(q, k, v, documents, True, None)
            slopes = torch.autograd.grad(out.float().square().sum(), (q, k, v))
            found.append([out, *slopes])
        worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True))
        if worst < 0.05:
            return True
        reason = f"its results differ by {worst:.2g}"
    except (ImportError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
    log.warning("varlen attention is not used (%s): documents are kept apart by a mask", reason)
    return False


def _one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    causal: bool, scaling: float | None, dropout: float, peers: Peers,
) -> torch.Tensor:  # fmt: skip
    if not dropout:
        # a comparison of sizes is no bool while this is compiled, a branch is
        more = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        return sdpa(query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, **more)
    return _with_dropout(query, key, value, mask, causal, scaling, dropout, peers)


def _with_dropout(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    causal: bool, scaling: float | None, dropout: float, peers: Peers,
) -> torch.Tensor:  # fmt: skip
    """Written out, because the mask of each head has to be the same whichever rank holds it."""
    rows, heads, length, size = query.shape
    if key.shape[1] != heads:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    if causal:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    bias = query.new_zeros(1)
    if mask is not None:
        bias = query.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
        bias = bias.expand(rows, heads, length, -1).flatten(0, 1)
    # three dimensions, because with four each product would copy what it is given
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else size**-0.5
    scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=exact).to(value.dtype)
    weights_BHTS = weights.view(rows, heads, length, -1)
    place = (peers.cp_rank << 20) + peers.tp_rank * heads
    kept_BHTS = weights_BHTS * _keep(weights_BHTS.detach(), dropout, place)
    out: torch.Tensor = kept_BHTS.flatten(0, 1) @ value
    return out.view(rows, heads, length, size)


# an operator, because a compiler cannot look into it and would cut a block into a dozen graphs; a
# random one, so that it is neither merged with another nor drawn again
@torch.library.custom_op(
    "rekindle::keep", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _keep(weights_BHTS: torch.Tensor, dropout: float, place: int) -> torch.Tensor:
    """0 or 1 / (1 - dropout), drawn head by head from the state of the default generator, which tp
    peers share, and the head's number in the whole layer, which is `place` for the first."""
    base = int(torch.randint(2**62, (1,)))
    keep_HBTS = torch.empty_like(
        weights_BHTS.transpose(0, 1), memory_format=torch.contiguous_format
    )
    generator = torch.Generator(weights_BHTS.device)
    for head in range(len(keep_HBTS)):
        generator.manual_seed((base + (place + head) * 0x9E3779B97F4A7C15) % 2**63)
        keep_HBTS[head].bernoulli_(1 - dropout, generator=generator)
    return keep_HBTS.div_(1 - dropout).transpose(0, 1)


@_keep.register_fake
def _(weights_BHTS: torch.Tensor, dropout: float, place: int) -> torch.Tensor:
    return torch.empty_like(
        weights_BHTS.transpose(0, 1), memory_format=torch.contiguous_format
    ).transpose(0, 1)
