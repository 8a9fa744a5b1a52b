"""Collectives between tensor-parallel peers that gradients pass through (Shoeybi et al. 2019, arXiv
1909.08053; along the sequence Korthikanti et al. 2022, arXiv 2205.05198).

A tensor is whole (each peer has all of it), a share (the peers' add up to it), or divided along its
second dimension. Where a whole tensor feeds divided matrices, its gradient comes back as shares;
each function here turns one kind into another, and gradients back. `group` is a process group's
name, because that is what a compiled graph can hold. Shapes: B rows, T tokens, H hidden."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_ops = torch.ops._c10d_functional


def group_name(group: dist.ProcessGroup) -> str:
    """What the functions here call the group."""
    return str(group.group_name)


def enter(whole: torch.Tensor, group: str) -> torch.Tensor:
    """The same tensor; its gradient is the sum of the peers' shares."""
    out: torch.Tensor = _Enter.apply(whole, group)  # type: ignore[no-untyped-call]
    return out


def add_up(share: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over peers, whole."""
    out: torch.Tensor = _AddUp.apply(share, group)  # type: ignore[no-untyped-call]
    return out


def gather(divided_BTH: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """[B, T / size, H] to [B, T, H]; gradients are shares."""
    out: torch.Tensor = _Gather.apply(divided_BTH, group, size)  # type: ignore[no-untyped-call]
    return out


def scatter(share_BTH: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The sum over peers, divided: [B, T, H] to [B, T / size, H]."""
    out: torch.Tensor = _Scatter.apply(share_BTH, group, size)  # type: ignore[no-untyped-call]
    return out


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _sum(grad, ctx.group), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: str) -> torch.Tensor:
        return _sum(share, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, divided_BTH: torch.Tensor, group: str, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return _joined(divided_BTH, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _summed_part(grad, ctx.group, ctx.size), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share_BTH: torch.Tensor, group: str, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return _summed_part(share_BTH, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _joined(grad, ctx.group, ctx.size), None, None


def _sum(x: torch.Tensor, group: str) -> torch.Tensor:
    out: torch.Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))
    return out


def _joined(x_BTH: torch.Tensor, group: str, size: int) -> torch.Tensor:
    by_peer = _ops.wait_tensor(_ops.all_gather_into_tensor(x_BTH.contiguous(), size, group))
    out: torch.Tensor = torch.unflatten(by_peer, 0, (size, -1)).transpose(0, 1).flatten(1, 2)
    return out


def _summed_part(x_BTH: torch.Tensor, group: str, size: int) -> torch.Tensor:
    by_peer = torch.unflatten(x_BTH, 1, (size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    out: torch.Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(by_peer, "sum", size, group))
    return out
