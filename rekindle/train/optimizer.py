"""Updates of the shards that this rank holds, as updates.py makes them, the learning rate of a
step, the global gradient norm, loss scaling.

An update sees plain local tensors that share memory with the parameters: fused kernels work, meshes
mix freely, and only the names and the checkpoint know of the whole. The norm counts every element
once, however it is sharded or repeated, so that clipping, the check for numbers that are not
finite, and the scale of fp16 are decided alike on all ranks, on the device: nothing is read."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from rekindle.engines import engine_of
from rekindle.engines.deepspeed import DeepSpeed, Zero
from rekindle.errors import UnsupportedError
from rekindle.plan.inflight import stages_of
from rekindle.spec.model import SCRATCH_LR, TrainSpec
from rekindle.train import modules
from rekindle.train.attention import HALVES
from rekindle.train.dcp import Piece
from rekindle.train.mesh import Mesh, Ranks
from rekindle.train.parallel import Parts
from rekindle.train.updates import UPDATES, Update
from rekindle.train.weights import divides, local_of


@dataclasses.dataclass(frozen=True)
class _Held:
    """A trainable parameter, its part here, and how many ranks hold that (0: another counts)."""

    name: str
    parameter: torch.Tensor
    local: torch.Tensor
    repeated: int


class Optimizer:
    """What `spec.optimizer` names, over `parts`."""

    def __init__(self, parts: Parts, spec: TrainSpec) -> None:
        self.parts, self.spec = parts, spec
        trained = ((name, p) for name, p in parts.parameters() if p.requires_grad)
        self.held = [_Held(n, p, local_of(p).detach(), _repeated(n, p, parts)) for n, p in trained]
        self.copies = _Copies(parts, {h.name: h for h in self.held})
        self.scale = _Scale(parts.mesh.device) if spec.precision == "fp16" else None
        self.update: Update = self._update()
        self.counted = [h for h in self.held if h.repeated and h.local.numel()]
        shares = [1 / h.repeated for h in self.counted]
        self.shares = torch.tensor(shares, dtype=torch.float64, device=parts.mesh.device)

    def _update(self) -> Update:
        """Raises UnsupportedError where the optimizer has no matrix to work on."""
        name, matrices = self.spec.optimizer, set[str]()
        if name != "adamw":
            for stage in self.parts.stages:
                matrices |= modules.matrices(stage.part.network)
        chosen = [h.local for h in self.held if h.name in matrices]
        if name != "adamw" and not chosen:
            kind = modules.model_type(self.parts.network)
            what = f"{name} updates matrices of transformer blocks, and {kind} has none to train"
            fix = "remove it: AdamW updates any network"
            raise UnsupportedError(what, where="train.optimizer", fix=fix)
        others = [h.local for h in self.held if h.name not in matrices]
        return UPDATES[name](chosen, others, self.spec)

    def facts(self) -> dict[str, str]:
        """What is in effect besides AdamW, in words for the record."""
        name = self.spec.optimizer
        return {} if name == "adamw" else {"optimizer": f"{name}, AdamW outside of matrices"}

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before the backward pass; waits for the device."""
        return float(self.scale.value) if self.scale else 1.0

    def scaled(self, count: torch.Tensor) -> torch.Tensor:
        """What a loss is divided by so that it is multiplied by the loss scale."""
        return count / self.scale.value.to(count.dtype) if self.scale else count

    def running(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around a micro-batch of a step without a pipeline, forward and backward."""
        layout = self.parts.mesh.layout
        return synchronised(self.parts.stages[0].module, last, layout.shard * layout.cp > 1)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of a micro-batch, of a step's `last` one."""
        loss.backward()  # type: ignore[no-untyped-call]

    def collect(self) -> torch.Tensor:
        """Gather gradients; this rank's share of the scaled, squared norm, float64 []."""
        partial = []
        for held in self.held:
            held.local.grad = _local_gradient(held.parameter)
            if held.name in self.parts.partial:
                partial.append(held.local.grad)
        _add_up(partial, self.parts.mesh.group("tp"))
        self.copies.add_up()
        gradients = [h.local.grad for h in self.counted if h.local.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.parts.mesh.device)
        half = any(gradient.dtype in HALVES for gradient in gradients)
        kind = torch.float32 if half else None  # sums of half precision would lose what is small
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=kind)).double()
        return (norms.square() * self.shares).sum()

    def step(self, rate: float, loss: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Update with the collected gradients, unless `loss` or the norm, the root of `squares`
        (float64 [], scaled both), is not finite; returns loss and norm, float64 [2], unscaled."""
        norm = squares.sqrt()
        if self.scale is not None:
            loss, norm = loss / self.scale.value, norm / self.scale.value
        finite = loss.isfinite() & norm.isfinite()
        factor = torch.ones_like(norm)
        if self.spec.clip_norm is not None:
            factor = (self.spec.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.scale is not None:
            factor = factor / self.scale.value
        self.update.step(rate, factor, finite)
        if self.scale is not None:
            self.scale.update(finite)
        return torch.stack([loss, norm])

    def clear(self) -> None:
        for held in self.held:
            held.local.grad = None
            held.parameter.grad = None

    def restored(self, loss_scale: Sequence[float] | None) -> None:
        """To be called when `tensors` and the weights have been filled from a checkpoint."""
        if self.scale is not None and loss_scale is not None:
            self.scale.value.fill_(loss_scale[0])
            self.scale.good.fill_(loss_scale[1])
        for source, copy in self.copies.pairs:
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
        tied, frozen = self.parts.tied, self.parts.scaling is not None
        saved = ((n, p) for n, p in self.parts.parameters() if p.requires_grad or not frozen)
        return {tied.get(name, name): p.detach() for name, p in saved}

    def tensors(self) -> dict[str, Any]:
        """Moments and step counts by parameter, sharded as it is; of copies one."""
        found: dict[str, torch.Tensor] = {}
        for held in self.held:
            name = self.parts.tied.get(held.name, held.name)
            for key, value in self.update.state[held.local].items():
                whole = value if key == "step" else _like(held.parameter, value)
                found[f"{name}.{key}"] = whole
        return found


@contextlib.contextmanager
def synchronised(module: torch.nn.Module, last: bool, sharded: bool) -> Iterator[None]:
    """Add up gradients over replicas in a step's last backward pass; of shards in each."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or sharded)
        module.set_requires_all_reduce(last)
        module.set_is_last_backward(last)
    yield


class _Scale:
    """Loss scale of fp16 (Micikevicius et al. 2017, arXiv 1710.03740): halved after a step that
    overflowed, doubled after 2,000 in a row that did not."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), 65_536.0, dtype=torch.float64, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, finite: torch.Tensor) -> None:
        """After a step; `finite` bool []."""
        self.good.copy_(torch.where(finite, self.good + 1, 0))
        more = torch.where(self.good % 2_000 == 0, self.value * 2, self.value)
        self.value.copy_(torch.where(finite, more, (self.value / 2).clamp(min=1.0)))


def _add_up(gradients: list[torch.Tensor], group: Ranks) -> None:
    """Sums over the group, in place; in one collective, because small ones cost as much as it."""
    if not gradients:
        return
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(joined, group=group)
    parts = torch.split(joined, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


class _Copies:
    """A tied parameter on the first and on the last stage: the two gradients are one sum."""

    def __init__(self, parts: Parts, held: dict[str, _Held]) -> None:
        self.pairs = (
            [(held.get(source), held.get(copy)) for copy, source in parts.tied.items()]
            if parts.mesh.layout.pp > 1
            else []
        )
        here = {stage.index for stage in parts.stages}
        self.both_here = {0, parts.mesh.layout.stages - 1} <= here
        apart = parts.mesh.layout.stages - 1 not in stages_of(parts.mesh.layout, 0)
        self.group = _ends(parts.mesh) if self.pairs and apart else None

    def add_up(self) -> None:
        for source, copy in self.pairs:
            if source is not None and copy is not None and self.both_here:
                total = source.local.grad + copy.local.grad  # type: ignore[operator]
                source.local.grad, copy.local.grad = total, total.clone()
            elif (one := source or copy) is not None and self.group is not None:
                dist.all_reduce(one.local.grad, group=self.group)


def _ends(mesh: Mesh) -> Ranks:
    """This rank's group with its partner at the pipeline's other end; all ranks have to call it."""
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
    # of a pipeline rank all would hold the same parameter if nothing were sharded
    return parts.mesh.layout.world // parts.mesh.layout.pp // shards


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
    """`local` with the parameter's mesh and placements; rows may have another length."""
    if not isinstance(parameter, DTensor):
        return local
    more: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    if local.shape != parameter._local_tensor.shape:
        more = {"shape": (len(parameter), *local.shape[1:]), "stride": local.stride()}
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, **more)


def peak_rate(spec: TrainSpec) -> float:
    """The rate after the warm-up; that of a training from scratch where the spec has none."""
    return SCRATCH_LR if spec.lr is None else spec.lr


def learning_rate(spec: TrainSpec, step: int, steps: int) -> float:
    """Rate used in step `step` (0-based) of `steps`: a linear warm-up, then constant, a line or
    half a cosine down to `min_lr_ratio` of the peak, or WSD.

    WSD (warm-up, stable, decay) is the schedule of MiniCPM (Hu et al. 2024, arXiv 2404.06395), with
    a line for the decay (Hägele et al. 2024, arXiv 2405.18392). With lr 1, no warm-up, cosine: step
    50 of 100 has 0.5; with wsd, decay 0.2 and min_lr_ratio 0.1, step 90 of 100 has 0.55."""
    peak, warmup_steps = peak_rate(spec), int(spec.warmup * steps)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if spec.lr_schedule == "constant":
        return peak
    if spec.lr_schedule == "wsd":
        left = min(1.0, (steps - step) / max(1, int(spec.decay * steps)))
    else:
        share = (step - warmup_steps) / max(1, steps - warmup_steps)
        cosine = spec.lr_schedule == "cosine"
        left = 0.5 * (1 + math.cos(math.pi * share)) if cosine else 1 - share
    return peak * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * left)


def start_engine(parts: Parts, train: TrainSpec) -> Parts | None:
    """The parts, with values, in the hands of the config's engine; None if it is rekindle's own."""
    engine = engine_of(train.engine)
    if not isinstance(engine, DeepSpeed):
        return None
    (stage,) = parts.stages
    known = modules.required(parts.network, "tensor-parallel") if parts.mesh.layout.tp > 1 else None
    divided = {"column": known.column, "row": known.row, "skip": known.per_head} if known else {}
    stepper = engine.start(stage.part, train, peak_rate(train), parts.mesh.device, divided)
    stages = (dataclasses.replace(stage, module=stepper.module),)
    return dataclasses.replace(parts, stages=stages, stepper=stepper)


class Stepped:
    """What `Optimizer` does, by a stepper."""

    scale = None
    replicas: Ranks = None  # each rank holds something else

    def __init__(self, parts: Parts, stepper: Zero) -> None:
        self.parts, self.stepper = parts, stepper

    def scaled(self, count: torch.Tensor) -> torch.Tensor:
        """Losses are not scaled here."""
        return count

    def running(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.stepper.backward(loss, last)

    def collect(self) -> torch.Tensor:
        """The engine finds the norm when it updates."""
        return torch.zeros((), dtype=torch.float64, device=self.parts.mesh.device)

    def step(self, rate: float, loss: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss, torch.full_like(loss, self.stepper.step(rate))])

    def clear(self) -> None:
        """The engine forgets gradients when it updates."""

    def restored(self, loss_scale: Sequence[float] | None) -> None:
        self.stepper.restored()

    def weights(self) -> dict[str, Any]:
        """Weights in full precision, as flat pieces."""
        return {n: p for n, p in self._pieces().items() if n.partition("@")[0] in self.names}

    def tensors(self) -> dict[str, Any]:
        """The engine's state beside them."""
        return {n: p for n, p in self._pieces().items() if n.partition("@")[0] not in self.names}

    def facts(self) -> dict[str, str]:
        return dict(self.stepper.facts())

    @property
    def names(self) -> set[str]:
        return {name for name, p in self.parts.parameters() if p.requires_grad}

    def _pieces(self) -> dict[str, Piece]:
        held = [(n, f) for n, f in self.stepper.fragments().items() if f.local.numel()]
        return {n: Piece(f.local, torch.Size([f.start]), torch.Size([f.count])) for n, f in held}
