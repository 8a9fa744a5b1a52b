"""How long attention takes between its projections, by the kernel that runs it.

A flash kernel (Dao 2023, arXiv 2307.08691; Shah et al. 2024, arXiv 2407.08608) does two
products forward and five backward, at a share of the peak that grows with the sequence;
the shares are read off published benchmarks (constants.yaml,
tests/plan/rows/attention.csv). Attention that is written out does six products, masked
halves included, and moves every score through the memory, operation by operation."""

from __future__ import annotations

import dataclasses

BACKWARD_PRODUCTS = 2.5  # of a flash kernel, times those forward: the scores are computed again
NARROW = 64  # heads of at most so many are slower; published speeds are of 64 and 128


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Shares of the GPU's peak on endless sequences, forward and backward, and the length
    at which as much again is lost; `diagonal` tokens are added to it where there is a
    causal mask, whose blocks on the diagonal are computed in whole; `narrow` is the speed
    of heads of 64, times that of 128."""

    forward: float
    forward_half: float
    backward: float
    backward_half: float
    diagonal: float = 0.0
    narrow: float = 1.0

    def seconds(
        self, flops: float, sequence: int, peak: float, head_dim: int, causal: bool
    ) -> tuple[float, float]:
        """Seconds forward and backward, of `flops` forward,
        half of which a mask has already taken off."""
        diagonal = self.diagonal if causal else 0.0
        speed = peak
        if head_dim <= NARROW:
            speed *= self.narrow
        at_speed = flops / speed
        forward = at_speed / self.forward
        forward *= 1 + (self.forward_half + diagonal) / sequence
        backward = at_speed * BACKWARD_PRODUCTS / self.backward
        backward *= 1 + (self.backward_half + diagonal) / sequence
        return forward, backward


# Bytes a score that the operations between the products move, forward and backward, by
# whether they are compiled. Our own attention with dropout (train/attention.py) has a
# softmax in fp32: the mask is spread out and added, the softmax casts and is cast back,
# dropout is a product with what is kept; compiled, all but that draw is one kernel each
# way.
WRITTEN = {False: (26.0, 22.0), True: (12.0, 10.0)}


def written_seconds(
    scores: float, head_dim: int, flops: float, speed: float, moved: tuple[float, float]
) -> tuple[float, float]:
    """Seconds forward and backward, of all `scores` of 16 bits at `flops` and `speed`
    (bytes) a second, for each of which so many bytes are `moved`.

    Two products forward and four backward, each of them 2 `head_dim` operations a score,
    which it writes or reads once: the slower of the two counts. On an A100 at 256 TFLOP/s
    and 1.7 TB/s, heads of 128, not compiled: 17.6 ps a score either way."""
    product = max(2.0 * head_dim / flops, 2.0 / speed)
    return scores * (2 * product + moved[0] / speed), scores * (4 * product + moved[1] / speed)
