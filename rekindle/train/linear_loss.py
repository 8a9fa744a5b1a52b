"""The loss of a large output layer, and what it says of single targets, a few rows at a time: never
are there the logits of all of them.

Shapes: N supervised tokens (F where they are scored), H hidden, V vocabulary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rekindle.plan.tensors import TAUGHT, rows_at_once
from rekindle.train.weights import intervals

_ALIGNED = 64


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a teacher says of the same tokens: `head` makes logits of its `states_NH`. `weight` is
    the share of the loss that is the divergence of distributions softened by `temperature`, times
    the temperature squared (Hinton, Vinyals, Dean 2015, arXiv 1503.02531)."""

    head: Callable[[torch.Tensor], torch.Tensor]
    states_NH: torch.Tensor
    temperature: float
    weight: float


def linear_cross_entropy(
    hidden_NH: torch.Tensor, weight: torch.Tensor, labels_N: torch.Tensor, scale: torch.Tensor,
    group: dist.ProcessGroup | None = None, add_up: bool = True, lesson: Lesson | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Cross-entropy of `hidden @ weight.T`, summed and times `scale`, and the number of right
    predictions, without ever holding all logits: a few rows at a time, gradients made on the way.
    With a `lesson` the loss is partly the divergence from a teacher.

    `weight` [V, H] may be a DTensor whose rows are divided over `group`; then each rank's gradient
    of `hidden` is its share, and `add_up` makes it the whole."""
    start = intervals(weight)[0][0] if isinstance(weight, DTensor) else 0
    divided = group if isinstance(weight, DTensor) else None
    local_VH = weight.to_local() if isinstance(weight, DTensor) else weight
    if torch.is_autocast_enabled(hidden_NH.device.type):
        hidden_NH = hidden_NH.to(torch.get_autocast_dtype(hidden_NH.device.type))
    # a teacher has no columns but the real ones
    head_WH = _aligned(local_VH, hidden_NH.dtype, lesson is None)
    loss, right = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head_WH, labels_N, len(local_VH), scale, divided, start, add_up, lesson
    )
    return loss, right


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, head_WH: torch.Tensor, labels_N: torch.Tensor,
        columns: int, scale: torch.Tensor, group: dist.ProcessGroup | None, start: int,
        add_up: bool, lesson: Lesson | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        device, (for_hidden, for_head, *_) = hidden_NH.device, ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden_NH, dtype=exact) if for_hidden else None
        grad_head = torch.zeros_like(head_WH, dtype=exact) if for_head else None
        loss = torch.zeros((), dtype=exact, device=device)
        right = torch.zeros((), dtype=exact, device=device)
        learns, factor = for_hidden or for_head, scale.to(exact)
        hard = 1.0 if lesson is None else 1 - lesson.weight
        rows = rows_at_once(columns * (1 if lesson is None else TAUGHT), device.type)
        for low in range(0, len(hidden_NH), rows):
            piece = slice(low, low + rows)
            part_NH = hidden_NH[piece]
            logits_NV, soft_NV = _product(part_NH, head_WH.T, exact), None
            logits_NV[:, columns:] = -math.inf
            if lesson is not None:
                divergence, soft_NV = _softened(logits_NV, lesson, piece)
                loss += divergence
            share = factor * hard if learns else None
            entropy, hits = _hardened(logits_NV, labels_N[piece] - start, columns, share, group)
            loss += hard * entropy
            right += hits
            if not learns:
                continue
            if soft_NV is not None:
                logits_NV += soft_NV.mul_(factor)
                del soft_NV
            slope_NV = logits_NV.to(hidden_NH.dtype)
            if grad_hidden is not None:
                grad_hidden[piece] = slope_NV @ head_WH
            if grad_head is not None:
                grad_head += slope_NV.T @ part_NH
            del logits_NV, slope_NV  # before the next piece is made
        if grad_hidden is not None and group is not None and add_up:
            dist.all_reduce(grad_hidden, group=group)
        ctx.save_for_backward(
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            None if grad_head is None else grad_head.to(head_WH.dtype),
        )
        return loss * factor, right

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
        grads = (None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)
        return *grads, *[None] * 7


def _aligned(weight_VH: torch.Tensor, dtype: torch.dtype, may: bool = True) -> torch.Tensor:
    """[W, H] in this type. On a GPU a vocabulary that is no multiple of 64 `may` get rows of zeros:
    tensor cores want aligned rows of logits. Products with GPT-2's 50,257 took a quarter of a step
    on an H200."""
    spare = -len(weight_VH) % _ALIGNED if weight_VH.is_cuda and may else 0
    if not spare:
        return weight_VH.to(dtype)
    return _Padded.apply(weight_VH, dtype, spare)  # type: ignore[no-untyped-call,no-any-return]


class _Padded(torch.autograd.Function):
    """Cast, with rows of zeros behind it, in one copy."""

    @staticmethod
    def forward(ctx: Any, weight_VH: torch.Tensor, dtype: torch.dtype, spare: int) -> torch.Tensor:
        count, ctx.dtype = len(weight_VH), weight_VH.dtype
        head_WH = weight_VH.new_empty(count + spare, weight_VH.shape[1], dtype=dtype)
        head_WH[:count], head_WH[count:] = weight_VH, 0
        ctx.count = count
        return head_WH

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad[: ctx.count].to(ctx.dtype), None, None


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b in `dtype`; on a GPU without a result in half precision on the way."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _hardened(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, columns: int, factor: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Cross-entropy of a piece, summed, and its right predictions; columns beyond `columns` are
    -inf. In place of the logits are then their gradients, times `factor`, if there is one. Labels
    of other ranks' columns lie outside."""
    mine_N = (labels_N >= 0) & (labels_N < columns)
    safe_N = labels_N.clamp(0, columns - 1)
    top_N = logits_NV.amax(-1)
    target_N = logits_NV.gather(1, safe_N[:, None])[:, 0].masked_fill(~mine_N, 0.0)
    if group is not None:
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group)
        dist.all_reduce(target_N, group=group)
    logits_NV.sub_(top_N[:, None]).exp_()
    total_N = logits_NV.sum(-1)
    if group is not None:
        dist.all_reduce(total_N, group=group)
    if factor is not None:
        logits_NV.mul_((factor / total_N)[:, None])
        places_N = torch.arange(len(safe_N), device=logits_NV.device)
        logits_NV[places_N, safe_N] -= mine_N.to(logits_NV.dtype) * factor
    return (total_N.log() + top_N - target_N).sum(), (target_N >= top_N).sum()


def _softened(
    ours_NV: torch.Tensor, lesson: Lesson, piece: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lesson's share of a piece's loss, and its gradients with respect to our logits. In place,
    so that there are never more than `TAUGHT` matrices as large as the logits."""
    warmth = lesson.temperature
    theirs_NV = lesson.head(lesson.states_NH[piece]).to(ours_NV.dtype, copy=True)
    theirs_NV = F.log_softmax(theirs_NV.div_(warmth), -1)
    ours_NV = F.log_softmax(ours_NV / warmth, -1)
    chances_NV = theirs_NV.exp()
    divergence = theirs_NV.sub_(ours_NV).mul_(chances_NV).sum()
    slopes_NV = ours_NV.exp_().sub_(chances_NV)
    return lesson.weight * warmth**2 * divergence, slopes_NV.mul_(lesson.weight * warmth)


def judge_targets(
    hidden_FH: torch.Tensor, weight: torch.Tensor, targets_F: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    """Float [F, 2]: of each target the loss in nats and the most probable token; never holds the
    logits of more than a few targets.

    `weight` [V, H] may be a DTensor whose rows are divided over `group`."""
    start = intervals(weight)[0][0] if isinstance(weight, DTensor) else 0
    divided = group if isinstance(weight, DTensor) else None
    local_VH = weight.to_local() if isinstance(weight, DTensor) else weight
    if torch.is_autocast_enabled(hidden_FH.device.type):
        hidden_FH = hidden_FH.to(torch.get_autocast_dtype(hidden_FH.device.type))
    single = torch.promote_types(hidden_FH.dtype, torch.float32)
    columns, head_WH = len(local_VH), _aligned(local_VH, hidden_FH.dtype)
    rows = rows_at_once(columns, hidden_FH.device.type)
    found = [
        judged(_product(h, head_WH.T, single)[:, :columns], targets, start, divided)
        for h, targets in zip(
            torch.split(hidden_FH, rows), torch.split(targets_F, rows), strict=True
        )
    ]
    return torch.cat(found)


def exact(logits: torch.Tensor) -> torch.Tensor:
    """In single precision at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def judged(
    logits_FV: torch.Tensor, targets_F: torch.Tensor, start: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """As `judge_targets`; `logits_FV` are those of the tokens from `start` on. Of equally probable
    tokens the first counts."""
    top_F, token_F = logits_FV.max(-1)
    place_F = targets_F - start
    mine_F = (place_F >= 0) & (place_F < logits_FV.shape[1])
    safe_F = place_F.clamp(0, logits_FV.shape[1] - 1)
    target_F = logits_FV.gather(1, safe_F[:, None])[:, 0].masked_fill(~mine_F, 0.0)
    token_F = token_F + start
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
