"""torch's varlen kernel for the CPU, as strict as CUDA's: what the engine hands to flash attention can be computed and judged here.

`install()` registers it for `torch_attn::_varlen_attn` and its backward pass (torch 2.13). The refusals are those of
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: half precision, one dtype, int32 offsets, contiguous heads, sizes
that divide by 8. Attention itself is written out in fp32: scores, softmax, product, document by document.
"""

import torch

CALLS: list[dict] = []


def install() -> None:
    import torch.nn.attention.varlen

    if not CALLS and not getattr(install, "done", False):
        install.done = True
        torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward)
        torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward)


def check(q, k, v, starts, key_starts, longest, longest_key, window, enable_gqa):
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    if starts.dtype != torch.int32 or key_starts.dtype != torch.int32:
        raise RuntimeError("cu_seqlens must have dtype int32")
    if any(x.stride(-1) != 1 for x in (q, k, v)) or not starts.is_contiguous():
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise RuntimeError("head_size should be a multiple of 8, at most 256")
    if q.shape[1] % k.shape[1] or (q.shape[1] != k.shape[1] and not enable_gqa):
        raise RuntimeError("number of heads in key/value must divide number of heads in query")
    lengths, key_lengths = starts.diff(), key_starts.diff()
    if int(starts[-1]) != len(q) or int(key_starts[-1]) != len(k) or len(k) != len(v):
        raise RuntimeError(
            f"offsets {starts[-1]} and {key_starts[-1]} do not end with the tokens {q.shape} {k.shape} {v.shape}"
        )
    if int(lengths.max()) > longest or int(key_lengths.max()) > longest_key:
        raise RuntimeError("a sequence is longer than max_seqlen")


def documents(q, k, v, starts, key_starts, scale, window):
    """Of each document in fp32: where its queries and keys lie, they, and the weights [H, Q, K]; causal is window (-1, 0), aligned at
    the last key, as flash attention 2 has it."""
    groups, (left, right) = q.shape[1] // k.shape[1], window
    places = zip(
        starts.tolist(),
        starts[1:].tolist(),
        key_starts.tolist(),
        key_starts[1:].tolist(),
        strict=False,
    )
    for a, b, c, d in places:
        one, keys, values = q[a:b].float(), k[c:d].float(), v[c:d].float()
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", one, keys) * (scale or q.shape[-1] ** -0.5)
        at = torch.arange(d - c)[None] - (torch.arange(b - a)[:, None] + (d - c) - (b - a))
        hidden = (at > right if right >= 0 else at > d) | (at < -left if left >= 0 else at < -d)
        yield (
            slice(a, b),
            slice(c, d),
            one,
            keys,
            values,
            scores.masked_fill(hidden, float("-inf")).softmax(-1),
        )


def forward(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal=False,
    scale=None,
    window_size=None,
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    window = list(window_size or (-1, -1))
    check(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window, enable_gqa)
    CALLS.append(
        {
            "dtype": query.dtype,
            "documents": len(cu_seq_q) - 1,
            "window": tuple(window),
            "gqa": enable_gqa,
        }
    )
    found = documents(query, key, value, cu_seq_q, cu_seq_k, scale, window)
    out = torch.cat(
        [torch.einsum("hqk,khd->qhd", weights, values) for *_, values, weights in found]
    )
    sums = torch.zeros(query.shape[1], len(query))
    return out.to(query.dtype).contiguous(), sums, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal,
    rng_state,
    scale=None,
    window_size=None,
):
    """By hand: an operator's own backward pass has no autograd below it."""
    slopes = [torch.zeros(x.shape) for x in (query, key, value)]
    heads, groups = query.shape[1], key.shape[1]
    for at, keys_at, one, keys, values, weights in documents(
        query, key, value, cu_seq_q, cu_seq_k, scale, list(window_size or (-1, -1))
    ):
        slope = grad_out[at].float()
        to_weights = torch.einsum("qhd,khd->hqk", slope, values)
        to_scores = (
            weights
            * (to_weights - (to_weights * weights).sum(-1, keepdim=True))
            * (scale or query.shape[-1] ** -0.5)
        )
        slopes[0][at] = torch.einsum("hqk,khd->qhd", to_scores, keys)
        for target, made in (
            (1, torch.einsum("hqk,qhd->khd", to_scores, one)),
            (2, torch.einsum("hqk,qhd->khd", weights, slope)),
        ):
            slopes[target][keys_at] += made.unflatten(1, (groups, heads // groups)).sum(2)
    return tuple(s.to(query.dtype) for s in slopes)
