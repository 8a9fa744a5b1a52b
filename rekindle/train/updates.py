"""What an update makes of gradients, by `train.optimizer`: AdamW, Muon, or AdamW in 8
bits.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon is the
reference of the tests) and 8 bits (Dettmers et al. 2022, arXiv 2110.02861) are for the
weights of linear layers in blocks; tables, heads, norms and biases have AdamW beside
them. An `Update` owns its state and changes weights in place, on the device: it reads
nothing there, and where a step is not `finite` neither weights nor state change. To add
one, write a class here and name it in `UPDATES`, in TrainSpec.optimizer, in
plan/updates.py, and in spec/layout.py if it needs whole matrices.

Moments in 8 bits are saved as they are, codes and scales, in blocks within a row, so that
ranks which divide rows (`dp`, `shard`, `pp`, `cp`) hold the codes of one rank and resume
each other; `tp` is refused. Rejected: moments in full precision in checkpoints, because a
save would need all of them on the device, which is what does not fit; blocks of the
flattened shard, whose codes depend on the layout; bitsandbytes' optimizers, whose state
cannot be divided by rows and whose skipped step needs a read of the device. The cost is
more traffic in memory than a fused kernel has."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.adamw import adamw

from rekindle.engines.base import by_decay
from rekindle.plan.updates import NEWTON_SCHULZ_STEPS, rows_of_piece, scale_blocks
from rekindle.spec.model import TrainSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
Weights = Sequence[Tensor]


class Update(Protocol):
    """An optimizer of local tensors. `state` holds its tensors by the weight and by name."""

    state: dict[Tensor, dict[str, Tensor]]

    def step(self, rate: float, factor: Tensor, finite: Tensor) -> None:
        """Update all weights with `factor` (float64 []) times gradients, if `finite` (bool [])."""


class AdamW:
    """Of all weights: matrices decay, one-dimensional parameters (biases, norms) do not."""

    def __init__(self, matrices: Weights, others: Weights, spec: TrainSpec) -> None:
        weights = [*matrices, *others]
        self.adam = torch.optim.AdamW(
            by_decay(weights),
            lr=0.0,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=True,
        )
        self.state: dict[Tensor, dict[str, Tensor]] = self.adam.state
        for weight in weights:
            moments = {name: torch.zeros_like(weight) for name in MOMENTS}
            self.state[weight] = {"step": _counter(weight), **moments}

    def step(self, rate: float, factor: Tensor, finite: Tensor) -> None:
        adam: Any = self.adam
        # the fused kernel divides by it on the way, which saves a pass over all gradients
        adam.grad_scale = (1 / factor).float()
        adam.found_inf = (~finite).float()
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()


class Muon:
    """A matrix moves along its Nesterov momentum with all singular values near 1, by 0.2
    sqrt(max(rows, columns)) times the rate: the root mean square of AdamW's steps (Liu et
    al. 2025, arXiv 2502.16982). A [1024, 4096] matrix moves by 12.8 times the rate in
    each direction."""

    MOMENTUM = 0.95
    RMS = 0.2

    def __init__(self, matrices: Weights, others: Weights, spec: TrainSpec) -> None:
        self.matrices = matrices
        self.decay = spec.weight_decay
        self.others = AdamW((), others, spec)
        self.state = dict(self.others.state)
        for matrix in matrices:
            self.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix)}

    def step(self, rate: float, factor: Tensor, finite: Tensor) -> None:
        self.others.step(rate, factor, finite)
        # numbers on the device, for nothing is read there: 0 of a step that is skipped
        is_taken = finite.double()
        keep = 1 - is_taken * (rate * self.decay)
        share = is_taken * (1 - self.MOMENTUM)
        skipped = ~finite
        for matrix in self.matrices:
            gradient = matrix.grad
            momentum = self.state[matrix]["momentum_buffer"]
            assert gradient is not None
            gradient.mul_(factor).masked_fill_(skipped, 0.0)
            momentum.lerp_(gradient, share.to(momentum.dtype))
            gradient.lerp_(momentum, self.MOMENTUM)
            size = rate * self.RMS * math.sqrt(max(matrix.shape))
            # not kept under a name, which the next matrix's would lie beside
            matrix.mul_(keep).add_(orthogonal(gradient).masked_fill_(skipped, 0.0), alpha=-size)


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with singular values between about 0.7 and 1.2, in bf16, or fp64, then
    overwritten: five steps of Newton and Schulz with Jordan's polynomial, on the shorter
    side."""
    work = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    is_tall = work.shape[0] > work.shape[1]
    if is_tall:
        work = work.T
    work.div_(work.norm().clamp(min=1e-7))
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = work @ work.T
        square = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        work = torch.addmm(work, square, work, beta=3.4445)
    return work.T if is_tall else work


class AdamW8bit:
    """AdamW whose moments of matrices are codes of 8 bits, with a scale for each block of
    a row: no layout that divides rows changes them. They are in full precision for one
    piece at a time."""

    def __init__(self, matrices: Weights, others: Weights, spec: TrainSpec) -> None:
        self.matrices = matrices
        self.spec = spec
        self.others = AdamW((), others, spec)
        dtype = torch.promote_types(matrices[0].dtype, torch.float32)
        device = matrices[0].device
        self.codes = {name: Codes(name == "exp_avg", dtype, device) for name in MOMENTS}
        self.state = dict(self.others.state)
        for matrix in matrices:
            self.state[matrix] = self._state_of_zeros(matrix)

    def _state_of_zeros(self, matrix: Tensor) -> dict[str, Tensor]:
        """Codes and scales of moments that are all zero."""
        rows = len(matrix)
        blocks, size = scale_blocks(matrix.shape[1])
        state = {"step": _counter(matrix)}
        for name, codes in self.codes.items():
            shape = (rows, blocks * size)
            zeros = torch.full(shape, codes.zero, dtype=torch.uint8, device=matrix.device)
            state[f"{name}_codes"] = zeros
            state[f"{name}_scales"] = matrix.new_zeros((rows, blocks))
        return state

    def step(self, rate: float, factor: Tensor, finite: Tensor) -> None:
        """AdamW's step of the others, then of each matrix, piece by piece."""
        self.others.step(rate, factor, finite)
        scale = (1 / factor).float()
        skipped = (~finite).float()
        for matrix in self.matrices:
            before = self.state[matrix]["step"].clone()  # each piece counts the step once more
            at_once = rows_of_piece(matrix.shape[1])
            # a rank that holds no row counts the step, too
            for start in range(0, max(1, len(matrix)), at_once):
                self.state[matrix]["step"].copy_(before)
                self._update(matrix, slice(start, start + at_once), rate, scale, skipped)

    def _update(
        self, matrix: Tensor, piece: slice, rate: float, scale: Tensor, skipped: Tensor
    ) -> None:
        """AdamW's step of some rows, whose moments are in full precision meanwhile."""
        spec = self.spec
        state = self.state[matrix]
        weights = matrix[piece]
        assert matrix.grad is not None
        moments = {}
        for name in MOMENTS:
            codes = state[f"{name}_codes"][piece]
            scales = state[f"{name}_scales"][piece]
            moments[name] = self.codes[name].read(codes, scales, weights.shape[1]).to(weights.dtype)
        adamw(
            [weights],
            [matrix.grad[piece]],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            grad_scale=scale,
            found_inf=skipped,
            amsgrad=False,
            beta1=spec.betas[0],
            beta2=spec.betas[1],
            lr=rate,
            weight_decay=spec.weight_decay,
            eps=spec.eps,
            maximize=False,
        )
        for name in MOMENTS:
            codes = state[f"{name}_codes"][piece]
            scales = state[f"{name}_scales"][piece]
            self.codes[name].write(moments.pop(name), codes, scales)


class Codes:
    """256 numbers or fewer between -1 and 1, or 0 and 1, as dynamic tree quantisation has
    them: 7 powers of ten, and within each half as many steps as within the next larger
    one. Both ends are among them, so that the largest number of a block, its scale, is
    exact."""

    DECADES = 7
    TINY = 2.0**-100  # scales below count as zero: their smallest codes would not be normal floats

    def __init__(self, signed: bool, dtype: torch.dtype, device: torch.device) -> None:
        bits = self.DECADES
        if signed:
            bits -= 1  # one says the sign
        positive = []
        for decade in range(self.DECADES):
            steps = 2 ** (bits - decade)
            for step in range(steps):
                positive.append(10.0**-decade * (0.1 + 0.9 * (step + 1) / steps))
        positive.sort()
        values = [0.0, *positive]
        if signed:
            values = [*(-value for value in reversed(positive)), *values]
        middles = [(low + high) / 2 for low, high in itertools.pairwise(values)]
        if not signed:
            # a mean square above zero stays above zero, or the step would be as long as mean / eps
            middles[0] = 0.0
        self.dtype = dtype
        self.zero = values.index(0.0)
        self.values = torch.tensor(values, dtype=dtype, device=device)
        self.middles = torch.tensor(middles, dtype=dtype, device=device)

    def read(self, codes: Tensor, scales: Tensor, columns: int) -> Tensor:
        """Numbers [rows, columns] of codes [rows, blocks x size] and scales [rows, blocks]."""
        numbers = self.values.index_select(0, codes.flatten().int()).view_as(codes)
        blocks = numbers.view(*scales.shape, numbers.shape[1] // scales.shape[1])
        blocks.mul_(scales.to(self.dtype).unsqueeze(-1))
        return numbers[:, :columns].contiguous()

    def write(self, numbers: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Replace codes and scales by those of `numbers` [rows, columns], which are used up."""
        numbers = numbers.to(self.dtype)
        if padding := codes.shape[1] - numbers.shape[1]:
            numbers = functional.pad(numbers, (0, padding))
        blocks = numbers.view(*scales.shape, numbers.shape[1] // scales.shape[1])
        largest = torch.linalg.vector_norm(blocks, math.inf, dim=-1)
        scales.copy_(largest.masked_fill(largest < self.TINY, 0.0))
        blocks.div_(scales.to(self.dtype).masked_fill(scales == 0, math.inf).unsqueeze(-1))
        codes.copy_(torch.bucketize(numbers, self.middles, out_int32=True))


def _counter(weight: Tensor) -> Tensor:
    # where the parameter is: CUDA's fused kernel compares the devices
    return torch.zeros((), dtype=torch.float32, device=weight.device)


UPDATES: Mapping[str, type[AdamW] | type[Muon] | type[AdamW8bit]] = {
    "adamw": AdamW,
    "muon": Muon,
    "adamw8bit": AdamW8bit,
}
