"""The learning rate of a step: a linear warm-up, then constant, a line or half a cosine down to
`min_lr_ratio` of the peak, or WSD.

WSD (warm-up, stable, decay) is the schedule of MiniCPM (Hu et al. 2024, arXiv 2404.06395), whose
last tenth of the steps sufficed for the decay; the decay here is a line (Hägele et al. 2024, arXiv
2405.18392)."""

from __future__ import annotations

import math

from rekindle.spec.model import SCRATCH_LR, TrainSpec


def peak_rate(spec: TrainSpec) -> float:
    """The rate after the warm-up; that of a training from scratch where the spec has none."""
    return SCRATCH_LR if spec.lr is None else spec.lr


def learning_rate(spec: TrainSpec, step: int, steps: int) -> float:
    """Rate used in step `step` (0-based) of `steps`. With lr 1, no warm-up, cosine: step 50 of 100
    has 0.5; with wsd, decay 0.2 and min_lr_ratio 0.1, step 90 of 100 has 0.55."""
    peak, warmup_steps = peak_rate(spec), int(spec.warmup * steps)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if spec.lr_schedule == "constant":
        return peak
    if spec.lr_schedule == "wsd":
        decay_steps = int(spec.decay * steps)
        left = min(1.0, (steps - step) / max(1, decay_steps))
    else:
        share = (step - warmup_steps) / max(1, steps - warmup_steps)
        cosine = spec.lr_schedule == "cosine"
        left = 0.5 * (1 + math.cos(math.pi * share)) if cosine else 1 - share
    return peak * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * left)
