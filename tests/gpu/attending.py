"""Checks of attention: the varlen kernel against one call a document, which kernels run, and a long sequence of many ranks."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from rekindle.errors import UnsupportedError
from rekindle.objectives.micro import Documents
from rekindle.train import attention
from rekindle.train.attention import AttentionPeers, Call
from rekindle.train.kernels import kernel_for
from tests.gpu import kernels
from tests.gpu.arithmetic import gap
from tests.gpu.here import GIB, Here, Row, alone, size
from tests.gpu.training import TEXT, Case, launched, model, plain, trainer_of

# heads, key-value heads, head size, window
SHAPES: dict[str, tuple[int, int, int, int | None]] = {
    "llama": (32, 8, 128, None),
    "qwen3": (16, 8, 128, None),
    "gpt2": (12, 12, 64, None),
    "mistral": (32, 8, 128, 256),
}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALLOWED = 0.03  # of half precision against fp32, over the largest value
LONG = 32_768


def config_of(kind: str) -> Any:
    """transformers' config with these heads."""
    heads, groups, size, window = SHAPES[kind]
    if kind == "gpt2":
        return AutoConfig.for_model(kind, n_embd=heads * size, n_head=heads)
    more = {"sliding_window": window} if window else {}
    return AutoConfig.for_model(
        kind,
        hidden_size=heads * size,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        **more,
    )


def check_varlen(here: Here) -> Iterator[Row]:
    """Whether the varlen kernel is chosen, asked with and without gradients, and how far it is from one call a document in fp32."""
    if not here.cuda:
        yield from _with_reference()
    for kind in SHAPES:
        for name, dtype in HALVES.items():
            network: Any = types.SimpleNamespace(config=config_of(kind))
            chosen = {}
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    try:
                        chosen[grad] = str(kernel_for(network, here.device, dtype))
                    except UnsupportedError as error:
                        chosen[grad] = str(error)
            text = f"{chosen[False]} without gradients, {chosen[True]} with"
            right = set(chosen.values()) == {"varlen"}
            yield here.on_gpu(f"{kind}, {name}: kernel for documents", text, right)
            yield _compared(here, kind, name, dtype)


def _with_reference() -> Iterator[Row]:
    """A CPU has torch's kernel only as the tests' own reference, which is written for torch 2.13."""
    from tests.train import varlen_reference

    varlen_reference.install()
    return iter(())


def _compared(here: Here, kind: str, name: str, dtype: torch.dtype) -> Row:
    heads, groups, size, window = SHAPES[kind]
    length, cut = (64, 8) if here.tiny else (1024, window or 0)
    numbers = np.array(
        [[1] * (length // 2) + [2] * (length // 4) + [3] * (length // 4), [1] * length]
    )
    documents = Documents.of(numbers)
    documents = documents.with_each(lambda t: t.to(here.device))
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(2, n, length, size, generator=draw) for n in (heads, groups, groups)]
    made = [x.to(here.device, dtype) for x in made]  # both get what half precision left of it
    slope = torch.randn(2, length, heads, size, generator=draw).to(here.device)
    results = []
    for kernel, exact in (("varlen", dtype), ("sdpa", torch.float32)):
        call = Call(True, None, 0.0, cut if window else None, AttentionPeers(kernel=kernel))  # type: ignore[arg-type]
        qkv = [x.to(exact).requires_grad_() for x in made]
        try:
            out = attention.apart(*qkv, documents, call)  # type: ignore[arg-type]
            results.append([out.detach(), *torch.autograd.grad((out.float() * slope).sum(), qkv)])
        except (NotImplementedError, RuntimeError, TypeError, UnsupportedError) as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            return here.on_gpu(f"{kind}, {name}: {kernel} kernel", text, False)
    gaps = [gap(ours, theirs) for ours, theirs in zip(*results, strict=True)]
    text = ", ".join(
        f"{what} {one:.1e}" for what, one in zip(("out", "dq", "dk", "dv"), gaps, strict=True)
    )
    seen = f"{kind}, {name}: varlen against one call a document in fp32, {length} tokens"
    return here.judged(seen, text, max(gaps) <= ALLOWED)


def check_kernels(here: Here) -> Iterator[Row]:
    """Which attention runs, by operator and by kernel; one that makes whole scores is a fault."""
    length = 64 if here.tiny else 512
    bf16 = {"precision": "bf16"}
    cases = {
        "llama, packed, bf16": Case(plain("llama", here), length=length, train=bf16),
        "llama, unpacked, bf16": Case(
            plain("llama", here), length=length, packing=False, train=bf16
        ),
        "llama, packed, fp32": Case(plain("llama", here), length=length),
        "gpt2, packed, dropout, bf16": Case(model("gpt2", here), length=length, train=bf16),
        "gpt2, unpacked, dropout, bf16": Case(
            model("gpt2", here), length=length, packing=False, train=bf16
        ),
        "bert, texts, no dropout, bf16": Case(plain("bert", here), TEXT, length, 8, 8, train=bf16),
        "bert, texts in padded groups, dropout, bf16": Case(
            model("bert", here), TEXT, length, 8, 8, train=bf16
        ),
    }
    with alone(here):
        for name, case in cases.items():
            trainer = trainer_of(case, here.device)
            for number in range(2):
                launched(trainer, number).numbers.read()
            events = kernels.profiled(
                here.cuda, lambda trainer=trainer: launched(trainer, 2).numbers.read()
            )
            yield _row(here, f"{name} ({trainer.parts.attention})", events)
        yield _row(here, "a padding mask with fewer key-value heads, bf16", _masked(here, length))


def _masked(here: Here, length: int) -> list[dict[str, Any]]:
    module: Any = torch.nn.Module()
    module.is_causal = False
    setattr(module, attention.PEERS, AttentionPeers())
    q, k = (
        torch.randn(2, n, length, 64, device=here.device, dtype=torch.bfloat16, requires_grad=True)
        for n in (8, 2)
    )
    mask = (torch.arange(length, device=here.device) < length // 2)[None, None, None].expand(
        2, 1, length, length
    )
    run = lambda: attention.attend(module, q, k, k, mask)[0].float().sum().backward()  # noqa: E731
    run()
    return kernels.profiled(here.cuda, run)


def _row(here: Here, name: str, events: list[dict[str, Any]]) -> Row:
    operators = kernels.operators_of(kernels.named(events, "cpu_op"))
    ran = {n for n in kernels.named(events, "kernel") if kernels.kernel_kind(n)}
    text = f"{', '.join(sorted(operators)) or 'none'}; {', '.join(sorted(map(kernels.short, ran)))}"
    right = bool(operators) and not operators & set(kernels.SLOW) and bool(ran)
    return here.on_gpu(name, text, right)


@dataclasses.dataclass
class _Long:
    """What one of four context-parallel ranks computes of a sequence, its keys already gathered."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    documents: Documents
    places: torch.Tensor
    whole: tuple[torch.Tensor, ...]


def _long(here: Here, cp_rank: int, lengths: tuple[int, ...]) -> _Long:
    tokens, heads, groups, size = (256, 4, 2, 16) if here.tiny else (LONG, 32, 8, 128)
    parts = [tokens // sum(lengths) * n for n in lengths]
    numbers = np.concatenate([np.full(n, i + 1) for i, n in enumerate(parts)])[None]
    documents = Documents.of(numbers, 4, cp_rank)
    documents = documents.with_each(lambda t: t.to(here.device))
    dtype = torch.bfloat16
    draw = torch.Generator(here.device).manual_seed(0)
    whole = tuple(
        torch.randn(1, n, tokens, size, generator=draw, device=here.device).to(dtype)
        for n in (heads, groups, groups)
    )
    chunk = tokens // 8
    places = torch.cat(
        [
            torch.arange(c * chunk, (c + 1) * chunk, device=here.device)
            for c in (cp_rank, 7 - cp_rank)
        ]
    )
    keys, values = (
        torch.cat([x.transpose(1, 2)[row, a:b] for row, a, b in documents.ranges])
        for x in whole[1:]
    )
    return _Long(whole[0][:, :, places].contiguous(), keys, values, documents, places, whole)


def check_context(here: Here) -> Iterator[Row]:
    """Attention of 32,768 tokens as one of four context-parallel ranks has it: right, and without a whole mask or scores."""
    kinds: tuple[attention.Kernel, ...] = ("varlen", "sdpa") if here.cuda else ("sdpa",)
    for lengths in ((1,), (5, 2, 1)):
        for kernel in kinds:
            given = _long(here, 3, lengths)
            call = Call(True, None, 0.0, None, AttentionPeers(kernel=kernel, cp_size=4))
            qkv = [x.requires_grad_() for x in (given.query, given.key, given.value)]
            attend: Any = attention._varlen if kernel == "varlen" else attention._by_document
            here.synchronise()
            here.reset_peak()
            before = here.held()
            out = attend(*qkv, given.documents, call)
            out.backward(torch.ones_like(out))
            here.synchronise()
            more = here.peak() - before
            off = gap(out, _expected(here, given, lengths))
            name = f"{kernel}, {len(lengths)} documents"
            yield here.judged(
                f"{name}: against attention of the whole sequence",
                f"differs by {off:.1e}",
                off <= ALLOWED,
            )
            yield here.on_gpu(
                f"{name}: peak of forward and backward beyond its inputs",
                size(more),
                more < 2 * GIB,
            )
            del out, given, qkv


@torch.no_grad()
def _expected(here: Here, given: _Long, lengths: tuple[int, ...]) -> torch.Tensor:
    """[1, T, H, D] of this rank's tokens, from one causal call a document over the whole sequence."""
    query, key, value = given.whole
    parts = [query.shape[2] // sum(lengths) * n for n in lengths]
    done = [
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for q, k, v in zip(*(x.split(parts, 2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(done, 2)[:, :, given.places].transpose(1, 2)
