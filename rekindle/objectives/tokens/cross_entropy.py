"""The cross-entropy of a large output layer, and what it says of single targets, a few
rows at a time: never are there the logits of all of them.

Shapes: N supervised tokens (F where they are scored), H hidden, V vocabulary, W its rows
here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rekindle.objectives.shards import intervals
from rekindle.objectives.tokens import TAUGHT, rows_at_once

Ranks = dist.ProcessGroup | None

_ALIGNED = 64
"""Rows of the output layer, in a multiple of which tensor cores work."""


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a teacher says of the same tokens (Hinton, Vinyals, Dean 2015, arXiv 1503.02531)."""

    head: Callable[[Tensor], Tensor]
    """Makes logits of its states."""
    states_NH: Tensor
    temperature: float
    """Of both distributions, whose divergence counts times the temperature squared."""
    weight: float
    """The share of the loss that is the divergence."""


def linear_cross_entropy(
    hidden_NH: Tensor,
    weight: Tensor,
    labels_N: Tensor,
    scale: Tensor,
    group: Ranks = None,
    add_up: bool = True,
    lesson: Lesson | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of `hidden @ weight.T`, summed and times `scale`, and the number of
    right predictions, a few rows at a time, gradients made on the way; partly the
    divergence of a `lesson`.

    Rows of `weight` [V, H] may be divided over `group`; `add_up` makes the gradient of
    `hidden` the whole. `smoothing` spreads that share of each target evenly over all V
    tokens, as `torch.nn.functional.cross_entropy` does; a lesson's share of the loss has
    none."""
    hidden_NH, local_VH, share = _factors(hidden_NH, weight, group)
    # a teacher has no columns but the real ones
    head_WH = _aligned(local_VH, hidden_NH.dtype, may_pad=lesson is None)
    if not torch.is_grad_enabled():  # which `needs_input_grad` does not tell
        hidden_NH = hidden_NH.detach()
        head_WH = head_WH.detach()
    loss, right = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head_WH, labels_N, scale, share, add_up, lesson, smoothing
    )
    return loss, right


@dataclasses.dataclass(frozen=True)
class _Share:
    """The columns of the logits that this rank has."""

    count: int
    """It may be 0."""
    total: int
    start: int = 0
    """The first of them."""
    group: Ranks = None
    """The peers that have the others."""

    def rows_at_once(self, matrices: int, device: str) -> int:
        """Rows of a piece, with so many matrices as large as its logits.

        By the widest share of any rank: each piece is reduced over the group, so all
        ranks need the same pieces."""
        peers = 1 if self.group is None else dist.get_world_size(self.group)
        widest = -(-self.total // peers)
        return rows_at_once(widest * matrices, device)


def _factors(hidden: Tensor, weight: Tensor, group: Ranks) -> tuple[Tensor, Tensor, _Share]:
    """Both as they are multiplied here, and which rows of `weight` are here."""
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    if not isinstance(weight, DTensor):
        return hidden, weight, _Share(len(weight), len(weight))
    local = weight.to_local()
    return hidden, local, _Share(len(local), len(weight), intervals(weight)[0][0], group)


class _LinearCrossEntropy(torch.autograd.Function):
    """Makes the gradients in the forward pass, while a piece's logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_WH: Tensor,
        labels_N: Tensor,
        scale: Tensor,
        share: _Share,
        add_up: bool,
        lesson: Lesson | None,
        smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        device = hidden_NH.device
        for_hidden, for_head, *_ = ctx.needs_input_grad
        learns = for_hidden or for_head
        grad_hidden = torch.zeros_like(hidden_NH, dtype=exact) if for_hidden else None
        grad_head = torch.zeros_like(head_WH, dtype=exact) if for_head else None
        loss = torch.zeros((), dtype=exact, device=device)
        right = torch.zeros((), dtype=exact, device=device)
        factor = scale.to(exact)
        share_of_labels = 1.0 if lesson is None else 1 - lesson.weight
        rows = share.rows_at_once(1 if lesson is None else TAUGHT, device.type)
        for low in range(0, len(hidden_NH), rows):
            piece = slice(low, low + rows)
            part_NH = hidden_NH[piece]
            logits_NV = _product(part_NH, head_WH.T, exact)
            logits_NV[:, share.count :] = -math.inf  # of rows that only fill up
            slopes_of_lesson_NV = None
            if lesson is not None:
                divergence, slopes_of_lesson_NV = _softened(logits_NV, lesson, piece)
                loss += divergence
            slope = factor * share_of_labels if learns else None
            labels_P = labels_N[piece] - share.start
            entropy, hits = _hardened(logits_NV, labels_P, share, slope, smoothing)
            loss += share_of_labels * entropy
            right += hits
            if not learns:
                continue
            if slopes_of_lesson_NV is not None:
                logits_NV += slopes_of_lesson_NV.mul_(factor)
                del slopes_of_lesson_NV
            slope_NV = logits_NV.to(hidden_NH.dtype)
            if grad_hidden is not None:
                grad_hidden[piece] = slope_NV @ head_WH
            if grad_head is not None:
                grad_head += slope_NV.T @ part_NH
            del logits_NV, slope_NV  # before the next piece is made
        if grad_hidden is not None and share.group is not None and add_up:
            dist.all_reduce(grad_hidden, group=share.group)
        ctx.save_for_backward(
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            None if grad_head is None else grad_head.to(head_WH.dtype),
        )
        return loss * factor, right

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = []
        for saved in ctx.saved_tensors:
            grads.append(None if saved is None else saved * grad.to(saved.dtype))
        further_arguments = 6  # of `forward`, behind the two
        return *grads, *[None] * further_arguments


def _aligned(weight_VH: Tensor, dtype: torch.dtype, may_pad: bool = True) -> Tensor:
    """[W, H] in this type; on a GPU maybe with rows of zeros: tensor cores want aligned
    rows of logits. Products with GPT-2's 50,257 took a quarter of a step on an H200."""
    spare = -len(weight_VH) % _ALIGNED
    if not (spare and may_pad and weight_VH.is_cuda):
        return weight_VH.to(dtype)
    return _Padded.apply(weight_VH, dtype, spare)  # type: ignore[no-untyped-call,no-any-return]


class _Padded(torch.autograd.Function):
    """Cast, with rows of zeros behind it, in one copy."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, dtype: torch.dtype, spare: int) -> Tensor:
        count = len(weight_VH)
        head_WH = weight_VH.new_empty(count + spare, weight_VH.shape[1], dtype=dtype)
        head_WH[:count] = weight_VH
        head_WH[count:] = 0
        ctx.dtype = weight_VH.dtype
        ctx.count = count
        return head_WH

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[: ctx.count].to(ctx.dtype), None, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`; on a GPU without a result in half precision on the way."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _hardened(
    logits_NV: Tensor, labels_N: Tensor, share: _Share, factor: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a piece, summed, and its right predictions.

    Columns beyond this rank's own are -inf. Where there is a `factor`, the gradients
    times it stand in place of the logits afterwards."""
    group = share.group
    mine_N = (labels_N >= 0) & (labels_N < share.count)
    safe_N = labels_N.clamp(0, max(0, share.count - 1))
    top_N = _largest(logits_NV)
    target_N = _picked(logits_NV, safe_N, mine_N)
    if group is not None:
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group)
        dist.all_reduce(target_N, group=group)
    logits_NV.sub_(top_N[:, None])
    below_N = logits_NV[:, : share.count].sum(-1) if smoothing else None
    total_N = logits_NV.exp_().sum(-1)
    if group is not None:
        dist.all_reduce(total_N, group=group)
    if below_N is not None and group is not None:
        dist.all_reduce(below_N, group=group)
    if factor is not None:
        logits_NV.mul_((factor / total_N)[:, None])
        if share.count:
            places_N = torch.arange(len(safe_N), device=logits_NV.device)
            hit_N = mine_N.to(logits_NV.dtype) * (1 - smoothing)
            logits_NV[places_N, safe_N] -= hit_N * factor
        if smoothing:
            logits_NV[:, : share.count] -= factor * (smoothing / share.total)
    losses_N = total_N.log() + top_N - target_N
    if below_N is not None:
        # of the share that is spread, the mean over all tokens takes the target's place
        losses_N += smoothing * (target_N - top_N - below_N / share.total)
    return losses_N.sum(), (target_N >= top_N).sum()


def _largest(logits_NV: Tensor) -> Tensor:
    """The largest of each row; -inf on a rank without columns."""
    if not logits_NV.shape[1]:
        return logits_NV.new_full((len(logits_NV),), -math.inf)
    return logits_NV.amax(-1)


def _picked(logits_NV: Tensor, places_N: Tensor, mine_N: Tensor) -> Tensor:
    """What stands at one place of each row where it is this rank's, else 0."""
    if not logits_NV.shape[1]:
        return logits_NV.new_zeros(len(logits_NV))
    return logits_NV.gather(1, places_N[:, None])[:, 0].masked_fill(~mine_N, 0.0)


def _softened(ours_NV: Tensor, lesson: Lesson, piece: slice) -> tuple[Tensor, Tensor]:
    """The lesson's share of a piece's loss, and its gradients; in place, to hold few matrices."""
    temperature = lesson.temperature
    theirs_NV = lesson.head(lesson.states_NH[piece]).to(ours_NV.dtype, copy=True)
    theirs_NV = F.log_softmax(theirs_NV.div_(temperature), -1)
    ours_NV = F.log_softmax(ours_NV / temperature, -1)
    probabilities_NV = theirs_NV.exp()
    divergence = theirs_NV.sub_(ours_NV).mul_(probabilities_NV).sum()
    slopes_NV = ours_NV.exp_().sub_(probabilities_NV)
    loss = lesson.weight * temperature**2 * divergence
    return loss, slopes_NV.mul_(lesson.weight * temperature)


def judge_targets(
    hidden_FH: Tensor, weight: Tensor, targets_F: Tensor, group: Ranks = None
) -> Tensor:
    """Float [F, 2]: of each target the loss in nats and the most probable token, a few
    targets at a time. `weight` [V, H] may be a DTensor whose rows are divided over
    `group`."""
    hidden_FH, local_VH, share = _factors(hidden_FH, weight, group)
    exact = torch.promote_types(hidden_FH.dtype, torch.float32)
    head_WH = _aligned(local_VH, hidden_FH.dtype)
    rows = share.rows_at_once(1, hidden_FH.device.type)
    judgements = []
    states_of_pieces = torch.split(hidden_FH, rows)
    targets_of_pieces = torch.split(targets_F, rows)
    for states, targets in zip(states_of_pieces, targets_of_pieces, strict=True):
        logits = _product(states, head_WH.T, exact)[:, : share.count]
        judgements.append(judge_logits(logits, targets, share.start, share.group))
    return torch.cat(judgements)


def judge_logits(logits_FV: Tensor, targets_F: Tensor, start: int, group: Ranks) -> Tensor:
    """As `judge_targets`, by the logits of the tokens from `start` on; `group` has the
    others.

    Of equally probable tokens the first counts."""
    columns = logits_FV.shape[1]
    place_F = targets_F - start
    mine_F = (place_F >= 0) & (place_F < columns)
    safe_F = place_F.clamp(0, max(0, columns - 1))
    target_F = _picked(logits_FV, safe_F, mine_F)
    if columns:
        top_F, token_F = logits_FV.max(-1)
        token_F = token_F + start
    else:
        top_F = _largest(logits_FV)
        token_F = torch.full_like(place_F, torch.iinfo(torch.int64).max)
    if group is not None:
        best_F = top_F.clone()
        dist.all_reduce(best_F, dist.ReduceOp.MAX, group)
        token_F = token_F.masked_fill(top_F != best_F, torch.iinfo(torch.int64).max)
        dist.all_reduce(token_F, dist.ReduceOp.MIN, group)
        dist.all_reduce(target_F, group=group)
        top_F = best_F
    total_F = (logits_FV - top_F[:, None]).exp().sum(-1)
    if group is not None:
        dist.all_reduce(total_F, group=group)
    nats_F = total_F.log() + top_F - target_F
    return torch.stack([nats_F.double(), token_F.double()], 1)
