"""Cross-entropy of classes, with label smoothing and a teacher: of examples, or of words.

Shapes: N targets, C classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from rekindle.train.micro import Tensors
from rekindle.train.objectives.base import row

if TYPE_CHECKING:
    from rekindle.train.part import Goal, Part


def logits_of(part: Part, batch: Tensors) -> torch.Tensor:
    """What the task's network scores, on the last stage."""
    if part.first or hasattr(part.network, "config"):
        return part.task.logits(part.network, batch)
    return part.network(batch["inputs_embeds"])  # type: ignore[no-any-return]


def taught(part: Part, batch: Tensors) -> torch.Tensor | None:
    """The teacher's logits of classes, before the student's forward pass, whose activations are
    not there yet."""
    if not (part.teachers and part.training):
        return None
    with torch.no_grad():
        return part.task.logits(part.teachers[0], batch)


def loss_of(
    part: Part, logits_NC: torch.Tensor, theirs_NC: torch.Tensor | None, labels_N: torch.Tensor,
    weights_N: torch.Tensor, count: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """[1, 3]: a share of the mean loss over `count` targets, right predictions, targets."""
    counts_C = part.goal.class_weights if part.training else None
    losses_N = F.cross_entropy(
        logits_NC, labels_N, reduction="none",
        weight=None if counts_C is None else counts_C.to(logits_NC.dtype),
        label_smoothing=part.goal.label_smoothing if part.training else 0.0,
    )  # fmt: skip
    weights_N = weights_N.to(logits_NC.dtype)
    loss = (losses_N * weights_N).sum() / count
    if theirs_NC is not None:
        soft = (_divergence(logits_NC, theirs_NC, part.goal) * weights_N).sum() / count
        share = part.goal.teacher_weight
        loss = (1 - share) * loss + share * part.goal.temperature**2 * soft
    right = ((logits_NC.argmax(-1) == labels_N) * weights_N).sum()
    return row(loss, right.to(loss.dtype), weights_N.sum())


def _divergence(ours_NC: torch.Tensor, theirs_NC: torch.Tensor, goal: Goal) -> torch.Tensor:
    """From a teacher's softened distribution, of each target."""
    warmth = goal.temperature
    return F.kl_div(
        F.log_softmax(ours_NC / warmth, -1),
        F.log_softmax(theirs_NC.to(ours_NC.dtype) / warmth, -1),
        reduction="none", log_target=True,
    ).sum(-1)  # fmt: skip
