"""The learning rate of a step: a linear warm-up, then constant, a line to zero, or half a cosine to
zero.
"""

from __future__ import annotations

import math

from rekindle.spec.model import TrainSpec


def learning_rate(spec: TrainSpec, step: int, steps: int) -> float:
    """Rate used in step `step` (0-based) of `steps`. With lr 1, no warm-up, cosine: step 50 of 100
    has 0.5.
    """
    warmup_steps = int(spec.warmup * steps)
    if step < warmup_steps:
        return spec.lr * (step + 1) / (warmup_steps + 1)
    share = (step - warmup_steps) / max(1, steps - warmup_steps)
    if spec.lr_schedule == "linear":
        return spec.lr * (1 - share)
    if spec.lr_schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * share))
    return spec.lr
