"""Checks of memory: what steps really hold against the plan's closed form and the trace, and the loss of a large vocabulary."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

from rekindle.objectives.tokens import loss as linear_loss
from rekindle.plan.memory import memory, needed
from tests.gpu.here import GIB, Here, Row, TooSmall, alone, size
from tests.gpu.training import Case, step, trainer_of
from tests.plan.retrace import GPT2, SMALL, finalist_of, llama
from tests.plan.traced.finalist import trace

ALLOWED = 0.10  # of the closed form and of the trace, of what the allocator gave at most
_ONE_SMALL = llama(64, 160, 2, 4, 2, 500)

# config, micro-batch, tokens, accumulation, and what else differs, as in tests/plan/retrace.py
CONFIGS: dict[str, tuple[dict[str, Any], int, int, int, dict[str, Any]]] = {
    "GPT-2 124M, bf16, 8 x 1,024": (GPT2, 8, 1024, 1, {}),
    "Llama 1.1B, bf16, 4 x 2,048": (SMALL, 4, 2048, 1, {}),
    "Llama 1.1B, bf16, full recomputation, 4 x 2,048": (
        SMALL,
        4,
        2048,
        1,
        {"checkpointing": "full"},
    ),
    "Llama 1.1B, LoRA of bf16 weights, 4 x 2,048": (
        SMALL,
        4,
        2048,
        1,
        {"lora": 8, "weights_bytes": 2},
    ),
}
TINY = {
    "Llama, tiny": (_ONE_SMALL, 2, 64, 1, {}),
    "Llama, tiny, LoRA of bf16 weights": (_ONE_SMALL, 2, 64, 1, {"lora": 4, "weights_bytes": 2}),
}


def case_of(
    config: dict[str, Any], micro: int, tokens: int, accumulation: int, more: dict[str, Any]
) -> Case:
    """The same as a trainer's: rows that fill a sequence each."""
    train = {
        "precision": more.get("precision", "bf16"),
        "activation_checkpointing": more.get("checkpointing", "none"),
        "weights": "bf16" if more.get("weights_bytes") == 2 else "fp32",
    }
    lora = {"rank": more["lora"]} if "lora" in more else None
    vocabulary = config.get("vocab_size", 50257)
    return Case(
        config,
        length=tokens,
        rows=micro * accumulation,
        micro=micro,
        full=True,
        vocabulary=vocabulary,
        lora=lora,
        seeded=False,
        train=train,
    )


def check_memory(here: Here, traces: bool = True) -> Iterator[Row]:
    """The third step's peak against the closed form and the trace of the same config."""
    with alone(here):
        for name, (config, micro, tokens, accumulation, more) in (
            TINY if here.tiny else CONFIGS
        ).items():
            layout = {"micro_batch_size": micro}
            one = finalist_of((config, layout, tokens, accumulation, more))
            planned = memory(one.work).peak_bytes
            try:
                here.room_for(needed(planned))
                real = _peak(here, case_of(config, micro, tokens, accumulation, more))
            except TooSmall as error:
                yield here.skipped(name, str(error))
                continue
            yield here.on_gpu(f"{name}: closed form", _against(planned, real), _near(planned, real))
            if traces:
                found = trace(one).peak_bytes
                right = not here.cuda or _near(found, real)
                yield here.judged(f"{name}: trace", _against(found, real), right)


def _peak(here: Here, case: Case) -> int:
    """Bytes of tensors at most in the third step; those of earlier checks are not there."""
    before = here.held()
    trainer = trainer_of(case, here.device)
    for number in range(3):
        if number == 2:
            here.synchronise()
            here.reset_peak()
        step(trainer, number)
    found = here.peak() - before
    trainer.batches._pool.shutdown()
    del trainer
    gc.collect()
    return found


def _near(said: int, real: int) -> bool:
    return real > 0 and abs(said / real - 1) <= ALLOWED


def _against(said: int, real: int) -> str:
    off = f"{said / real - 1:+.1%} of {size(real)} allocated" if real else "nothing to compare with"
    return f"{size(said)}, {off}"


def check_loss(here: Here) -> Iterator[Row]:
    """8,192 tokens of Llama-3-8B's head, V = 128,256: peak and time of the loss with its backward pass."""
    tokens, hidden, vocabulary = (64, 32, 500) if here.tiny else (8_192, 4_096, 128_256)
    head_bytes, logits_bytes = vocabulary * hidden * 2, tokens * vocabulary * 4
    try:
        here.room_for(6 * head_bytes + 2 * GIB)
    except TooSmall as error:
        yield here.skipped("loss of a vocabulary of 128,256", str(error))
        return
    draw = torch.Generator(here.device).manual_seed(0)
    made = {"generator": draw, "device": here.device}
    for frozen in (False, True):
        states = torch.randn(tokens, hidden, **made).bfloat16().requires_grad_()  # type: ignore[call-overload]
        head = (
            (0.02 * torch.randn(vocabulary, hidden, **made)).bfloat16().requires_grad_(not frozen)
        )  # type: ignore[call-overload]
        labels = torch.randint(0, vocabulary, (tokens,), **made)  # type: ignore[call-overload]
        scale = torch.full((), 1 / tokens, device=here.device)
        seconds = []
        for _ in range(3):
            states.grad = head.grad = None
            here.synchronise()
            here.reset_peak()
            before, began = here.held(), time.perf_counter()
            loss, _ = linear_loss.linear_cross_entropy(states, head, labels, scale)
            loss.backward()  # type: ignore[no-untyped-call]
            here.synchronise()
            seconds.append(time.perf_counter() - began)
            more = here.peak() - before
        name = f"{'frozen' if frozen else 'trained'} head, {tokens:,} tokens, V = {vocabulary:,}"
        limit = head_bytes * (0 if frozen else 3) + 1.25 * GIB
        text = f"{size(more)} beyond its inputs, {min(seconds) * 1e3:.1f} ms; all logits would be {size(logits_bytes)}"
        yield here.on_gpu(name, text, 0 < more <= limit)
        few = slice(0, min(tokens, 512))
        with torch.no_grad():
            part, _ = linear_loss.linear_cross_entropy(states[few], head, labels[few], scale)
            logits = (states[few] @ head.T).float()
            whole = torch.nn.functional.cross_entropy(logits, labels[few], reduction="sum") * scale
        off = abs(float(part) / float(whole) - 1)
        yield here.judged(
            f"{name}: {few.stop} of them against torch's cross_entropy",
            f"differs by {off:.1e}",
            off <= 1e-3,
        )
