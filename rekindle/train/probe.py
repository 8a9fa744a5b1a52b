"""Before the first step: documents that share a sequence must not see each other.

Two documents in one sequence have to give the loss they give in sequences of their own, on the very
model, layout, device and precision that is about to train; a wrong mask shows at once, and not as a
model that is a little worse than it could be."""

from __future__ import annotations

import math

import numpy as np

from rekindle.errors import StepError
from rekindle.train.loop import Trainer

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}


def probe_packing(trainer: Trainer) -> float | None:
    """The relative difference between packed and separate documents, the same on all ranks; None
    where nothing is packed. Raises StepError if they see each other. All ranks have to call it."""
    batches = trainer.batches
    length = batches.order.pack_length
    if length is None:
        return None
    candidates = np.flatnonzero((batches.lengths <= length // 2) & (batches.targets > 0))[:2]
    if len(candidates) < 2:
        return None
    packed = _loss(trainer, candidates, np.array([0, 0]))
    separate = _loss(trainer, candidates, np.array([0, 1]))
    gap = abs(packed - separate) / max(abs(separate), 1e-12)
    exact = trainer.spec.weights == "fp32"
    allowed = TOLERANCE[trainer.spec.precision if exact else "bf16"]
    if not (math.isfinite(gap) and gap <= allowed):
        raise StepError(
            f"packed documents see each other: their loss is {packed:.6f}, and {separate:.6f} in "
            "sequences of their own",
            where="data.packing",
            fix="set data.packing: false, and report this with the versions of torch and "
            "transformers",
        )
    return gap


def _loss(trainer: Trainer, rows: np.ndarray, slots: np.ndarray) -> float:
    """Of the documents in `rows`, arranged in `slots`; two sequences in either case, so that every
    pipeline has something to do."""
    full = np.concatenate([rows, -np.ones(2 - len(set(slots.tolist())), np.int64)])
    places = np.concatenate([slots, np.arange(len(set(slots.tolist())), 2)])
    share = trainer.losses([trainer.batches.arranged(full, places)])
    loss, _, targets = trainer.agreed(share).tolist()
    return float(loss / targets)
