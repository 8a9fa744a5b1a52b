"""Updates of the shards that this rank holds, as updates.py makes them, the global
gradient norm, and loss scaling.

An update sees plain local tensors that share memory with the parameters: fused kernels
work on them, parameters of different meshes are updated together, and only the names and
the checkpoint know of the whole. The norm counts every element once, however it is
sharded or repeated. So all ranks decide alike on clipping, on numbers that are not finite
and on the scale of fp16, and they do it on the device: no value is copied to the host,
which would have to wait for the step."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from rekindle.errors import UnsupportedError
from rekindle.objectives.shards import divides
from rekindle.plan.inflight import stages_of
from rekindle.spec.model import TrainSpec
from rekindle.train import modules
from rekindle.train.attention import HALVES
from rekindle.train.mesh import Mesh, Ranks
from rekindle.train.parts import Parts
from rekindle.train.updates import UPDATES, Update
from rekindle.train.weights import local_of


@dataclasses.dataclass(frozen=True)
class _Trained:
    """A trainable parameter, and this rank's part of it."""

    name: str
    parameter: torch.Tensor
    local: torch.Tensor
    """Shares memory with the parameter."""
    holders: int
    """How many ranks hold the same part; 0: another parameter is counted in its place."""


class Optimizer:
    """The updates that `spec.optimizer` names, of the trainable parameters of `parts`."""

    def __init__(self, parts: Parts, spec: TrainSpec) -> None:
        self.parts = parts
        self.spec = spec
        self.trained: list[_Trained] = []
        for name, parameter in parts.parameters():
            if parameter.requires_grad:
                local = local_of(parameter).detach()
                holders = _holders(name, parameter, parts)
                self.trained.append(_Trained(name, parameter, local, holders))
        self.tied = _TiedPairs(parts, {weight.name: weight for weight in self.trained})
        self.scale = _LossScale(parts.mesh.device) if spec.precision == "fp16" else None
        self.update: Update = self._new_update()
        # what this rank adds to the norm
        self.counted = [
            weight for weight in self.trained if weight.holders and weight.local.numel()
        ]
        # each of the holders counts its part of a squared norm: summed over ranks they are one
        shares = [1 / weight.holders for weight in self.counted]
        self.shares = torch.tensor(shares, dtype=torch.float64, device=parts.mesh.device)

    def _new_update(self) -> Update:
        """The update that the spec names, on this rank's tensors.

        Raises UnsupportedError where an optimizer for matrices has none to work on."""
        name = self.spec.optimizer
        names_of_matrices = set[str]()
        if name != "adamw":
            for stage in self.parts.stages:
                names_of_matrices |= modules.matrices(stage.part.network)
        matrices = [weight.local for weight in self.trained if weight.name in names_of_matrices]
        if name != "adamw" and not matrices:
            kind = modules.model_type(self.parts.network)
            message = f"{name} updates matrices of transformer blocks, and {kind} has none to train"
            fix = "remove it: AdamW updates any network"
            raise UnsupportedError(message, where="train.optimizer", fix=fix)
        others = [weight.local for weight in self.trained if weight.name not in names_of_matrices]
        return UPDATES[name](matrices, others, self.spec)

    def facts(self) -> dict[str, str]:
        """What is in effect besides AdamW, in words for the record."""
        name = self.spec.optimizer
        return {} if name == "adamw" else {"optimizer": f"{name}, AdamW outside of matrices"}

    @property
    def loss_scale(self) -> float:
        """The factor of losses before the backward pass; reading it waits for the device."""
        return float(self.scale.value) if self.scale else 1.0

    def divided_by_scale(self, count: torch.Tensor) -> torch.Tensor:
        """`count` over the loss scale: a sum divided by this is a loss times the scale."""
        return count / self.scale.value.to(count.dtype) if self.scale else count

    def micro_batch_context(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a micro-batch, forward and backward, where there is no pipeline."""
        layout = self.parts.mesh.layout
        is_sharded = layout.shard * layout.cp > 1
        return synchronised(self.parts.stages[0].module, is_last, is_sharded)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradients of a micro-batch to those of the step.

        `is_last` is for other steppers: here `micro_batch_context` acts on it."""
        loss.backward()  # type: ignore[no-untyped-call]

    def collect(self) -> torch.Tensor:
        """Complete this rank's gradients; returns its share of the squared norm, float64 [].

        The norm is that of scaled gradients, if losses are scaled."""
        partial = []
        for weight in self.trained:
            weight.local.grad = _local_gradient(weight.parameter)
            if weight.name in self.parts.partial:
                partial.append(weight.local.grad)
        _add_up(partial, self.parts.mesh.group("tp"))
        self.tied.add_up()
        gradients = [weight.local.grad for weight in self.counted if weight.local.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.parts.mesh.device)
        has_halves = any(gradient.dtype in HALVES for gradient in gradients)
        # in half precision, squares of small gradients would vanish beside the sum
        summed_in = torch.float32 if has_halves else None
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=summed_in)).double()
        return (norms.square() * self.shares).sum()

    def step(self, rate: float, loss: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Update with the collected gradients; returns loss and norm, float64 [2].

        `loss` and `squares`, the squared norm over all ranks, are float64 [] and scaled;
        what is returned is not. Nothing is updated where one of them is not finite."""
        norm = squares.sqrt()
        if self.scale is not None:
            loss = loss / self.scale.value
            norm = norm / self.scale.value
        finite = loss.isfinite() & norm.isfinite()
        factor = torch.ones_like(norm)
        if self.spec.clip_norm is not None:
            # with the 1e-6 of torch.nn.utils.clip_grad_norm_
            factor = (self.spec.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.scale is not None:
            factor = factor / self.scale.value
        self.update.step(rate, factor, finite)
        if self.scale is not None:
            self.scale.update(finite)
        return torch.stack([loss, norm])

    def clear(self) -> None:
        """Forget all gradients."""
        for weight in self.trained:
            weight.local.grad = None
            weight.parameter.grad = None

    def finish_restore(self, loss_scale: Sequence[float] | None) -> None:
        """Set what `tensors` and the weights, filled from a checkpoint, leave open.

        `loss_scale` is the scale and the steps since it changed; None: there is none."""
        if self.scale is not None and loss_scale is not None:
            self.scale.value.fill_(loss_scale[0])
            self.scale.finite_steps.fill_(loss_scale[1])
        for source, copy in self.tied.pairs:
            # a checkpoint holds a pair once: under one name, the later of both, the copy,
            # was filled
            if source is not None and copy is not None:
                source.local.copy_(copy.local)
                for key, value in self.update.state[copy.local].items():
                    self.update.state[source.local][key].copy_(value)

    @property
    def replicas(self) -> Ranks:
        """The ranks that hold the same of `weights` and `tensors` as this one."""
        return self.parts.mesh.replicas

    def weights(self) -> dict[str, Any]:
        """What is trained, named after the parameter in the whole network."""
        has_adapters = self.parts.scaling is not None
        weights = {}
        for name, parameter in self.parts.parameters():
            # what stays as it was under adapters is filled from the source, not from a checkpoint
            if parameter.requires_grad or not has_adapters:
                weights[self.parts.tied.get(name, name)] = parameter.detach()
        return weights

    def tensors(self) -> dict[str, Any]:
        """Moments and step counts by parameter, sharded as it is; of a tied pair once."""
        state: dict[str, torch.Tensor] = {}
        for weight in self.trained:
            name = self.parts.tied.get(weight.name, weight.name)
            for key, value in self.update.state[weight.local].items():
                whole = value if key == "step" else _like(weight.parameter, value)
                state[f"{name}.{key}"] = whole
        return state


@contextlib.contextmanager
def synchronised(module: torch.nn.Module, is_last: bool, is_sharded: bool) -> Iterator[None]:
    """The context of a micro-batch, in which `module` sums gradients over ranks when it has to.

    Replicas sum once a step, in its last backward pass; shards in each, or FSDP would keep
    whole gradients from one micro-batch to the next."""
    if isinstance(module, DistributedDataParallel) and not is_last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last or is_sharded)
        module.set_requires_all_reduce(is_last)
        module.set_is_last_backward(is_last)
    yield


class _LossScale:
    """Loss scale of fp16 (Micikevicius et al. 2017, arXiv 1710.03740): halved after a
    step that overflowed, doubled after 2,000 in a row that did not. Its start and these
    2,000 are the defaults of torch.amp.GradScaler."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), 65_536.0, dtype=torch.float64, device=device)
        self.finite_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, finite: torch.Tensor) -> None:
        """Set the scale for the next step; `finite` (bool []) says how this one was.

        The device decides, by `where`: an `if` would wait for it."""
        self.finite_steps.copy_(torch.where(finite, self.finite_steps + 1, 0))
        grown = torch.where(self.finite_steps % 2_000 == 0, self.value * 2, self.value)
        halved = (self.value / 2).clamp(min=1.0)
        self.value.copy_(torch.where(finite, grown, halved))


def _add_up(gradients: list[torch.Tensor], group: Ranks) -> None:
    """Sum over the group, in place, by one collective: each small one would cost as much."""
    if not gradients:
        return
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(joined, group=group)
    parts = torch.split(joined, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


class _TiedPairs:
    """Tied parameters of which the first and the last stage hold a copy each.

    The gradient of either copy is the sum over both, so that the copies stay equal. A pair
    has None for a copy that another rank holds."""

    def __init__(self, parts: Parts, trained: Mapping[str, _Trained]) -> None:
        layout = parts.mesh.layout
        self.pairs: list[tuple[_Trained | None, _Trained | None]] = []
        if layout.pp > 1:
            self.pairs = [
                (trained.get(source), trained.get(copy)) for copy, source in parts.tied.items()
            ]
        indices_here = {stage.index for stage in parts.stages}
        self.both_here = {0, layout.stages - 1} <= indices_here
        # in zero bubble's V the first rank of a pipeline holds both ends
        are_apart = layout.stages - 1 not in stages_of(layout, 0)
        self.group = _group_of_ends(parts.mesh) if self.pairs and are_apart else None

    def add_up(self) -> None:
        """Give both copies the sum of their gradients."""
        for source, copy in self.pairs:
            if source is not None and copy is not None and self.both_here:
                total = source.local.grad + copy.local.grad  # type: ignore[operator]
                source.local.grad = total
                copy.local.grad = total.clone()
                continue
            weight = source or copy
            if weight is not None and self.group is not None:
                dist.all_reduce(weight.local.grad, group=self.group)


def _group_of_ends(mesh: Mesh) -> Ranks:
    """This rank's group with its partner at the pipeline's other end, if it is at an end.

    All ranks have to call it: a group is made by all, also by those outside of it."""
    assert mesh.ranks is not None
    grid = mesh.ranks.mesh.reshape(mesh.layout.pp, -1)
    group_of_this_rank = None
    for column in range(grid.shape[1]):
        ranks = [int(grid[0, column]), int(grid[-1, column])]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            group_of_this_rank = group
    return group_of_this_rank


def _holders(name: str, parameter: torch.Tensor, parts: Parts) -> int:
    """How many ranks hold the same part of a parameter; 0 where its copy is counted instead."""
    if parts.mesh.layout.pp > 1 and name in parts.tied:
        return 0
    shards = 1
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if divides(placement):
                shards *= mesh.size(axis)
    # without shards, all ranks of a pipeline rank hold the parameter
    return parts.mesh.layout.world // parts.mesh.layout.pp // shards


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter's gradient, summed over ranks where that is still to do.

    Zeros where the backward pass did not reach the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(local_of(parameter))
    if isinstance(gradient, DTensor):
        assert isinstance(parameter, DTensor)
        placements = []
        for placement in parameter.placements:
            placements.append(placement if divides(placement) else Replicate())
        if gradient.placements != tuple(placements):
            gradient = gradient.redistribute(placements=placements)
        return gradient._local_tensor
    return gradient


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` with the parameter's mesh and placements.

    Its rows may have another length than the parameter's: scales of 8-bit moments do."""
    if not isinstance(parameter, DTensor):
        return local
    shape = parameter.shape
    stride = parameter.stride()
    if local.shape != parameter._local_tensor.shape:
        shape = torch.Size((len(parameter), *local.shape[1:]))
        stride = local.stride()
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )
