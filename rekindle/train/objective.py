"""The loss as a module: the network, or one pipeline stage of it, and what is made of its output.

`Part` is what gets wrapped by DDP or FSDP and cut by the pipeline: it takes one micro-batch and
returns, on the last stage, float [1, 3]: the loss (a sum divided by the number of targets of the
whole global batch, so that ranks and micro-batches simply add up), the number of right predictions,
and the number of targets; hidden states on the others.

Every block draws its dropout from (seed, step, micro-batch, block), so neither the number of ranks
nor the cutting into stages changes a mask. Shapes: B rows, T tokens, H hidden, V vocabulary, N
supervised tokens, C classes."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rekindle.tasks.base import Task
from rekindle.train import attention, families
from rekindle.train.weights import intervals

IGNORED = -100
LOGITS_AT_ONCE = 1 << 23  # elements: 32 MB of float32


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is minimised."""

    label_smoothing: float = 0.0
    teacher: nn.Module | None = None
    temperature: float = 1.0
    teacher_weight: float = 0.0


class Part(nn.Module):
    """One stage of the network, with the loss behind the last one."""

    def __init__(
        self, task: Task, network: nn.Module, goal: Goal, first: bool = True, last: bool = True,
        tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.network = network
        self.first, self.last = first, last
        self.tp_group, self.sequence_parallel = tp_group, sequence_parallel
        self.task, self.goal = task, goal
        # a plain list, so that the teacher is neither trained, sharded nor saved
        self.teachers = [goal.teacher] if goal.teacher is not None else []
        self.key = 0
        self.results: list[torch.Tensor] = []
        if _drops(network):
            for name, block in families.blocks(network):
                block.register_forward_pre_hook(self._reseed(zlib.crc32(name.encode())))

    def _reseed(self, place: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if module.training:
                torch.manual_seed(_mixed(self.key, place))

        return hook

    def forward(
        self, carried: torch.Tensor | None = None, *, key: torch.Tensor, count: torch.Tensor,
        **batch: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """`key` int64 [1], on the CPU, seeds dropout; `count` float [1] is the number of targets in
        the global batch; `carried` is what the stage before handed on."""
        self.key = int(key)
        if self.training:
            torch.manual_seed(self.key)
        attention.mark(batch.get("attention_mask"))
        if carried is not None:
            first = "pixels" if carried.is_floating_point() else "input_ids"
            batch[first if self.first else "inputs_embeds"] = carried
        made = self._tokens if self.task.objective == "tokens" else self._classes
        result = made(batch, count[0])
        if self.last:
            self.results.append(result.detach())
        return result

    def _tokens(self, batch: dict[str, torch.Tensor], count: torch.Tensor) -> torch.Tensor:
        labels_BT = batch.pop("labels")
        hidden_BTH = families.backbone(self.network)(**batch, use_cache=False).last_hidden_state
        if not self.last:
            return _sendable(hidden_BTH)
        head = self.network.get_output_embeddings()  # type: ignore[operator]
        supervised = labels_BT != IGNORED
        hidden_NH, labels_N = chosen(hidden_BTH, supervised), chosen(labels_BT, supervised)
        loss, right = linear_cross_entropy(
            hidden_NH, head.weight, labels_N, 1 / count, self.tp_group, not self.sequence_parallel
        )
        if self.teachers and self.training:
            loss = self._distilled_tokens(loss, batch, hidden_NH, head, supervised, count)
        return _row(loss, right, supervised.sum().to(loss.dtype))

    def _distilled_tokens(
        self, loss: torch.Tensor, batch: Mapping[str, torch.Tensor], hidden_NH: torch.Tensor,
        head: nn.Module, supervised: torch.Tensor, count: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        teacher = self.teachers[0]
        with torch.no_grad():
            states = families.backbone(teacher)(**batch, use_cache=False).last_hidden_state
            theirs_NV = teacher.get_output_embeddings()(states[supervised])  # type: ignore[operator]
        return self._blend(loss, head(hidden_NH), theirs_NV, None, count)

    def _blend(
        self, loss: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor,
        weights: torch.Tensor | None, count: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Hinton, Vinyals, Dean 2015 (arXiv 1503.02531): KL of softened distributions, times the
        temperature squared."""
        warmth, share = self.goal.temperature, self.goal.teacher_weight
        divergence = F.kl_div(
            F.log_softmax(ours.float() / warmth, -1), F.log_softmax(theirs.float() / warmth, -1),
            reduction="none", log_target=True,
        ).sum(-1)  # fmt: skip
        if weights is not None:
            divergence = divergence * weights
        return (1 - share) * loss + share * warmth**2 * divergence.sum() / count

    def _classes(self, batch: dict[str, torch.Tensor], count: torch.Tensor) -> torch.Tensor:
        labels_B, weights_B = batch.pop("labels"), batch.pop("weights")
        if not self.last:
            return self._hidden(batch)
        if self.first or hasattr(self.network, "config"):
            logits_BC = self.task.logits(self.network, batch)
        else:
            logits_BC = self.network(batch["inputs_embeds"])
        logits_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
        losses_B = F.cross_entropy(
            logits_BC, labels_B, reduction="none",
            label_smoothing=self.goal.label_smoothing if self.training else 0.0,
        )  # fmt: skip
        weights_B = weights_B.to(logits_BC.dtype)
        loss = (losses_B * weights_B).sum() / count
        if self.teachers and self.training:
            with torch.no_grad():
                theirs_BC = self.task.logits(self.teachers[0], batch)
            loss = self._blend(loss, logits_BC, theirs_BC, weights_B, count)
        right = ((logits_BC.argmax(-1) == labels_B) * weights_B).sum()
        return _row(loss, right.to(loss.dtype), weights_B.sum())

    def _hidden(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the next stage receives; a Sequential takes one input."""
        if hasattr(self.network, "config"):
            return _sendable(families.backbone(self.network)(**batch).last_hidden_state)
        return _sendable(self.network(batch.get("inputs_embeds", next(iter(batch.values())))))


def _sendable(hidden: torch.Tensor) -> torch.Tensor:
    """A pipeline sends it as it lies in memory, and zero bubble detaches it in place, which no view
    allows: GPT-2 ends in one."""
    return hidden.clone() if hidden._is_view() else hidden.contiguous()


def chosen(values_BT: torch.Tensor, supervised_BT: torch.Tensor) -> torch.Tensor:
    """The supervised tokens, one after the other."""
    return values_BT[supervised_BT]


def _row(*values: torch.Tensor) -> torch.Tensor:
    """[1, N], and no view: FSDP warns of those."""
    return torch.stack([value[None] for value in values], dim=1)


def linear_cross_entropy(
    hidden_NH: torch.Tensor, weight: torch.Tensor, labels_N: torch.Tensor, scale: torch.Tensor,
    group: dist.ProcessGroup | None = None, add_up: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Cross-entropy of `hidden @ weight.T`, summed and times `scale`, and the number of right
    predictions, without ever holding all logits: a few rows at a time, gradients made on the way.

    `weight` [V, H] may be a DTensor whose rows are divided over `group`; then each rank's gradient
    of `hidden` is its share, and `add_up` makes it the whole."""
    start = intervals(weight)[0][0] if isinstance(weight, DTensor) else 0
    divided = group if isinstance(weight, DTensor) and group is not None else None
    local_VH = weight.to_local() if isinstance(weight, DTensor) else weight
    if torch.is_autocast_enabled(hidden_NH.device.type):
        dtype = torch.get_autocast_dtype(hidden_NH.device.type)
        hidden_NH, local_VH = hidden_NH.to(dtype), local_VH.to(dtype)
    loss, right = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_NH, local_VH, labels_N, scale, divided, start, add_up
    )
    return loss, right


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor,
        scale: torch.Tensor, group: dist.ProcessGroup | None, start: int, add_up: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        needed = any(ctx.needs_input_grad[:2])
        grad_hidden = torch.zeros_like(hidden_NH, dtype=exact) if needed else None
        grad_weight = torch.zeros_like(weight_VH, dtype=exact) if needed else None
        loss = torch.zeros((), dtype=exact, device=hidden_NH.device)
        right = torch.zeros((), dtype=exact, device=hidden_NH.device)
        rows = max(1, LOGITS_AT_ONCE // max(1, len(weight_VH)))
        for low in range(0, len(hidden_NH), rows):
            part_NH = hidden_NH[low : low + rows]
            logits_NV = (part_NH @ weight_VH.T).to(exact)
            chosen_N = labels_N[low : low + rows] - start
            mine_N = (chosen_N >= 0) & (chosen_N < len(weight_VH))
            safe_N = chosen_N.clamp(0, len(weight_VH) - 1)
            top_N = logits_NV.amax(-1)
            target_N = logits_NV.gather(1, safe_N[:, None])[:, 0].masked_fill(~mine_N, 0.0)
            if group is not None:
                dist.all_reduce(top_N, dist.ReduceOp.MAX, group)
                dist.all_reduce(target_N, group=group)
            logits_NV.sub_(top_N[:, None]).exp_()
            total_N = logits_NV.sum(-1)
            if group is not None:
                dist.all_reduce(total_N, group=group)
            loss += (total_N.log() + top_N - target_N).sum()
            right += (target_N >= top_N).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            factor = scale.to(exact)
            logits_NV.mul_((factor / total_N)[:, None])
            logits_NV[torch.arange(len(safe_N)), safe_N] -= mine_N.to(exact) * factor
            slope_NV = logits_NV.to(hidden_NH.dtype)
            grad_hidden[low : low + rows] = slope_NV @ weight_VH
            grad_weight += slope_NV.T @ part_NH
        if grad_hidden is not None and grad_weight is not None:
            if group is not None and add_up:
                dist.all_reduce(grad_hidden, group=group)
            ctx.save_for_backward(grad_hidden.to(hidden_NH.dtype), grad_weight.to(weight_VH.dtype))
        return loss * scale.to(exact), right

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        grads = (x * grad.to(x.dtype) for x in (grad_hidden, grad_weight))
        return *grads, None, None, None, None, None


def _drops(network: nn.Module) -> bool:
    """Whether anything in the network draws random numbers while training."""
    config = getattr(network, "config", None)
    attention = float(getattr(config, "attention_dropout", 0.0) or 0.0)
    layers = any(isinstance(m, nn.Dropout) and m.p > 0 for m in network.modules())
    return layers or attention > 0


def _mixed(key: int, place: int) -> int:
    """A seed from a seed and a place: splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    z = (key + place * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
