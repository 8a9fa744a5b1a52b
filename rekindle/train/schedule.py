"""The learning rate of each step."""

import math

from rekindle.spec.model import SCRATCH_LR, TrainSpec


def peak_rate(spec: TrainSpec) -> float:
    """The rate after the warm-up; that of a training from scratch where the spec has none."""
    return SCRATCH_LR if spec.lr is None else spec.lr


def learning_rate(spec: TrainSpec, step: int, steps: int) -> float:
    """Rate used in step `step` (0-based) of `steps`: a linear warm-up, then constant, a
    line or half a cosine down to `min_lr_ratio` of the peak, or WSD.

    WSD (warm-up, stable, decay) is the schedule of MiniCPM (Hu et al. 2024, arXiv
    2404.06395), with a line for the decay (Hägele et al. 2024, arXiv 2405.18392). With lr
    1, no warm-up, cosine: step 50 of 100 has 0.5; with wsd, decay 0.2 and min_lr_ratio
    0.1, step 90 of 100 has 0.55."""
    peak = peak_rate(spec)
    warmup_steps = int(spec.warmup * steps)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if spec.lr_schedule == "constant":
        return peak
    # share of the way down from the peak to its least ratio that is still ahead
    if spec.lr_schedule == "wsd":
        decay_steps = max(1, int(spec.decay * steps))
        ahead = min(1.0, (steps - step) / decay_steps)
    else:
        behind = (step - warmup_steps) / max(1, steps - warmup_steps)
        if spec.lr_schedule == "cosine":
            ahead = 0.5 * (1 + math.cos(math.pi * behind))
        else:
            ahead = 1 - behind
    return peak * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * ahead)
