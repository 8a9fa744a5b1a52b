"""Attention that keeps packed documents apart, that works on a divided sequence, and
whose dropout does not depend on which rank holds which head.

Registered with transformers under `NAME`, so that every architecture's own forward calls
`attend`; which tokens see each other (micro.py) and a sliding window travel as keyword
arguments. Documents are kept apart by one varlen flash-attention kernel over all of them,
on GPUs in half precision, or by one call of `scaled_dot_product_attention` a document:
neither makes a mask of a whole sequence.

Shapes: B rows, H heads, G key-value heads, T local tokens, S tokens of all
context-parallel ranks, D head size. Context parallelism gathers keys and values (Llama 3,
arXiv 2407.21783, 3.3.2)."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rekindle.errors import UnsupportedError
from rekindle.objectives.micro import Documents
from rekindle.train import compat, modules
from rekindle.train.dropout import kept

NAME = "rekindle"
PEERS = "rekindle_peers"
HALVES = (torch.bfloat16, torch.float16)
QUERIES_AT_ONCE = 512  # rows of an explicit mask: of 32,768 keys 16 MB, 64 MB once it is added
Kernel = Literal["varlen", "sdpa"]

# What transformers hands to every attention function and that does not change what is
# computed here: positions are in the queries and keys already, and there is no cache
# while training.
_UNUSED = ("position_ids", "use_cache", "output_attentions")


@dataclasses.dataclass
class AttentionPeers:
    """This rank among tp and cp peers, and how it computes attention."""

    tp_rank: int = 0
    tp_size: int = 1
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None
    kernel: Kernel = "sdpa"
    groups: bool = True
    """As `kernels.takes_groups`."""


def install(network: nn.Module, peers: AttentionPeers) -> None:
    """Make the network's attention modules use `attend` with these peers."""
    from transformers import AttentionInterface

    # No mask function is registered with it: transformers' own ask the device whether
    # there is any padding, and whether position ids start again.
    AttentionInterface.register(NAME, attend)
    config: Any = network.config
    config._attn_implementation = NAME
    causal = False
    for module in network.modules():
        if hasattr(module, "is_causal"):
            if module.is_causal:
                causal = True
            setattr(module, PEERS, peers)
    body = modules.backbone(network)
    if not hasattr(body, PEERS):
        setattr(body, PEERS, peers)
        # a warning about padding, before which GPT-2 reads tokens back from the device each time
        body.warn_if_padding_and_no_attention_mask = lambda *_: None  # type: ignore[assignment]
        mask = functools.partial(_mask_of_padding, causal=causal)
        body.register_forward_pre_hook(mask, with_kwargs=True)


def _mask_of_padding(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], causal: bool
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """A [B, T] mask, 1 where there is no padding, as the bool [B, 1, 1 or T, T] that sdpa takes."""
    mask_BT = kwargs.get("attention_mask")
    config: Any = module.config
    if config._attn_implementation != NAME:  # while a proof asks for the architecture's own
        return args, kwargs
    if mask_BT is None or mask_BT.ndim != 2:
        return args, kwargs
    mask = mask_BT[:, None, None].bool()
    if causal:
        length = mask_BT.shape[1]
        mask = mask & mask.new_ones(length, length).tril()
    return args, {**kwargs, "attention_mask": mask}


def attend(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    documents: Documents | None = None,
    sliding_window: int | None = None,
    **other_keywords: object,
) -> tuple[Tensor, None]:
    """[B, T, H, D], as transformers' attention functions return it, and no weights; a
    query sees `sliding_window` tokens, itself included. Raises UnsupportedError for an
    unknown keyword."""
    for name, value in other_keywords.items():
        if value is not None and name not in _UNUSED:
            message = f"{type(module).__name__} asks attention for `{name}`, which rekindle's "
            message += "attention does not compute"
            fix = "use an architecture without it; docs/layouts.md lists those that are tested"
            raise UnsupportedError(message, where="model.source", fix=fix)
    peers: AttentionPeers = getattr(module, PEERS)
    causal = bool(module.is_causal) if is_causal is None else is_causal
    length = query_BHTD.shape[2]
    if documents is None and attention_mask is None and sliding_window and length > sliding_window:
        documents = Documents.of_rows(len(query_BHTD), length, query_BHTD.device)
    if documents is not None:
        call = Call(causal, scaling, dropout, sliding_window, peers)
        return apart(query_BHTD, key_BGTD, value_BGTD, documents, call), None
    if attention_mask is not None and sliding_window and length > sliding_window:
        message = f"{type(module).__name__} has a sliding window, and its sequences are padded"
        raise UnsupportedError(message, where="data.packing", fix="set data.packing: true")
    # under torch.compile a comparison of sizes is a SymBool, which sdpa rejects; branch on it
    if attention_mask is not None or length == 1:  # the mask hides what comes later, too
        causal = False
    call = Call(causal, scaling, dropout, None, peers)
    return _one(query_BHTD, key_BGTD, value_BGTD, attention_mask, call).transpose(1, 2), None


@dataclasses.dataclass(frozen=True)
class Call:
    """How one attention is computed."""

    causal: bool
    scaling: float | None
    dropout: float
    window: int | None
    """Tokens that a query sees, itself included; None: all of the past."""
    peers: AttentionPeers


def apart(query: Tensor, key: Tensor, value: Tensor, documents: Documents, call: Call) -> Tensor:
    """[B, T, H, D] without any work between documents."""
    if documents.ranges:
        key = _in_ranges(key, documents, call.peers)
        value = _in_ranges(value, documents, call.peers)
    else:
        key = key.transpose(1, 2).flatten(0, 1)
        value = value.transpose(1, 2).flatten(0, 1)
    if call.peers.kernel == "varlen" and not call.dropout:
        return _varlen(query, key, value, documents, call)
    # a group's mask is that of its padding; what is causal has one of its own
    if documents.grouped and not call.causal:
        return _by_group(query, key, value, documents, call)  # type: ignore[no-any-return]
    return _by_document(query, key, value, documents, call)  # type: ignore[no-any-return]


# not compiled, because each batch has other ranges
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_ranges(x_BGTD: Tensor, documents: Documents, peers: AttentionPeers) -> Tensor:
    """Keys or values of all cp ranks that this rank's queries see: [sum of the ranges, G, D]."""
    assert peers.cp_group is not None
    count = 2 * peers.cp_size
    gathered = compat.all_gather_single_autograd(x_BGTD.contiguous(), 2, peers.cp_group)
    chunks = torch.chunk(gathered, count, 2)
    # rank r holds chunks r and count - 1 - r: the first chunks come from the first halves
    first_halves = list(range(0, count, 2))
    second_halves = list(range(1, count, 2))
    places = [*first_halves, *reversed(second_halves)]
    whole_BSGD = torch.cat([chunks[place] for place in places], 2).transpose(1, 2)
    return torch.cat([whole_BSGD[row, start:stop] for row, start, stop in documents.ranges])


# not compiled, because the number of documents differs from batch to batch
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_document(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, call: Call
) -> Tensor:
    """One document after the other; `key` and `value` are [keys, G, D]."""
    rows, heads, length, size = query.shape
    pieces = []
    # one split, whose backward pass is one concatenation; that of a slice is as large as the whole
    queries = torch.split(query.transpose(1, 2).flatten(0, 1), documents.queries)
    keys = torch.split(key, documents.keys)
    values = torch.split(value, documents.keys)
    for document in zip(queries, keys, values, strict=True):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in document)
        pieces += [output[0].transpose(0, 1) for output in _document(q, k, v, call)]
    return torch.cat(pieces).view(rows, length, heads, size)


# not compiled, because the number of groups differs from batch to batch
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_group(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, call: Call
) -> Tensor:
    """Texts of like length padded, and attended to in one call; `key` and `value` are [F, G, D]."""
    sizes = [group.tokens for group in documents.groups]
    queries = torch.split(query.transpose(1, 2).flatten(0, 1), sizes)
    keys = torch.split(key, sizes)
    values = torch.split(value, sizes)
    outputs = []
    for group, *qkv in zip(documents.groups, queries, keys, values, strict=True):
        tokens, heads, size = qkv[0].shape
        places, back, bias = group.by_head(heads)
        # one copy pads, and puts the rows of a head beside each other, as products want them
        q, k, v = (
            _Pad.apply(x.reshape(tokens * heads, size), places, back).view(-1, group.longest, size)  # type: ignore[no-untyped-call]
            for x in qkv
        )
        if call.dropout and not _draws_alike(query, call.peers):
            out = _written_out(q, k, v, bias, heads, call)
        else:
            q, k, v = (x.view(group.rows, heads, group.longest, size) for x in (q, k, v))
            out = _one(q, k, v, group.mask, call)
        out = _Unpad.apply(out.reshape(-1, size), back)  # type: ignore[no-untyped-call]
        outputs.append(out.view(tokens, heads, size))
    return torch.cat(outputs)[None]


class _Pad(torch.autograd.Function):
    """Rows to their padded places. What has no row is dropped: the way back is a copy, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """Padded places back to rows."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.size = len(padded)
        return padded.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.new_zeros(ctx.size, grad.shape[1])
        return whole.index_copy_(0, ctx.saved_tensors[0], grad), None


def _document(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Iterator[Tensor]:
    """Attention of one run of queries; the last of them sees the last key."""
    count = query.shape[2]
    total = key.shape[2]
    is_narrow = call.window is not None and call.window < total
    if not call.causal or (count == total and not is_narrow):
        whole = dataclasses.replace(call, causal=call.causal and count > 1)
        yield _one(query, key, value, None, whole)
        return
    plain = dataclasses.replace(call, causal=False)
    # once, and not for each piece: with a mask no kernel takes fewer key-value heads
    key, value = (_repeated(x, query.shape[1]) for x in (key, value))
    for low in range(0, count, QUERIES_AT_ONCE):
        high = min(low + QUERIES_AT_ONCE, count)
        # where these queries are as keys
        first = total - count + low
        last = total - count + high
        begin = 0
        if call.window is not None:
            begin = max(0, first - call.window + 1)
        places_T = torch.arange(first, last, device=query.device)[:, None]
        places_S = torch.arange(begin, last, device=query.device)
        mask_TS = places_S <= places_T
        if call.window is not None:
            mask_TS &= places_S > places_T - call.window
        k, v = (x[:, :, begin:last] for x in (key, value))
        yield _one(query[:, :, low:high], k, v, mask_TS[None, None], plain)


def _one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Call) -> Tensor:
    """[B, H, T, D] of whole rows."""
    if call.dropout and not _draws_alike(query, call.peers):
        return _with_dropout(query, key, value, mask, call)
    options = {}
    if query.shape[1] != key.shape[1]:
        # autocast makes halves of what rotary embedding left in fp32
        is_half = query.dtype in HALVES or torch.is_autocast_enabled(query.device.type)
        is_fast = call.peers.groups and (is_half or not query.is_cuda)
        if mask is None and is_fast:
            options = {"enable_gqa": True}
        else:  # no fast kernel of CUDA takes fewer key-value heads with a mask, or in fp32
            key, value = (_repeated(x, query.shape[1]) for x in (key, value))
    return sdpa(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=call.causal,
        scale=call.scaling,
        **options,
    )


def _draws_alike(query: Tensor, peers: AttentionPeers) -> bool:
    """Whether a fused kernel's own dropout will do: no other rank has to draw the same."""
    return query.is_cuda and peers.tp_size * peers.cp_size == 1


def _repeated(x_BGSD: Tensor, heads: int) -> Tensor:
    """Keys or values of as many heads as queries have: [B, H, S, D]."""
    if x_BGSD.shape[1] == heads:
        return x_BGSD
    return x_BGSD.repeat_interleave(heads // x_BGSD.shape[1], dim=1)


def _varlen(query: Tensor, key: Tensor, value: Tensor, documents: Documents, call: Call) -> Tensor:
    """All documents in one flash-attention kernel (Dao 2023, arXiv 2307.08691), which
    takes only half precision: rotary embedding leaves queries and keys in fp32 under
    autocast."""
    rows, heads, length, size = query.shape
    q = query.transpose(1, 2).reshape(rows * length, heads, size)
    if torch.is_autocast_enabled(q.device.type):
        half = torch.get_autocast_dtype(q.device.type)
        q, key, value = (x.to(half) for x in (q, key, value))
    tokens_before = -1 if call.window is None else call.window - 1
    out = compat.varlen_attn(
        q,
        key,
        value,
        documents.starts,
        documents.key_starts,
        documents.ruler.shape[0],
        documents.key_ruler.shape[0],
        scale=call.scaling,
        window_size=(tokens_before, 0) if call.causal else (-1, -1),
        enable_gqa=heads != key.shape[1],
    )
    return out.view(rows, length, heads, size)


def _with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Call
) -> Tensor:
    """Written out, because the mask of each head has to be the same whichever rank holds it."""
    rows, heads, length, size = query.shape
    key, value = (_repeated(x, heads) for x in (key, value))
    if call.causal:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    bias = None
    if mask is not None:
        bias = query.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
        bias = bias.expand(rows, heads, length, -1).flatten(0, 1)
    # three dimensions, because with four each product would copy what it is given
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    return _written_out(query, key, value, bias, heads, call).view(rows, heads, length, size)


def _written_out(
    query_NTD: Tensor,
    key_NSD: Tensor,
    value_NSD: Tensor,
    bias_NTS: Tensor | None,
    heads: int,
    call: Call,
) -> Tensor:
    """[N, T, D] of N = rows * heads; `bias_NTS` may have one row for all queries."""
    scale = call.scaling if call.scaling is not None else query_NTD.shape[-1] ** -0.5
    bias = query_NTD.new_zeros(1) if bias_NTS is None else bias_NTS.to(query_NTD.dtype)
    scores = torch.baddbmm(bias, query_NTD, key_NSD.transpose(1, 2), alpha=scale)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=exact).to(value_NSD.dtype)
    weights_BHTS = weights.view(-1, heads, *weights.shape[1:])
    # the operator costs as much as drawing for a short text
    keep = _keep if torch.compiler.is_compiling() else _kept
    # without a name, the mask goes before the product is made
    kept_BHTS = weights_BHTS * keep(
        weights_BHTS.detach(), call.dropout, call.peers.tp_rank, call.peers.tp_size
    )
    return kept_BHTS.flatten(0, 1) @ value_NSD


def _kept(weights_BHTS: Tensor, dropout: float, tp_rank: int, tp_size: int) -> Tensor:
    """0 or 1 / (1 - dropout), drawn for all heads of the layer from the default
    generator, which tp peers have in one state; each takes its own heads."""
    rows, heads, length, keys = weights_BHTS.shape
    shape = (tp_size * heads, rows, length, keys)
    own = slice(tp_rank * heads, (tp_rank + 1) * heads)
    kept_HBTS = kept(shape, dropout, weights_BHTS.device, weights_BHTS.dtype, own)
    return kept_HBTS.transpose(0, 1)


# A custom op, so that torch.compile treats it as opaque instead of drawing with a
# generator of its own; tagged as random, so that it is neither merged with another one
# nor drawn again.
@torch.library.custom_op(
    "rekindle::keep", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _keep(weights_BHTS: Tensor, dropout: float, tp_rank: int, tp_size: int) -> Tensor:
    return _kept(weights_BHTS, dropout, tp_rank, tp_size).contiguous()


@_keep.register_fake
def _(weights_BHTS: Tensor, dropout: float, tp_rank: int, tp_size: int) -> Tensor:
    return torch.empty_like(weights_BHTS, memory_format=torch.contiguous_format)
