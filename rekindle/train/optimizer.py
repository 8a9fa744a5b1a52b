"""AdamW on the shards that this rank holds, the global gradient norm, loss scaling.

The optimizer sees plain local tensors that share memory with the parameters: fused kernels work,
meshes mix freely, nothing goes through DTensor's dispatch. Only the names and the checkpoint know
of the whole. The norm counts every element of every parameter once, however it is sharded or
repeated, so that clipping, the check for numbers that are not finite, and the scale of fp16 are
decided alike on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from rekindle.spec.model import TrainSpec
from rekindle.train.mesh import Mesh
from rekindle.train.parallel import Parts
from rekindle.train.stages import stages_of
from rekindle.train.weights import divides, local_of

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class _Held:
    """A trainable parameter, what this rank holds of it, and how often the same elements exist
    among all ranks; 0 for a copy that another stage counts."""

    name: str
    parameter: torch.Tensor
    local: torch.Tensor
    repeated: int


class Optimizer:
    """AdamW over `parts`; matrices decay, one-dimensional parameters (biases, norms) do not."""

    def __init__(self, parts: Parts, spec: TrainSpec) -> None:
        self.parts, self.spec = parts, spec
        self.held = [
            _Held(name, p, local_of(p).detach(), _repeated(name, p, parts))
            for name, p in parts.parameters()
            if p.requires_grad
        ]
        self.copies = _Copies(parts, {h.name: h for h in self.held})
        self.scale = _Scale() if spec.precision == "fp16" else None
        groups: list[dict[str, Any]] = [
            {"params": [h.local for h in self.held if h.parameter.ndim > 1]},
            {"params": [h.local for h in self.held if h.parameter.ndim <= 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.lr, weight_decay=spec.weight_decay, fused=True,
        )  # fmt: skip
        for held in self.held:
            self.adam.state[held.local] = {
                "step": torch.tensor(0.0),
                **{name: torch.zeros_like(held.local) for name in MOMENTS},
            }

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before the backward pass."""
        return self.scale.value if self.scale else 1.0

    def collect(self) -> torch.Tensor:
        """Gather this rank's gradients; returns its share of the squared global norm, of scaled
        gradients, float64 []."""
        tensor_group = self.parts.mesh.group("tp")
        for held in self.held:
            held.local.grad = _local_gradient(held.parameter)
            if held.name in self.parts.partial:
                dist.all_reduce(held.local.grad, group=tensor_group)
        self.copies.add_up()
        counted = [h for h in self.held if h.repeated and h.local.numel()]
        if not counted:
            return torch.zeros((), dtype=torch.float64)
        gradients = [h.local.grad for h in counted if h.local.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        shares = torch.tensor([1 / h.repeated for h in counted], dtype=torch.float64)
        return (norms.square() * shares.to(norms.device)).sum().cpu()

    def step(self, rate: float, norm: float) -> None:
        """Update with the collected gradients, whose global norm is `norm` once unscaled."""
        factor = 1 / self.loss_scale
        if self.spec.clip_norm is not None:
            factor *= min(1.0, self.spec.clip_norm / (norm + 1e-6))
        # the fused kernel divides by it on the way, which saves a pass over all gradients
        self.adam.grad_scale = torch.full((), 1 / factor, device=self.parts.mesh.device)  # type: ignore[attr-defined]
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()

    def clear(self) -> None:
        """Forget the gradients."""
        for held in self.held:
            held.local.grad = None
            held.parameter.grad = None

    def restored(self, loss_scale: Sequence[float] | None) -> None:
        """To be called when `tensors` and the weights have been filled from a checkpoint."""
        if self.scale is not None and loss_scale is not None:
            self.scale.value, self.scale.good = float(loss_scale[0]), int(loss_scale[1])
        for source, copy in self.copies.pairs:
            if source is not None and copy is not None:
                source.local.copy_(copy.local)
                for key, value in self.adam.state[copy.local].items():
                    self.adam.state[source.local][key].copy_(value)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments and step counts by parameter, sharded as the parameter is; copies are left out
        of saving by having the same name."""
        found: dict[str, torch.Tensor] = {}
        for held in self.held:
            name = self.parts.tied.get(held.name, held.name)
            for key, value in self.adam.state[held.local].items():
                whole = value if key == "step" else _like(held.parameter, value)
                found[f"{name}.{key}"] = whole
        return found


class _Scale:
    """Loss scale of fp16 (Micikevicius et al. 2017, arXiv 1710.03740): halved after a step that
    overflowed, doubled after 2,000 in a row that did not."""

    def __init__(self) -> None:
        self.value, self.good = 65_536.0, 0

    def update(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good % 2_000 == 0:
            self.value *= 2


class _Copies:
    """A tied parameter on the first and on the last stage: the two gradients are one sum."""

    def __init__(self, parts: Parts, held: dict[str, _Held]) -> None:
        self.pairs = [
            (held.get(source), held.get(copy)) for copy, source in parts.tied.items()
        ] if parts.mesh.layout.pp > 1 else []  # fmt: skip
        here = {stage.index for stage in parts.stages}
        self.both_here = {0, parts.mesh.layout.stages - 1} <= here
        self.group = _ends(parts.mesh) if self.pairs and _apart(parts.mesh) else None

    def add_up(self) -> None:
        """Give both the sum of the two gradients."""
        for source, copy in self.pairs:
            if source is not None and copy is not None and self.both_here:
                total = source.local.grad + copy.local.grad  # type: ignore[operator]
                source.local.grad, copy.local.grad = total, total.clone()
            elif (one := source or copy) is not None and self.group is not None:
                dist.all_reduce(one.local.grad, group=self.group)


def _apart(mesh: Mesh) -> bool:
    """Whether first and last stage lie on different ranks."""
    return mesh.layout.stages - 1 not in stages_of(mesh.layout, 0)


def _ends(mesh: Mesh) -> dist.ProcessGroup | None:
    """This rank's group with its partner at the other end of the pipeline; all ranks have to
    call it."""
    assert mesh.ranks is not None
    grid = mesh.ranks.mesh.reshape(mesh.layout.pp, -1)
    mine = None
    for column in range(grid.shape[1]):
        ranks = [int(grid[0, column]), int(grid[-1, column])]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _repeated(name: str, parameter: torch.Tensor, parts: Parts) -> int:
    if parts.mesh.layout.pp > 1 and name in parts.tied:
        return 0
    shards = 1
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            shards *= mesh.size(axis) if divides(placement) else 1
    return parts.mesh.same_weights() // shards


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(local_of(parameter))
    if isinstance(gradient, DTensor):
        assert isinstance(parameter, DTensor)
        wanted = tuple(p if divides(p) else Replicate() for p in parameter.placements)
        if gradient.placements != wanted:
            gradient = gradient.redistribute(placements=wanted)
        return gradient._local_tensor
    return gradient


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as a DTensor with the parameter's mesh and placements, or as it is."""
    if not isinstance(parameter, DTensor):
        return local
    more: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, **more
    )
