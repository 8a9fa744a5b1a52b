"""How long attention takes between its projections, by the kernel that runs it.

A flash kernel (Dao 2023, arXiv 2307.08691; Shah et al. 2024, arXiv 2407.08608) does two
products forward and five backward, at a share of the peak that grows with the sequence;
the shares are read off published benchmarks (constants.yaml,
tests/plan/rows/attention.csv). Attention that is written out does six products, masked
halves included, and moves every score through the memory, operation by operation."""

from __future__ import annotations

import dataclasses

# of a flash kernel, times the products forward: it computes the scores again
BACKWARD_PRODUCTS = 2.5
NARROW = 64  # heads of at most so many are slower; published speeds are of 64 and 128


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How fast a flash kernel is, fitted to published speeds.

    On a sequence of n tokens it reaches `forward` / (1 + `forward_half` / n) of the GPU's
    peak, hence half of `forward` where n is `forward_half`; backward likewise."""

    forward: float
    """The share of the peak on an endless sequence."""
    forward_half: float
    """Tokens of the sequence on which half of that share is left."""
    backward: float
    backward_half: float
    diagonal: float = 0.0
    """Tokens that are added to both halves with a causal mask: blocks on its diagonal are
    computed in whole, though half of them is masked."""
    narrow: float = 1.0
    """The speed with heads of 64, over that with heads of 128."""

    def seconds(
        self, flops: float, sequence: int, peak: float, head_dim: int, causal: bool
    ) -> tuple[float, float]:
        """Seconds forward and backward, where the forward pass takes `flops`, without
        those that a mask saves, and the GPU does at most `peak` a second."""
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


# Bytes that the operations between the products move for each score, forward and
# backward, by whether they are compiled. They are those of our own attention with dropout
# (train/attention.py), whose softmax is in fp32: the mask is spread out and added, the
# softmax casts its input and its result is cast back, dropout multiplies with what it
# keeps. Compiled, all of this but the draw of dropout is one kernel forward and one
# backward.
WRITTEN = {False: (26.0, 22.0), True: (12.0, 10.0)}


def written_seconds(
    scores: float,
    head_dim: int,
    flops_per_second: float,
    bytes_per_second: float,
    bytes_per_score: tuple[float, float],
) -> tuple[float, float]:
    """Seconds forward and backward of attention that is written out, for so many `scores`
    of 16 bits; `bytes_per_score` are moved between the products, forward and backward.

    There are two products forward and four backward. Each takes 2 `head_dim` operations a
    score and writes or reads the score once; the slower of both counts. On an A100 at 256
    TFLOP/s and 1.7 TB/s, with heads of 128 and not compiled: 17.6 ps a score in either
    direction."""
    product = max(2.0 * head_dim / flops_per_second, 2.0 / bytes_per_second)
    moved_forward, moved_backward = bytes_per_score
    forward = 2 * product + moved_forward / bytes_per_second
    backward = 4 * product + moved_backward / bytes_per_second
    return scores * forward, scores * backward
